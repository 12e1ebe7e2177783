"""`shoal bench failover`, in its quick form."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench


@pytest.mark.slow
def test_quick_figures_say_that_nobody_noticed(tmp_path: Path) -> None:
    path = tmp_path / "failover.json"
    result = CliRunner().invoke(bench, ["failover", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["finished_pct"] == figures["identical_pct"] == 100
    assert figures["client_errors"] == 0
    assert (figures["kills"], figures["stops"]) == (1, 1)
    assert figures["kill_recovery_p50_s"] > 0
    assert figures["poison_good_finished"] == 50
    assert figures["poison_cores_died"] == 2
    assert figures["poison_status"] == 500
