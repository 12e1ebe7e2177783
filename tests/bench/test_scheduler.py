"""`shoal bench scheduler`, in its quick form."""

import json
from pathlib import Path

from click.testing import CliRunner

from bench.cli import bench


def test_quick_figures_are_flat_and_classes_help(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    result = CliRunner().invoke(bench, ["scheduler", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["plan_us_p99_16"] > figures["plan_us_p50_16"] > 0
    assert figures["p95_ratio_dynamic_vs_fifo"] > 2
    assert figures["batch_throughput_loss_pct"] < 10
