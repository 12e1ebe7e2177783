"""Ratios, medians, the table and the picture, from figures given."""

import pytest

from bench.peers.report import flat, medians, ratios, table

ROUNDS = [
    {
        "shoal": {"w1_tokens_per_s": 60.0, "ready_s": 8.0},
        "vllm": {"w1_tokens_per_s": 40.0, "ready_s": 80.0},
        "vllm_eager": {"ready_s": 24.0},
    },
    # A slow minute: both take twice as long, and the ratio stays.
    {
        "shoal": {"w1_tokens_per_s": 30.0, "ready_s": 16.0},
        "vllm": {"w1_tokens_per_s": 20.0, "ready_s": 160.0},
        "vllm_eager": {"ready_s": 64.0},
    },
    {"shoal": {"w1_tokens_per_s": 62.0, "ready_s": 8.0}, "vllm": {"w1_tokens_per_s": 31.0}},
]


def test_a_ratio_is_taken_within_a_round_and_above_one_where_shoal_is_faster() -> None:
    found = ratios(ROUNDS)
    assert found["w1_vs_vllm"] == 1.5
    assert (found["w1_vs_vllm_min"], found["w1_vs_vllm_max"]) == (1.5, 2.0)
    assert found["ready_vs_vllm"] == 10.0
    assert found["ready_vs_vllm_eager"] == 3.5
    assert not [key for key in found if "llamacpp" in key or "w3" in key]


def test_medians_are_of_the_rounds_that_have_the_figure() -> None:
    assert medians(ROUNDS) == {
        "shoal_w1_tokens_per_s": 60.0,
        "shoal_ready_s": 8.0,
        "vllm_w1_tokens_per_s": 31.0,
        "vllm_ready_s": 120.0,
        "vllm_eager_ready_s": 44.0,
    }


def test_the_table_has_a_column_an_engine_and_says_who_is_missing_and_why() -> None:
    text = table(ROUNDS, {"llamacpp": "no compiler"}, {"vllm": "dtype=bfloat16"})
    head, _, w1, w2, *_ = text.splitlines()
    assert head == "| median of 3 | Shoal | vLLM | vLLM, eager |"
    assert w1 == "| W1: one stream, tok/s | 60 | 31 (1.50×) | – |"
    assert w2.endswith("| – | – | – |")
    assert "- vLLM: dtype=bfloat16" in text
    assert text.endswith("- llama.cpp is missing: no compiler")


def test_a_machine_that_was_not_quiet_is_said_and_one_that_was_is_not() -> None:
    loud = [{"shoal": {"w1_tokens_per_s": 60.0, "other_cores": 0.02}}, {"vllm": {"other_cores": 1}}]
    assert "up to 1.00 cores" in table(loud, {}, {})
    assert flat(loud, {}, {})["other_cores_max"] == 1
    assert "quiet" not in table(loud[:1], {}, {})


def test_flat_holds_figures_flags_and_reasons() -> None:
    found = flat(ROUNDS, {"llamacpp": "no compiler"}, {"shoal": "threads=2"})
    assert found["shoal_flags"] == "threads=2"
    assert found["llamacpp_missing"] == "no compiler"
    assert all(isinstance(value, float | int | str) for value in found.values())


def test_nothing_measured_gives_an_empty_table() -> None:
    assert ratios([]) == medians([]) == {}
    assert "is missing: x" in table([], {"vllm": "x"}, {})


def test_the_picture_is_a_png(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from bench.peers.plot import draw

    path = tmp_path / "peers.png"
    draw(ROUNDS, "what it was", path)
    assert path.read_bytes().startswith(b"\x89PNG")
