"""Workloads: files with a seed, so that every server is asked the same.

Invariant: the prompts of a (workload, vocabulary, round) are always the same token ids, and differ
between rounds, so that a new round finds nothing of an earlier one in any cache. Ids are random, so
that nothing can be skipped or compressed.
"""

import random
from importlib.resources import files

import msgspec

# The lowest ids of a vocabulary are often special tokens, which a server may treat apart.
_FIRST_ORDINARY_ID = 1000


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`num_requests` requests at once, each of `shared_tokens + own_tokens` in."""

    name: str
    description: str
    seed: int
    num_requests: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int

    def prompts(self, vocab_size: int, round_number: int) -> list[list[int]]:
        """Token ids of each prompt."""
        source = random.Random(f"{self.name}/{self.seed}/{round_number}")
        first = min(_FIRST_ORDINARY_ID, vocab_size // 2)

        def draw(count: int) -> list[int]:
            return [source.randrange(first, vocab_size) for _ in range(count)]

        shared = draw(self.shared_tokens)
        return [shared + draw(self.own_tokens) for _ in range(self.num_requests)]


def load_workload(name: str) -> Workload:
    """Reads `bench/workloads/<name>.json`."""
    text = (files("bench") / "workloads" / f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=Workload)
