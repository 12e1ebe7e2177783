"""A Ray cluster of one node that lives and dies with this process.

Invariant: everything started here ends with the block that started it, or with this process however
that ends, and nothing else on the machine is touched: no other Ray cluster is joined, found or
stopped. All its files are in one private folder; it listens on loopback, but for one socket of each
Serve replica that Serve binds everywhere, and all of it answers only to the token in that folder.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cluster import haproxy
from cluster.reaper import Reaper, kill_marked, marked

OBJECT_STORE_BYTES = 80_000_000
"""Near Ray's least: no token and no weight passes through it."""
_STOP_GRACE_S = 5.0
_TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
"""Ray's own; as it names a file of this cluster alone, it also marks what this cluster started."""


class LocalRay:
    """Use `started()`. The folder is kept when the block fails, for the logs in it."""

    def __init__(self, use_haproxy: bool = False) -> None:
        self._use_haproxy = use_haproxy
        # In /tmp itself, because a socket's path has room for 107 characters and Ray needs most.
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-", dir="/tmp"))
        self.socket_folder = self.folder / "engine"
        self.socket_folder.mkdir(mode=0o700)
        self._token = self.folder / "token"
        self.mark = f"{_TOKEN_VARIABLE}={self._token}"
        """In the environment of every process of this cluster."""

    @property
    def log_folder(self) -> Path:
        return self.folder / "ray" / "session_latest" / "logs"

    @contextlib.contextmanager
    def started(self, num_cpus: int) -> Iterator[None]:
        """A running cluster. Call it from the main thread: Ray's processes end with the thread
        that started them."""
        keep = False
        reaper = Reaper(self.mark, self.folder)
        try:
            self._prepare()
            self._start(num_cpus)
            yield
        except Exception:
            keep = self.log_folder.is_dir()
            raise
        finally:
            self._stop()
            reaper.dismiss()
            if not keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends all of it at once, without asking. For a user who cannot wait."""
        kill_marked(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _prepare(self) -> None:
        """What Ray and Serve read from the environment."""
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(
            {_TOKEN_VARIABLE: str(self._token)},
            RAY_AUTH_MODE="token",
            RAY_USAGE_STATS_ENABLED="0",
            # Ray's name for "one node only": its servers then listen on loopback.
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            # Our code never blocks its event loop, so it can have Serve's: a loop of its own in
            # another thread costs every streamed token a queue and a wake-up.
            RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD="0",
            RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP="0",
            # A replica that is to end first waits this long for load balancers to notice, 30 s
            # by default; here there is one, and it is told at once.
            RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
            # Ray runs its workers at nice 15, to spare the node's own daemons; here they serve.
            RAY_worker_niceness="0",
        )
        if self._use_haproxy:
            os.environ.update(haproxy.loopback_environment(self.folder / "haproxy"))

    def _start(self, num_cpus: int) -> None:
        import ray

        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self.folder / "ray"),
        )

    def _stop(self) -> None:
        import ray

        ray.shutdown()
        end_s = time.monotonic() + _STOP_GRACE_S
        while marked(self.mark) and time.monotonic() < end_s:
            time.sleep(0.05)
        kill_marked(self.mark)
