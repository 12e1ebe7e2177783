"""What Shoal keeps on a machine between runs, and the lock for making it.

Invariant: the kernel releases a lock when its holder dies, however it dies.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/shoal``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which is created; `on_wait` is called if another process
    holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
