"""The progress of a run on stderr: one line that is written over on a terminal, else one every ten
seconds.

Invariant: it only reads. What is waited for is shown as soon as it is, and again when it is over.
"""

import asyncio
import sys
from collections.abc import Callable

import click

from cluster.batch.intake import RowCount
from cluster.batch.report import Rates, Tally, fitted, progress

_TERMINAL_PERIOD_S = 0.25
_LINE_PERIOD_S = 10.0
_CLEAR = "\r\x1b[K"


class Display:
    """Of one run."""

    def __init__(self, tally: Tally, count: RowCount) -> None:
        self._tally = tally
        self._count = count
        self._rates = Rates()
        self._is_terminal = sys.stderr.isatty()
        self._was_waiting = False
        self._next_line_s = 0.0

    async def run(self, waiting: Callable[[], str]) -> None:
        """Until cancelled. `waiting` says what is waited for, or nothing."""
        self._count.start()
        loop = asyncio.get_running_loop()
        self._next_line_s = loop.time() + _LINE_PERIOD_S
        try:
            while True:
                self._show(loop.time(), waiting())
                await asyncio.sleep(_TERMINAL_PERIOD_S)
        finally:
            if self._is_terminal:
                click.echo(_CLEAR, err=True, nl=False)

    def _show(self, now_s: float, waiting: str) -> None:
        self._rates.see(now_s, self._tally)
        line = waiting or progress(self._tally, self._rates, self._count.total)
        if self._is_terminal:
            click.echo(_CLEAR + fitted(line), err=True, nl=False)
        elif now_s >= self._next_line_s or bool(waiting) != self._was_waiting:
            self._next_line_s = now_s + _LINE_PERIOD_S
            click.echo(line, err=True)
        self._was_waiting = bool(waiting)
