"""`shoal bench engine` on the simulated executor: the engine's own parts, without a model."""

import json
from pathlib import Path

from click.testing import CliRunner

from bench.cli import bench


def test_figures_of_a_simulated_engine(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    result = CliRunner().invoke(
        bench, ["engine", "--simulated", "--rounds", "1", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert (figures["benchmark"], figures["executor"]) == ("engine", "simulated")
    assert figures["rounds"] == 1
    # 64 requests share 512 tokens; a warm round finds all but the last block of each.
    assert figures["w3_warm_cached_tokens"] >= 64 * 560
    assert figures["w3_cold_cached_tokens"] <= 63 * 512
    rates = [value for key, value in figures.items() if key.endswith("tokens_per_s")]
    assert len(rates) == 5
    assert all(rate > 0 for rate in rates)
