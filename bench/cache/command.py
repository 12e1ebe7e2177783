"""`shoal bench cache`: its options."""

import json
from pathlib import Path

import click

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
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def cache(traces: Path, quick: bool, json_path: Path | None) -> None:
    """The prefix cache by itself: cost a block by size, hit rate against LRU and the optimum."""
    from bench.cache.run import FULL, QUICK, bench_cache

    figures = bench_cache(
        QUICK if quick else FULL, traces, lambda phase: click.echo(phase, err=True)
    )
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
