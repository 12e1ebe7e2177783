"""The file of outcomes: one line a row, over any number of runs that were ended in any way.

Invariants:

- The file is append-only. A line is written whole, by one `write`, after its row has its outcome;
  lines are in the order in which rows were finished.
- When it is opened, what is left of a line that was being written is cut off, and every row with a
  whole line is recorded in the index; so a row whose line was cut is run again, and no other.
- One process at a time: the file is held by `flock` as long as it is open.
- `--retry-failed` takes errors out by writing the rest to a new file, which then replaces the old
  one: at any moment there is the one or the other, whole.

What was written survives the process at once, and the machine after `sync`, which the run calls
about every second and at the end: a power failure costs at most the rows of the last second, which
are run again. A file that holds anything but outcomes is refused, not cut.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import BinaryIO, Self

from cluster.batch import records
from cluster.batch.index import RowIndex
from engine.errors import ShoalError

_MAX_LINE_BYTES = 4 * records.MAX_ANSWER_BYTES
"""Longer than any line that is written."""
_NEW_FILE_MODE = 0o666
"""Less the umask."""


class OutputError(ShoalError):
    """The output cannot be used, or not any more."""


class OutputFile:
    """An open, locked output."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = 0
        self._is_synced = True

    @classmethod
    def open(cls, path: Path, index: RowIndex, retry_failed: bool = False) -> Self:
        """Makes the file if there is none; records in `index` what is in it. `retry_failed` takes
        the errors out first. Raises `OutputError`."""
        real_path = Path(os.path.realpath(path))
        try:
            output = cls(real_path, _lock(real_path))
            try:
                output._take_over(index, retry_failed)
            except BaseException:
                output.close()
                raise
        except OSError as error:
            raise OutputError(f"cannot use {path}: {error.strerror}") from error
        return output

    def append(self, line: bytes) -> None:
        """Raises `OutputError` if the line could not be written; then nothing of it is there."""
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.ftruncate(self._descriptor, self._size)
                raise OutputError(f"cannot write to {self._path}: no space left")
        except OSError as error:
            raise OutputError(f"cannot write to {self._path}: {error.strerror}") from error
        self._size += written
        self._is_synced = False

    def sync(self) -> None:
        """Until it is on the disk. May run in a thread beside `append`."""
        if not self._is_synced:
            self._is_synced = True
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise OutputError(f"cannot write to {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._descriptor)

    # ------------------------------------------------------------------ what is there

    def _take_over(self, index: RowIndex, retry_failed: bool) -> None:
        temporary = self._path.with_name(f".{self._path.name}.shoal-batch")
        # Of a run that was ended while it took errors out: the lock says that it is nobody's.
        temporary.unlink(missing_ok=True)
        if retry_failed and self._without_failed(temporary):
            self._replace_by(temporary)
        with open(self._path, "rb") as file:
            for line, record in self._records(file):
                self._size += len(line)
                index.record(record.key, record.failed)
        os.ftruncate(self._descriptor, self._size)

    def _records(self, file: BinaryIO) -> Iterator[tuple[bytes, records.Record]]:
        """Each line and what it says, up to one that was cut, which can only be the last."""
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if record := records.read(line):
                yield line, record
            elif records.may_be_cut(line) and not file.read(1):
                return
            else:
                raise OutputError(
                    f"{self._path} is no output of shoal batch (line {number}): choose another file"
                )

    def _without_failed(self, copy: Path) -> bool:
        """Copies all but the errors; whether there were any."""
        found = False
        with open(self._path, "rb") as old, open(copy, "wb") as new:
            os.fchmod(new.fileno(), S_IMODE(os.fstat(self._descriptor).st_mode))
            for line, record in self._records(old):
                found = found or record.failed
                if not record.failed:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        if not found:
            copy.unlink()
        return found

    def _replace_by(self, copy: Path) -> None:
        # Locked before it has the name, so that nobody else can get hold of it.
        descriptor = os.open(copy, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(copy, self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        _sync_folder(self._path.parent)


def _lock(path: Path) -> int:
    """A descriptor of the file that has the name, locked."""
    while True:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, _NEW_FILE_MODE)
        try:
            if not S_ISREG(os.fstat(descriptor).st_mode):
                raise OutputError(f"{path} must be a file")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(f"{path} is being written by another shoal batch") from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    _sync_folder(path.parent)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Replaced between opening and locking, by a run that took errors out.
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Makes a new name last. Not every file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
