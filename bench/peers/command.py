"""`shoal bench engine --peers`: runs the comparison and writes what it found."""

import signal
from collections.abc import Sequence
from pathlib import Path

import click

from bench.figures import Figures, show_phase, write
from bench.peers import report
from bench.peers.run import Outcome, measure_round, set_up, vocabulary
from engine.user_cache import user_cache


def bench_peers(
    rounds: int,
    threads: int,
    json_path: Path | None,
    plot_path: Path | None,
    root: Path | None,
    without: Sequence[str] = (),
) -> None:
    """Prints a table. A peer that is missing is said and fails nothing; what was measured before
    Ctrl-C is reported."""
    # By its default action no `finally` would run, and a peer's server would stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = Outcome()

    entries = set_up(root or user_cache() / "peers", threads, outcome, show_phase)
    outcome.missing |= dict.fromkeys(without, "left out by --without")
    try:
        for number in range(1, rounds + 1):
            measure_round(entries, number, vocabulary(), outcome, show_phase)
            if json_path is not None:
                write(_figures(outcome, threads), json_path)
    except KeyboardInterrupt:
        if not outcome.rounds:
            raise
    if plot_path is not None:
        from bench.peers.plot import draw

        what = f"SmolLM2-135M-Instruct, bf16, {threads} threads, median of {len(outcome.rounds)}"
        draw(outcome.rounds, f"{what}; whiskers: least and most", plot_path)
    click.echo(report.table(outcome.rounds, outcome.missing, outcome.flags))


def _figures(outcome: Outcome, threads: int) -> Figures:
    head: Figures = {
        "benchmark": "peers",
        "threads": threads,
        "rounds": len(outcome.rounds),
    }
    return head | report.flat(outcome.rounds, outcome.missing, outcome.flags)
