"""Chooses a replica for each request: prefix affinity against load, both in seconds.

Invariant: the choice depends only on the cache index, the last reports, our own bookings and the
request, so that ingresses with the same view agree; only `round_robin` has a memory of its own.

A replica's score is the prefill that its cache spares less the wait that its work costs
(`cluster.routing.score`), which orders replicas as the expected seconds until the request's first
tokens do. Then, under the policy `prefix`:

- Of the replicas that take no more than `_PATIENCE` times the least expected time, those that hold
  the most of the prefix. The least alone would have each request computed again wherever there is
  room just then, at the cost of all that wait there, and of what is evicted for it.
- Of these, the ones within `tie_fraction` of the soonest are equal, and a hash of the request
  decides, lest all ingresses choose the same one between two reports.
- When no replica holds the first `cold_blocks` blocks (fewer do not count: a chat template opens
  all prompts alike), those blocks are what is hashed, so that equal prefixes meet before any cache
  knows of them, whichever ingresses they come through. And what a request of ours that is on its
  way there will leave in a cache counts as if it were there already. A prefix that nobody else
  asks for is placed as one without a cache would be, but for the hash among equals.
- A request of a session is hashed by that alone: among equals, and where its prefix is cold, it
  goes where the others of its session do.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.events import BlockKey
from cluster.routing import rendezvous
from cluster.routing.decision import Candidate, Decision, NoReplica, Reason, RouteRequest
from cluster.routing.index import PrefixIndex
from cluster.routing.score import PACE_STEPS, CostTable, Fleet, Rates, ReplicaLoad, Seconds
from cluster.routing.view import IndexView
from configs.shoal import RouterConfig
from engine.wire import LoadReport

_NUM_EXPLAINED = 4
_MIN_TIE_S = 0.001
"""Differences below this are noise: less than a step of most engines."""

_PATIENCE = 1.5
"""A request may take so many times the least expected time to go where more of it is cached, or
soon will be: what is not computed again is spared to all who come after it."""
_MOST_EXPECTED = 1024
"""Cold prefixes that are remembered until somebody holds them. One that has come and gone since
then is taken for there once more, which costs a choice and no more."""
_COLD = (Reason.COLD, Reason.COLD_OVERFLOW)


class _Expected(NamedTuple):
    """A request that was sent before anybody had its prefix."""

    replica_id: str
    number: int
    keys: Sequence[BlockKey]


@dataclass(slots=True)
class _Survey:
    """One request against all replicas, by slot."""

    request: RouteRequest
    allowed: NDArray[np.bool_]
    num_allowed: int
    blocks: NDArray[np.float64]
    """Of the request's chain, held from its start on; 0 for those that are not allowed."""
    cached_tokens: NDArray[np.float64]
    """What of them spares work: one token at least must be computed, to sample from."""
    blind_s: Seconds
    """Expected seconds until the first tokens with nothing cached; infinite if not allowed."""
    cost_s: Seconds
    """The same with what is cached."""
    num_tied: int = 1


