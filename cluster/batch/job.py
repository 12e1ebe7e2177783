"""One run of a batch, from its files to its end.

Invariant: however it ends, what was answered by then is in the output and on the disk, and the
same command goes on from there. A signal stops it at once: what is on its way is given up, its
connections are closed. A second signal does not wait for that.
"""

import asyncio
import contextlib
import os
import resource
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import click

from cluster.batch.display import Display
from cluster.batch.index import RowIndex
from cluster.batch.intake import RowCount, check_input, pending
from cluster.batch.output import OutputFile
from cluster.batch.report import Tally
from cluster.batch.runner import Limits, Runner
from cluster.batch.server import Server, Target

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OTHER_FILES = 64
"""Open files beside the connections."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run."""

    source: Path
    target: Path
    server: Target
    limits: Limits
    default_model: str | None = None
    retry_failed: bool = False


def run(job: Job, tally: Tally) -> int | None:
    """Counts in `tally`. The number of the signal that ended it; None if every row has its outcome.

    Raises `ShoalError`."""
    check_input(job.source, job.target)
    index = RowIndex()
    with contextlib.closing(OutputFile.open(job.target, index, job.retry_failed)) as output:
        if index.num_recorded:
            click.echo(f"{job.target} has {index.num_recorded:,} rows already", err=True)
        try:
            return asyncio.run(_run(job, index, output, tally))
        finally:
            output.sync()


async def _run(job: Job, index: RowIndex, output: OutputFile, tally: Tally) -> int | None:
    interrupts = _Interrupts()
    interrupts.install()
    limits = replace(job.limits, concurrency=_allow_connections(job.limits.concurrency))
    try:
        with open(job.source, "rb") as source:
            async with Server(job.server) as server:
                runner = Runner(server, output, tally, limits)
                display = Display(tally, RowCount(job.source))
                showing = asyncio.create_task(display.run(lambda: runner.watch.waiting))
                try:
                    await runner.run(pending(source, index, tally, job.default_model))
                finally:
                    showing.cancel()
                    await asyncio.wait({showing})
    except asyncio.CancelledError:
        if interrupts.signal is None:
            raise
    return interrupts.signal


class _Interrupts:
    """Signals that end the task which made it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._task = asyncio.current_task()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # `nohup` has a closed terminal ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, int(number))

    def _on_signal(self, number: int) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        click.echo("\nstopping (again: at once)", err=True)
        assert self._task is not None
        self._task.cancel()


def _allow_connections(wanted: int) -> int:
    """How many of them this process may have; raises its soft limit on open files if that helps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))
