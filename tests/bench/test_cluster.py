"""`shoal bench cluster`, in its quick form: the direction of its figures, and its clock."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.cluster.run import Ladder
from bench.cluster.shape import PUBLISHED, QUARTER, Prompts


def test_the_published_shape_is_what_was_published() -> None:
    assert PUBLISHED.cached_pct() == pytest.approx(73.2, abs=0.1)
    assert PUBLISHED.num_blocks * 16 == PUBLISHED.kv_tokens
    prompts = list(islice(Prompts(replace(QUARTER, num_groups=4)), 24))
    assert len({prompt.keys[-1] for prompt in prompts[:12]}) == 12
    assert len({prompt.keys[0] for prompt in prompts}) == 4
    assert {prompt.keys[-1] for prompt in prompts[:12]} == {p.keys[-1] for p in prompts[12:]}
    root = Prompts(QUARTER).root
    assert all(prompt.keys == root.keys(prompt.token_ids) for prompt in prompts)


def test_a_run_is_the_same_each_time_and_users_get_all_their_tokens() -> None:
    ladder = Ladder(replace(QUARTER, output_tokens=7), "prefix", (5, 50), 60, num_ingresses=2)
    stages, again = ladder.climb(), ladder.climb()
    assert stages == again
    for stage in stages:
        assert stage.num_output_tokens == 60 * 7
        assert len(stage.ttft_s) == 60
        assert min(stage.ttft_s) > QUARTER.step_s
    assert stages[1].ttft_percentile_s(50) > stages[0].ttft_percentile_s(50)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_figures_are_flat_and_affinity_wins(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    result = CliRunner().invoke(bench, ["cluster", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["throughput_ratio_vs_round_robin"] > 1.5
    assert figures["ttft_p90_ratio_vs_round_robin"] > 5
    assert figures["low_load_loss_pct"] < 2
    assert figures["hit_rate_spread_pct"] < 10
    assert figures["real_throughput_ratio_vs_round_robin"] > 1.2
    assert figures["real_ttft_p90_ratio_vs_round_robin"] > 1.5
