"""`shoal bench router`, in its quick form."""

import json
from pathlib import Path

from click.testing import CliRunner

from bench.cli import bench


def test_quick_figures_are_flat_and_a_decision_is_fast(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    result = CliRunner().invoke(bench, ["router", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["route_us_p99_128x64"] > figures["route_us_p50_128x64"] > 0
    # Several times what it takes on a quiet machine.
    assert figures["route_us_p50_128x64"] < 1000
    assert figures["index_bytes_per_held_key_8"] < figures["index_bytes_per_held_key_1"] < 1000
    assert figures["route_us_p50_128x64_bloom"] < 1000
    assert figures["route_bloom_replicas"] > 50
    assert figures["index_memory_cap_bytes"] < 16 * figures["index_keys_offered"]
    assert figures["index_memory_peak_bytes"] <= figures["index_memory_cap_bytes"]
    assert figures["index_bloom_replicas"] == 8
    assert figures["index_false_positive_pct"] < 2
