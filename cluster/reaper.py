"""Ends what a command has started, also when the command itself was killed.

Invariant: only processes that carry the command's own mark are touched. The mark is an environment
variable that names its private folder; it is inherited by all that the command starts, and by
nothing else. (Ray's daemons end with their parent, but two of its agents outlive a killed one.)
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_ROUNDS = 5
"""A process may start another while it is being killed."""


def marked(mark: str) -> set[int]:
    """Live processes of this user that were started with `mark` (NAME=VALUE), but not this one."""
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # A zombie's environment reads as empty.
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def kill_marked(mark: str) -> None:
    """Kills them by process id."""
    for _ in range(_ROUNDS):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Reaper:
    """A small process that waits for this one to end, then kills what carries `mark` and removes
    `folder`. Start it before the mark is set."""

    def __init__(self, mark: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.reaper", mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C at the terminal is not for it.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """All has been ended in order."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def main() -> None:
    """Arguments: the mark and the folder. Waits for the end of stdin."""
    mark, folder = sys.argv[1:]
    sys.stdin.buffer.read()
    kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
