"""The rows of an input that have no outcome yet.

Invariant: an input is read once from its beginning, a line at a time and only as rows are asked
for; each row is counted, and one that the output has already is skipped.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cluster.batch.index import RowIndex, Standing
from cluster.batch.report import Tally
from cluster.batch.rows import BadRow, Row, met, parse, read_lines
from engine.errors import ShoalError

_READ_BYTES = 1 << 20


class InputError(ShoalError):
    """The input cannot be read."""


def pending(
    file: BinaryIO, index: RowIndex, tally: Tally, default_model: str | None
) -> Iterator[Row | BadRow | None]:
    """None for a row that is skipped, so that whoever reads can do something else in between.

    Raises `InputError`."""
    lines = read_lines(file)
    while True:
        try:
            line = next(lines, None)
        except OSError as error:
            raise InputError(f"cannot read the input: {error.strerror}") from error
        if line is None:
            return
        row, standing = met(parse(line, default_model), index)
        tally.rows += 1
        if standing is Standing.NEW:
            yield row
            continue
        tally.skipped += 1
        tally.failed_before += standing is Standing.FAILED
        yield None


class RowCount:
    """Counts the lines of a file beside the run: a large one need not be read to its end before the
    first row is sent. For progress only; blank lines count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.total: int | None = None
        """None while it is not known."""

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        count, last = 0, b"\n"
        try:
            with open(self._path, "rb", buffering=0) as file:
                while data := file.read(_READ_BYTES):
                    count += data.count(b"\n")
                    last = data[-1:]
        except OSError:
            return
        self.total = count + (last != b"\n")


def check_input(source: Path, target: Path) -> None:
    """Raises `InputError` for one that cannot be a batch's input."""
    if source.exists() and not source.is_file():
        # A pipe could not be read again by the next run.
        raise InputError(f"{source} must be a file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}") from error
    if target.exists() and os.path.samefile(source, target):
        raise InputError(f"{target} is the input itself: choose another output")
