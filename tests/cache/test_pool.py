"""The block pool conserves its blocks."""

import pytest

from cache.pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    assert len(set(taken)) == 3
    assert (pool.num_free, pool.num_held) == (1, 3)
    pool.hold(taken[:1])
    assert pool.drop(taken[:1]) == []
    assert pool.drop(taken) == taken
    pool.free(taken)
    assert (pool.num_free, pool.num_held) == (4, 0)
    pool.check_integrity()


def test_too_many_are_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(IndexError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_one_drop_too_many_is_an_error() -> None:
    pool = BlockPool(1)
    taken = pool.allocate(1)
    assert pool.drop(taken) == taken
    with pytest.raises(ValueError, match="once too often"):
        pool.drop(taken)
