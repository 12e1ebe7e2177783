"""`shoal bench cache`: its options."""

from pathlib import Path

import click

from bench.figures import json_option, report, show_phase

# Where the data folder lies beside a checkout.
_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


@click.command(epilog="Example: shoal bench cache --json cache.json")
@click.option(
    "--traces",
    type=click.Path(file_okay=False, path_type=Path),
    default=_TRACES,
    help="Folder of mooncake_{conversation,synthetic}.jsonl.gz; without them, those are skipped.",
)
@click.option("--quick", is_flag=True, help="1,000 blocks and short replays: seconds, for tests.")
@json_option
def cache(traces: Path, quick: bool, json_path: Path | None) -> None:
    """The prefix cache by itself: cost a block by size, hit rate against LRU and the optimum."""
    from bench.cache.run import FULL, QUICK, bench_cache

    figures = bench_cache(QUICK if quick else FULL, traces, show_phase)
    report(figures, json_path)
