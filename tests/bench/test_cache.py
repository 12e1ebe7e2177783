"""`shoal bench cache`: its references are right, and its figures come out flat."""

import json
from pathlib import Path
from random import Random

from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache.costs import filled_cache
from bench.cache.replay import Chain, replay_cache, replay_lru, replay_optimum
from bench.cache.rivals import _OrderedDictLru, _RadixTree, _sorted_match
from bench.cache.workloads import long_chains, mixed_queries, num_distinct, trace_like_chains
from bench.cli import bench


def chains_of(*words: str) -> list[Chain]:
    """A block a letter; a key is its prefix."""
    return [[word[: i + 1].encode() for i in range(len(word))] for word in words]


def test_lru_gives_up_the_end_of_the_oldest_chain() -> None:
    chains = chains_of("abc", "xy", "abc", "xy")
    # "xy" takes the place of "c", and so on in turn.
    assert replay_lru(chains, 4).found == [0, 0, 2, 1]
    assert replay_lru(chains, 5).found == [0, 0, 3, 2]


def test_the_optimum_keeps_what_comes_back() -> None:
    chains = chains_of("ab", "cd", "ef", "ab")
    assert replay_lru(chains, 2).found == [0, 0, 0, 0]
    assert replay_optimum(chains, 2).found == [0, 0, 0, 2]


_words = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=30)


@given(_words, st.integers(5, 12))
@settings(deadline=None)
def test_no_policy_beats_the_optimum(words: list[str], num_blocks: int) -> None:
    chains = chains_of(*words)
    best = sum(replay_optimum(chains, num_blocks).found)
    assert sum(replay_lru(chains, num_blocks).found) <= best
    assert sum(replay_cache(chains, num_blocks).found) <= best


@given(_words)
@settings(deadline=None)
def test_all_policies_find_the_same_when_there_is_room(words: list[str]) -> None:
    chains = chains_of(*words)
    found = replay_cache(chains, 70).found
    assert found == replay_lru(chains, 70).found == replay_optimum(chains, 70).found


def test_all_structures_find_the_same() -> None:
    rng = Random(1)
    chains = long_chains(rng, 1000, 64)
    assert num_distinct(chains) == 1000
    queries = [*mixed_queries(rng, chains, 64, 100), *mixed_queries(rng, chains, 5, 20)]
    cache = filled_cache(chains, 1000)
    expected = [cache.match(keys) for keys in queries]
    assert len(set(expected)) > 20
    matches = [_OrderedDictLru(chains).match, _RadixTree(chains).match, _sorted_match(chains)]
    for match in filter(None, matches):
        assert [match(keys) for keys in queries] == expected


def test_the_cache_is_no_worse_than_lru_on_chains_like_a_trace() -> None:
    rng = Random(5)
    chains = trace_like_chains(rng, 20_000)
    own, lru = replay_cache(chains, 4_000), replay_lru(chains, 4_000)
    assert 10 < lru.rate_pct < 90
    assert own.rate_pct >= lru.rate_pct - 0.5


def test_quick_figures_are_flat_and_say_what_was_skipped(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    arguments = ["cache", "--quick", "--traces", str(tmp_path), "--json", str(path)]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert "cost with 1k blocks cached" in result.stderr
    for key in ("lookup_ns_per_block_128_1k", "evict_full_ns_per_block_1k", "hit_pct_scan"):
        assert figures[key] > 0
    assert figures["hit_rate_swing_pct_1k"] > -10
    assert "mooncake_conversation.jsonl.gz is not in" in figures["skipped"]
    assert not any(key.startswith("hit_pct_conversation") for key in figures)
