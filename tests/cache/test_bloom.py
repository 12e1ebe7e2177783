"""Filters never deny what they hold, and say yes too often as seldom as they state."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.bloom import blocked, positions
from cache.bloom.blocked import BlockedBloom
from cache.bloom.columns import Columns
from cache.bloom.counting import CountingFilter
from cache.bloom.positions import bits_for


def keys_of(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


POOL = keys_of(7, 60)


@given(st.lists(st.binary(min_size=16, max_size=16)), st.lists(st.sampled_from(POOL)))
def test_blocked_never_denies_what_it_holds(first: list[bytes], second: list[bytes]) -> None:
    bloom = BlockedBloom(8, 0.1)
    for key in first:
        bloom.add(key)
    assert all(key in bloom for key in first)
    bloom.rebuild(second, capacity=30)
    assert all(key in bloom for key in second)
    assert bloom.num_added == len(second)
    bloom.check_integrity()


@pytest.mark.parametrize("target", [0.03, 0.01, 0.002])
def test_blocked_rate_is_the_stated_one(target: float) -> None:
    bloom = BlockedBloom(20_000, target)
    for key in keys_of(1, 20_000):
        bloom.add(key)
    measured = sum(key in bloom for key in keys_of(2, 200_000)) / 200_000
    assert 0.8 * target < measured < 1.2 * target
    assert bloom.num_bits / 20_000 == pytest.approx(blocked.bits_per_key(target), rel=0.01)
    assert 0.3 < bloom.fill() < 0.7


def test_blocked_rate_falls_with_bits_and_has_the_figures_of_its_docstring() -> None:
    rates = [blocked.false_positive_rate(bits) for bits in (8, 12, 16)]
    assert [round(rate * 100, 2) for rate in rates] == [2.93, 0.42, 0.09]
    assert blocked.false_positive_rate(0) == 1.0
    for refused in (0.0, 0.9):
        with pytest.raises(ValueError, match="outside"):
            BlockedBloom(10, refused)


def test_a_rebuild_that_fails_changes_nothing() -> None:
    bloom = BlockedBloom(10)
    bloom.add(POOL[0])

    def broken() -> Iterator[bytes]:
        yield POOL[1]
        raise OSError("the tier cannot be listed")

    with pytest.raises(OSError, match="tier"):
        bloom.rebuild(broken(), capacity=1000)
    assert (POOL[0] in bloom, bloom.capacity, bloom.num_added) == (True, 10, 1)


def filled(keys: list[bytes], num_bits: int) -> CountingFilter:
    bloom = CountingFilter(num_bits)
    for key in keys:
        bloom.add(key)
    return bloom


def test_counting_rate_is_the_stated_one() -> None:
    num_keys = 10_000
    for num_bits in (bits_for(num_keys, 8), bits_for(num_keys, 8) // 2):
        bloom = filled(keys_of(3, num_keys), num_bits)
        measured = sum(key in bloom for key in keys_of(4, 100_000)) / 100_000
        stated = positions.false_positive_rate(num_bits / num_keys)
        assert 0.85 * stated < measured < 1.15 * stated
    rates = [positions.false_positive_rate(bits) for bits in (8, 10, 16)]
    assert [round(rate * 100, 2) for rate in rates] == [2.4, 1.18, 0.24]


def test_a_filter_says_which_bits_change() -> None:
    bloom = CountingFilter(1024)
    bits = {int.from_bytes(POOL[0][at : at + 4], "little") % 1024 for at in (0, 4, 8, 12)}
    assert set(bloom.add(POOL[0])) == bits
    assert bloom.add(POOL[0]) == []
    assert bloom.remove(POOL[0]) == []
    assert set(bloom.remove(POOL[0])) == bits
    assert POOL[0] not in bloom
    bloom.check_integrity(0)
    with pytest.raises(ValueError, match="power of two"):
        CountingFilter(100)


def test_counters_that_are_full_never_deny() -> None:
    bloom, others = CountingFilter(64), POOL[1:6]
    for key in [POOL[0]] * 40 + others:
        bloom.add(key)
    for _ in range(40):
        bloom.remove(POOL[0])
    assert all(key in bloom for key in others)
    assert POOL[0] in bloom, "nobody knows how often it was there"


@given(st.lists(st.sampled_from(POOL)), st.integers(0, 3))
def test_a_folded_filter_is_one_that_was_smaller_all_along(keys: list[bytes], times: int) -> None:
    folded = filled(keys, 1024)
    for _ in range(times):
        folded.fold()
    small = filled(keys, 1024 >> times)
    assert folded.num_bits == small.num_bits
    assert folded._counters == small._counters


def test_sizes_are_powers_of_two_with_as_many_bits_a_key() -> None:
    assert [bits_for(count, 16) for count in (0, 4, 5, 100)] == [64, 64, 128, 2048]
    assert bits_for(1 << 30, 16) == positions.MAX_BITS


class Side:
    """Columns, and beside each the filter that is in it."""

    def __init__(self, num_rows: int) -> None:
        self.columns = Columns(num_rows)
        self.filters: dict[int, CountingFilter] = {}

    def put(self, keys: list[bytes], num_bits: int) -> int:
        column = self.columns.take()
        self.filters[column] = filled(keys, num_bits)
        self.columns.write(column, self.filters[column])
        return column

    def drop(self, column: int) -> None:
        del self.filters[column]
        self.columns.release(column)

    def naive_depths(self, chain: list[bytes]) -> dict[int, int]:
        return {
            column: next((at for at, key in enumerate(chain) if key not in held), len(chain))
            for column, held in self.filters.items()
        }

    def check(self, chain: list[bytes]) -> None:
        self.columns.check_integrity(self.filters)
        depths = self.columns.depths(chain)
        assert {column: depths[column] for column in self.filters} == self.naive_depths(chain)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(0, 300))
def test_depths_are_those_of_a_walk_filter_by_filter(
    seed: int, num_filters: int, num_keys: int
) -> None:
    rng = random.Random(seed)
    chain, side = keys_of(seed + 1, num_keys), Side(4096)
    for _ in range(num_filters):
        held = chain[: rng.choice([0, num_keys, rng.randrange(num_keys + 1)])]
        held += [key for key in chain if rng.random() < 0.2]
        column = side.put(held, rng.choice([1024, 4096]))
        if rng.random() < 0.2:
            side.drop(column)
    side.check(chain)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 70))
def test_columns_follow_their_filters_through_all_that_may_happen(seed: int, steps: int) -> None:
    rng, side = random.Random(seed), Side(256)
    for _ in range(steps):
        held = list(side.filters)
        column = rng.choice(held) if held else side.put(POOL[:5], 64)
        bloom = side.filters[column]
        match rng.randrange(6):
            case 0:
                side.put(rng.sample(POOL, 20), rng.choice([64, 128, 256]))
            case 1:
                key = rng.choice(POOL)
                side.columns.set(column, bloom.add(key), bloom.num_bits)
            case 2 if any(key in bloom for key in POOL):
                key = next(key for key in POOL if key in bloom)
                side.columns.clear(column, bloom.remove(key), bloom.num_bits)
            case 3:
                side.drop(column)
            case 4 if side.columns.num_rows < 2048:
                side.columns.grow(2 * side.columns.num_rows)
            case 5 if side.columns.num_rows > 256:
                side.columns.fold()
        side.check(rng.sample(POOL, 9))


def test_rows_are_no_wider_than_columns_need() -> None:
    side = Side(64)
    widths = {}
    for number in range(1, 200):
        expected = side.columns.bytes_with(64, is_more=True)
        before = side.columns.num_bytes
        assert side.columns.bytes_with(64, is_more=False) == 0
        assert side.columns.bytes_with(256, is_more=False) == 4 * before
        side.put([POOL[0]], 64)
        assert side.columns.num_bytes == (expected or before)
        widths[number] = side.columns.num_bytes // 64
    assert [widths[number] for number in (8, 9, 17, 33, 65, 129)] == [1, 2, 4, 8, 16, 24]
    for column in range(100):
        side.drop(column)
    assert side.columns.num_taken == 99
    side.put([POOL[1]], 64)
    assert side.columns.num_bytes == widths[199] * 64
    side.check([POOL[1]])
