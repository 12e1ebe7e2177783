"""What is simulated: engines of a stated size and cost, and the traffic on them.

Invariant: a shape and a seed give the same prompts and arrivals to every policy.

The published shape ("73-capacity" of llm-d's benchmarks): eight engines, each a 32B model on two
H100s with 307,328 tokens of KV, 150 groups of five users, 6,000 shared and 1,200 own tokens, 1,000
of output, Poisson. A user asks the same question in each round, so that the set to cache is 150 x
(6,000 + 5 x 1,200) tokens: 73 % of all KV. Of the cost of a step, ``step_s + token_s * tokens
computed + context_token_s * tokens attended to``:

- ``step_s`` is reading 64 GB of weights at 2 x 3.35 TB/s;
- ``context_token_s`` is reading 256 KiB of KV a token at four fifths of that rate;
- ``token_s`` is chosen by the published throughput of cache-blind routing, 4,429 output tokens/s:
  eight engines that find a sixth to a third of a prompt have about 4,700 tokens/s of prefill each.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cache.events import BlockKey
from cache.keys import KeyRoot, key_root

BLOCK_SIZE = 16
_VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Shape:
    num_engines: int = 8
    kv_tokens: int = 307_328
    """Of one engine."""
    num_groups: int = 150
    num_users: int = 5
    """Of a group."""
    shared_tokens: int = 6000
    own_tokens: int = 1200
    output_tokens: int = 1000
    asks_anew: bool = False
    """A user has another question each time; else the same one."""
    step_s: float = 0.0096
    token_s: float = 0.00015
    context_token_s: float = 4.9e-8
    seed: int = 73

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_SIZE

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens

    def cached_pct(self) -> float:
        """The set to cache, of all KV."""
        distinct = self.num_groups * (self.shared_tokens + self.num_users * self.own_tokens)
        return 100 * distinct / (self.num_engines * self.kv_tokens)


PUBLISHED = Shape()
QUARTER = replace(
    PUBLISHED,
    num_engines=4,
    kv_tokens=31_200,
    num_groups=30,
    num_users=3,
    shared_tokens=1600,
    own_tokens=480,
    output_tokens=40,
)
"""The same at about a quarter of its lengths, on half as many engines."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    keys: list[BlockKey]
    """Of its full blocks."""


class Prompts:
    """Rounds of prompts; in each one all users of all groups ask once, in an order drawn anew."""

    def __init__(self, shape: Shape) -> None:
        self.root: KeyRoot = key_root(b"k" * 32, "simulated", "", BLOCK_SIZE)
        self._shape = shape
        self._rng = random.Random(shape.seed)
        self._shared = [self._draw(shape.shared_tokens) for _ in range(shape.num_groups)]
        self._known: dict[tuple[int, int], Prompt] = {}

    def __iter__(self) -> Iterator[Prompt]:
        shape = self._shape
        users = [
            (group, user) for group in range(shape.num_groups) for user in range(shape.num_users)
        ]
        while True:
            self._rng.shuffle(users)
            yield from (self._prompt(*user) for user in users)

    def _prompt(self, group: int, user: int) -> Prompt:
        if (known := self._known.get((group, user))) is not None:
            return known
        shared = self._shared[group]
        own = self._draw(self._shape.own_tokens)
        # The block that the shared tokens end in the middle of is the user's own.
        num_full = len(shared.token_ids) // BLOCK_SIZE * BLOCK_SIZE
        tail = shared.token_ids[num_full:] + own.token_ids
        parent = shared.keys[-1] if shared.keys else self.root.root
        keys = shared.keys + self.root.extend(parent, tail)
        prompt = Prompt(shared.token_ids + own.token_ids, keys)
        if not self._shape.asks_anew:
            self._known[group, user] = prompt
        return prompt

    def _draw(self, count: int) -> Prompt:
        token_ids = self._rng.choices(range(_VOCAB), k=count)
        return Prompt(token_ids, self.root.keys(token_ids))
