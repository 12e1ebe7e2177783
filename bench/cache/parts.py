"""What is found because parts of blocks can be copied, beside whole blocks.

Invariant: prompts are a shared beginning (a template, examples) and an own rest, all of random
length, so that they part anywhere within a block.
"""

from random import Random

from cache.keys import key_root
from cache.prefix import PrefixCache

_BLOCK = 16
_NUM_BLOCKS = 20_000
_NUM_BEGINNINGS = 50
_BEGINNING_TOKENS = 20, 400
_REST_TOKENS = 10, 80
_VOCABULARY = 50_000
_SEED = 5


def measure_parts(num_requests: int) -> dict[str, float]:
    """Tokens found, in per cent of those of all prompts: in whole blocks, and in parts besides."""
    rng = Random(_SEED)
    root = key_root(b"k" * 32, "bench", "", _BLOCK)
    cache = PrefixCache(_NUM_BLOCKS, block_size=_BLOCK)
    beginnings = [_tokens(rng, _BEGINNING_TOKENS) for _ in range(_NUM_BEGINNINGS)]
    num_tokens = num_whole = num_parts = 0
    for tick in range(num_requests):
        ids = rng.choice(beginnings) + _tokens(rng, _REST_TOKENS)
        keys = root.keys(ids)
        cache.advance(tick)
        table = cache.start(keys, (len(ids) - 1) // _BLOCK)
        start = len(table.block_ids) * _BLOCK
        _, run = cache.borrow(table, root.root, ids[start : min(start + _BLOCK, len(ids) - 1)])
        assert cache.grow(table, -(-len(ids) // _BLOCK)) is not None
        cache.publish(table, root.root, len(keys), ids)
        cache.release(table)
        cache.drain_events()
        num_tokens += len(ids)
        num_whole += start
        num_parts += run
    return {
        "whole_blocks_saved_tokens_pct": 100 * num_whole / num_tokens,
        "partial_reuse_saved_tokens_pct": 100 * num_parts / num_tokens,
    }


def _tokens(rng: Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(rng.randint(*bounds))]