class Router:
    """The router of one model in one ingress. Not thread-safe; give a replica that restarts a new
    id, or remove it in between. Ids must be the same in all ingresses for them to agree."""

    def __init__(self, config: RouterConfig, ingress_id: str) -> None:
        self.config = config
        self.index = PrefixIndex(config.index_memory_bytes)
        self._ingress_id = ingress_id
        self._fleet = Fleet(_default_rates(config))
        self._table = CostTable()
        self._loads: dict[str, ReplicaLoad] = {}
        self._names: dict[int, str] = {}
        self._turn = 0
        self._expected: OrderedDict[BlockKey, _Expected] = OrderedDict()
        """Cold prefixes that requests of ours will have cached, by the key that they are hashed by;
        latest last."""

    def configure(self, config: RouterConfig) -> None:
        """Takes effect with the next request; default rates with each replica's next report."""
        self.config = config
        self._fleet.default = _default_rates(config)
        self.index.limit(config.index_memory_bytes)

    # ------------------------------------------------------------ replicas

    def add_replica(self, replica_id: str, block_size: int) -> IndexView:
        """Makes a replica known and routable; returns the key set to feed with its events.

        Raises `ValueError` if it is known already."""
        if replica_id in self._loads:
            raise ValueError(f"replica {replica_id!r} is known already")
        view = self.index.view(replica_id)
        slot, table = self.index.slot(replica_id), self._table
        table.reserve(slot)
        table.seed[slot] = rendezvous.point(replica_id.encode())
        table.routable[slot] = True
        self._names[slot] = replica_id
        self._loads[replica_id] = ReplicaLoad(self._fleet, table, slot, block_size)
        self._fleet.num_replicas = len(self._loads)
        return view

    def remove_replica(self, replica_id: str) -> None:
        """Forgets it with its blocks and bookings. Unknown ones are no error."""
        if self._loads.pop(replica_id, None) is None:
            return
        slot = self.index.slot(replica_id)
        self._table.routable[slot] = False
        del self._names[slot]
        self.index.remove(replica_id)
        self._fleet.num_replicas = len(self._loads)

    def set_routable(self, replica_id: str, routable: bool) -> None:
        """An unroutable replica (loading, draining, stalled) is kept up to date, never chosen.

        Raises `KeyError` for an unknown one."""
        self._table.routable[self.index.slot(replica_id)] = routable

    # ------------------------------------------------------------ what is heard

    def on_load(self, replica_id: str, report: LoadReport) -> None:
        """Late reports of a replica that has left are ignored, here and below."""
        if (load := self._loads.get(replica_id)) is not None:
            load.on_report(report, self._ingress_id)

    def on_seen(self, replica_id: str, number: int) -> None:
        """A TokenBatch shows that requests up to `number` have arrived."""
        if (load := self._loads.get(replica_id)) is not None:
            load.on_seen(number)

    def book(self, decision: Decision, number: int) -> None:
        """The request was sent as this ingress's `number`-th to the replica. Counts until a report
        has seen it; `unbook` it when it was refused."""
        if (load := self._loads.get(decision.replica_id)) is not None:
            load.book(number, decision.uncached_tokens)
            if decision.cold_keys:
                self._note_cold(decision.cold_keys, decision.replica_id, number)

    def unbook(self, replica_id: str, number: int) -> None:
        if (load := self._loads.get(replica_id)) is not None:
            load.unbook(number)
        for item, expected in self._expected.items():
            if (expected.replica_id, expected.number) == (replica_id, number):
                del self._expected[item]
                break

    def _note_cold(self, keys: Sequence[BlockKey], replica_id: str, number: int) -> None:
        item = keys[min(self.config.cold_blocks, len(keys)) - 1]
        self._expected[item] = _Expected(replica_id, number, keys)
        self._expected.move_to_end(item)
        if len(self._expected) > _MOST_EXPECTED:
            self._expected.popitem(last=False)

    def load(self, replica_id: str) -> ReplicaLoad:
        """For metrics. Raises `KeyError` for an unknown replica."""
        return self._loads[replica_id]

    # ------------------------------------------------------------ choosing

    def route(self, request: RouteRequest, exclude: Collection[str] = ()) -> Decision:
        """The best replica that is routable and not in `exclude`. Raises `NoReplica`."""
        survey = self._survey(request, exclude)
        match self.config.policy:
            case "prefix":
                slot, reason = self._by_prefix(survey)
            case "least_backlog":
                item = request.session or request.request_id.encode()
                slot, reason = self._least(survey, survey.blind_s, item), Reason.LEAST_WAIT
            case "round_robin":
                slots = np.flatnonzero(survey.allowed)
                self._turn += 1
                slot, reason = int(slots[self._turn % len(slots)]), Reason.ROUND_ROBIN
            case "power_of_two":
                slot, reason = self._of_two(survey), Reason.POWER_OF_TWO
        return self._decision(survey, slot, reason)

    def _survey(self, request: RouteRequest, exclude: Collection[str]) -> _Survey:
        table = self._table
        allowed = table.routable
        if exclude:
            allowed = allowed.copy()
            allowed[[slot for slot, name in self._names.items() if name in exclude]] = False
        num_allowed = int(np.count_nonzero(allowed))
        if not num_allowed:
            num_routable = int(np.count_nonzero(table.routable))
            raise NoReplica(len(self._loads), num_routable, num_routable)
        blocks = self.index.depths(request.keys, table.size) * allowed
        room = (request.num_tokens - 1) // table.block_size
        cached_tokens = np.minimum(blocks, room) * table.block_size
        steps = min(request.max_tokens, PACE_STEPS)
        blind_s = table.base_s + request.num_tokens * table.token_s + steps * table.step_s
        blind_s[~allowed] = np.inf
        cost_s = blind_s - cached_tokens * table.token_s
        return _Survey(request, allowed, num_allowed, blocks, cached_tokens, blind_s, cost_s)

    def _by_prefix(self, survey: _Survey) -> tuple[int, Reason]:
        keys, most_blocks = survey.request.keys, int(survey.blocks.max())
        cold_blocks = self.config.cold_blocks
        first = min(cold_blocks, len(keys))
        if most_blocks < first:
            return self._cold(survey, keys[first - 1])
        if first:
            self._expected.pop(keys[first - 1], None)
        item = survey.request.session or survey.request.request_id.encode()
        if most_blocks < len(keys) and not survey.request.session:
            # Prompts that go on alike beyond what is cached should meet, as cold ones do.
            item = keys[min(most_blocks + cold_blocks, len(keys)) - 1]
        slot = self._least(survey, survey.cost_s, item)
        if not most_blocks:
            return slot, Reason.LEAST_WAIT
        is_deepest = survey.blocks[slot] == most_blocks
        return slot, Reason.CACHED if is_deepest else Reason.LOAD

    def _least(self, survey: _Survey, cost_s: Seconds, item: bytes) -> int:
        """Of the least cost; the hash of `item` decides among the tied."""
        if cost_s is survey.cost_s:
            # Of those that are not much later, the ones that have most, and of them the soonest.
            near = np.flatnonzero(cost_s <= _PATIENCE * cost_s.min())
            depths = survey.cached_tokens[near]
            near = near[depths == depths.max()]
            near_s = cost_s[near]
            tied = near[near_s <= self._bound_s(near_s)]
        else:
            tied = np.flatnonzero(cost_s <= self._bound_s(cost_s))
        survey.num_tied = len(tied)
        weights = rendezvous.weights(self._table.seed[tied], rendezvous.point(item))
        return int(tied[weights.argmax()])

    def _bound_s(self, cost_s: Seconds) -> float:
        """What is no more than this is as good as the least."""
        least_s = float(cost_s.min())
        return least_s + max(least_s * self.config.tie_fraction, _MIN_TIE_S)

    def _cold(self, survey: _Survey, item: bytes) -> tuple[int, Reason]:
        """Where a request of ours with the same prefix has gone, or else by hash."""
        slot = self._expect(survey, item)
        if slot is not None and survey.cost_s[slot] <= _PATIENCE * survey.cost_s.min():
            return slot, Reason.FOLLOWS
        item = survey.request.session or item
        slot = self._least(survey, survey.blind_s, item)
        weights = rendezvous.weights(self._table.seed, rendezvous.point(item)) * survey.allowed
        return slot, Reason.COLD if slot == weights.argmax() else Reason.COLD_OVERFLOW

    def _expect(self, survey: _Survey, item: bytes) -> int | None:
        """Counts as cached what a request that is on its way will leave; returns where."""
        expected = self._expected.get(item)
        if expected is None or expected.replica_id not in self._loads:
            return None
        slot, table = self.index.slot(expected.replica_id), self._table
        if not survey.allowed[slot]:
            return None
        room = (survey.request.num_tokens - 1) // table.block_size[slot]
        num_common = _num_common(expected.keys, survey.request.keys)
        survey.cached_tokens[slot] = cached_tokens = min(num_common, room) * table.block_size[slot]
        survey.cost_s[slot] = survey.blind_s[slot] - cached_tokens * table.token_s[slot]
        return slot

    def _of_two(self, survey: _Survey) -> int:
        """The less loaded of two that the request's hash picks."""
        item = rendezvous.point(survey.request.request_id.encode())
        weights = rendezvous.weights(self._table.seed, item) * survey.allowed
        two = np.argsort(weights)[-min(2, survey.num_allowed) :]
        return int(two[self._table.backlog_s[two].argmin()])

    def _decision(self, survey: _Survey, chosen: int, reason: Reason) -> Decision:
        table, num_tokens = self._table, survey.request.num_tokens
        fastest_s = float(table.compute_s[survey.allowed].min())

        def candidate(slot: int) -> Candidate:
            cached_tokens = int(survey.cached_tokens[slot])
            compute_s = (num_tokens - cached_tokens) * float(table.compute_s[slot])
            wait_s = float(survey.cost_s[slot]) - compute_s
            saved_s = num_tokens * fastest_s - compute_s
            return Candidate(self._names[slot], cached_tokens, wait_s, saved_s)

        best = candidate(chosen)
        return Decision(
            request_id=survey.request.request_id,
            reason=reason,
            chosen=best,
            uncached_tokens=num_tokens - best.cached_tokens,
            others=tuple([candidate(slot) for slot in _notable(survey) if slot != chosen]),
            num_replicas=survey.num_allowed,
            num_tied=survey.num_tied,
            cold_keys=survey.request.keys if reason in _COLD else (),
        )

    def check_integrity(self) -> None:
        self.index.check_integrity()
        for replica_id, load in self._loads.items():
            load.check_integrity()
            assert self._names[self.index.slot(replica_id)] == replica_id
        assert len(self._names) == len(self._loads)
        assert set(np.flatnonzero(self._table.routable)) <= set(self._names)


def _default_rates(config: RouterConfig) -> Rates:
    return Rates(config.default_prefill_tokens_per_s, config.default_decode_tokens_per_s)


def _notable(survey: _Survey) -> list[int]:
    """The cheapest few, cheapest first, then the one that holds most of the prefix."""
    count = min(_NUM_EXPLAINED, survey.num_allowed)
    cheapest = np.argpartition(survey.cost_s, count - 1)[:count]
    slots: list[int] = cheapest[survey.cost_s[cheapest].argsort()].tolist()
    deepest = int(survey.blocks.argmax())
    if survey.blocks[deepest] and deepest not in slots:
        slots.append(deepest)
    return slots


def _num_common(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """Blocks that two chains have in common: a key stands for all before it."""
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda at: one[at] != other[at])
