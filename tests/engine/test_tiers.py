"""The tiers below the device: examples of what moves when, then a state machine in which every
token must be the model's own, whatever tier its prefix came from and whatever disks do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cache.events import KeySet, Removed, Stored, Tier
from cache.keys import key_root
from cache.tiers import DiskJob, LowerTiers
from engine.wire import SamplingParams
from tests.engine.rig import BLOCK, MemoryDisk, Rig, reference_output
from tests.engine.test_scheduler import EngineMachine, sampling

PROMPT = list(range(1, 14))
"""Three full blocks and one token."""


def tiers_of(rig: Rig) -> LowerTiers:
    assert rig.tiers is not None
    return rig.tiers


def run(rig: Rig, name: str, prompt: list[int], max_tokens: int = 2) -> int:
    """Returns how many of its tokens were found."""
    params = sampling(max_tokens)
    request = rig.add(name, prompt, params)
    rig.drain()
    assert rig.output["ingress", name] == reference_output(prompt, params)
    assert request.cached_tokens is not None
    return request.cached_tokens


def test_blocks_are_saved_by_the_step_after_the_one_that_computed_them() -> None:
    rig = Rig(16, num_slots=16)
    rig.add("one", PROMPT, sampling(3))
    first = rig.step()
    second = rig.step()
    assert first is not None
    assert second is not None
    assert first.saves == ()
    assert [block for block, _ in second.saves] == list(first.slices[0].new_block_ids[:3])
    rig.drain()
    assert tiers_of(rig).counts.saved == 3


def test_what_the_device_has_given_up_comes_back_from_the_host() -> None:
    rig = Rig(4, num_slots=16)
    run(rig, "one", PROMPT)
    run(rig, "other", [40, *PROMPT[1:]])
    request = rig.add("again", PROMPT, sampling(2))
    plan = rig.step()
    assert plan is not None
    assert len(plan.loads) == 3
    assert [block for _, block in plan.loads] == list(plan.slices[0].new_block_ids[:3])
    assert (plan.slices[0].start, plan.slices[0].length) == (12, 1)
    assert request.cached_tokens == 12
    rig.drain()
    assert rig.output["ingress", "again"] == reference_output(PROMPT, sampling(2))
    assert tiers_of(rig).counts.loaded == 3
    assert tiers_of(rig).counts.saved == 6, "what the host has is not saved again"


def test_what_only_the_device_has_is_not_counted_as_loaded() -> None:
    rig = Rig(16, num_slots=1)
    run(rig, "one", PROMPT)
    assert run(rig, "longer", [*PROMPT[:12], *range(30, 39)]) == 12
    assert tiers_of(rig).counts.loaded == 0


def test_the_last_blocks_of_a_request_that_has_ended_are_saved_too() -> None:
    rig = Rig(16, num_slots=16)
    rig.add("one", PROMPT[:8], sampling(1))
    rig.step()
    assert rig.scheduler.requests == {}
    plan = rig.step()
    assert plan is not None
    assert (plan.slices, len(plan.saves)) == ((), 2)
    assert rig.step() is None
    assert rig.cache.pool.num_held == 0


def test_requests_that_hold_the_whole_host_keep_no_other_from_being_computed() -> None:
    rig = Rig(32, num_slots=2)
    for number in range(3):
        rig.add(str(number), [number, *PROMPT], sampling(4))
    rig.drain()
    for number in range(3):
        assert rig.output["ingress", str(number)] == reference_output(
            [number, *PROMPT], sampling(4)
        )
    assert tiers_of(rig).counts.unsaved > 0


def test_a_preempted_request_comes_back_from_the_host_and_computes_less_than_a_block() -> None:
    rig = Rig(8, num_slots=32, max_num_seqs=2)
    params = sampling(24)
    for name in ("old", "new"):
        rig.add(name, [len(name), *PROMPT[: 2 * len(name)], ord(name[0])], params)
    loaded = []
    while (plan := rig.step()) is not None:
        loaded.append(len(plan.loads))
        rig.scheduler.check_integrity()
    counts = rig.scheduler.counts
    assert counts.preempted > 0
    assert sum(loaded) >= 3, "blocks"
    assert counts.recomputed_tokens < BLOCK * counts.preempted
    assert counts.restored_tokens > counts.recomputed_tokens
    for name in ("old", "new"):
        prompt = [len(name), *PROMPT[: 2 * len(name)], ord(name[0])]
        assert rig.output["ingress", name] == reference_output(prompt, params)


def test_events_say_what_the_host_holds() -> None:
    rig = Rig(4, num_slots=4)
    for number in range(4):
        run(rig, str(number), [number, *PROMPT])
    keys = KeySet()
    for event in rig.cache.drain_events() + tiers_of(rig).host.drain_events():
        change = keys.add if isinstance(event, Stored) else keys.remove
        assert isinstance(event, Stored | Removed)
        assert change(event.key, event.tier)
    held = {tier: {key for key, where in keys if where == tier} for tier in Tier}
    assert held[Tier.HOST] == set(tiers_of(rig).host._index)
    assert held[Tier.DEVICE] == set(rig.cache._index)
    assert held[Tier.HOST] != held[Tier.DEVICE]


def test_a_restarted_engine_finds_its_prefixes_on_disk() -> None:
    disk = MemoryDisk()
    run(Rig(8, num_slots=8, disk=disk), "one", PROMPT)
    assert len(disk.files) == 3
    rig = Rig(8, num_slots=8, disk=disk)
    assert run(rig, "again", PROMPT) == 12
    assert tiers_of(rig).counts.promoted == 3


def test_requests_go_on_while_another_waits_for_the_disk() -> None:
    disk = MemoryDisk()
    run(Rig(8, num_slots=8, disk=disk), "one", PROMPT)
    rig = Rig(8, num_slots=8, disk=disk)
    waiting = rig.add("waits", PROMPT, sampling(2))
    twin = rig.add("waits too", PROMPT, sampling(2))
    rig.add("goes on", [9, 9, 9], sampling(2))
    while rig.step() is not None:
        pass
    assert len(rig.output["ingress", "goes on"]) == 2
    assert (waiting.run_id, twin.run_id) == (None, None)
    read, write = tiers_of(rig).take_jobs()
    assert (read.is_read, write.is_read) == (True, False)
    for job in (read, write):
        tiers_of(rig).finish(job, disk.run(job, rig.executor))
    rig.drain()
    assert (waiting.cached_tokens, twin.cached_tokens) == (12, 12)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_what_the_disk_has_lost_is_computed(missing: int) -> None:
    disk = MemoryDisk()
    run(Rig(8, num_slots=8, disk=disk), "one", PROMPT)
    rig = Rig(8, num_slots=8, disk=disk)
    root = key_root(b"k" * 32, rig.executor.info.fingerprint, "", BLOCK)
    key = root.keys(PROMPT)[missing]
    del disk.files[key]
    disk.promised.add(key)
    assert run(rig, "again", PROMPT) == missing * BLOCK
    assert tiers_of(rig).counts.missed == 3 - missing
    assert len(disk.files) == 3, "it is there again"


def test_a_disk_that_hangs_is_not_waited_for_and_its_slots_stay_held() -> None:
    disk = MemoryDisk()
    run(Rig(8, num_slots=8, disk=disk), "one", PROMPT)
    rig = Rig(8, num_slots=8, disk=disk)
    request = rig.add("waits", PROMPT, sampling(2))
    (job,) = tiers_of(rig).take_jobs()
    assert rig.step() is None
    assert job.promotion is not None
    job.promotion.is_over = True
    while rig.step() is not None:
        rig.scheduler.check_integrity()
    assert request.cached_tokens == 0
    assert rig.output[request.key] == reference_output(PROMPT, sampling(2))
    assert {slot for _, slot in job.items} <= held_slots(rig)
    tiers_of(rig).finish(job, disk.run(job, rig.executor))
    rig.drain()
    assert held_slots(rig) == set()


def held_slots(rig: Rig) -> set[int]:
    pool = tiers_of(rig).host.pool
    return {slot for slot in range(pool.num_blocks) if pool.references(slot)}


class TieredMachine(EngineMachine):
    """As its base, with a host tier too small for what is asked, and a disk that is late and
    fails, and whose engine is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.jobs: list[DiskJob] = []
        self.start_engine()

    def start_engine(self) -> None:
        former = self.rig
        self.rig = Rig(10, num_slots=14, disk=self.disk, **self.LIMITS)
        self.rig.output, self.rig.finished = former.output, former.finished

    @rule(data=st.data(), fails=st.booleans())
    def work_the_disk(self, data: st.DataObject, fails: bool) -> None:
        tiers = tiers_of(self.rig)
        self.jobs += tiers.take_jobs()
        if self.jobs:
            job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
            tiers.finish(job, self.disk.run(job, self.rig.executor, fails))

    @precondition(lambda self: self.disk.files)
    @rule(data=st.data())
    def lose_a_file(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.disk.files)))
        del self.disk.files[key]
        self.disk.promised.add(key)

    @precondition(lambda self: not self.rig.scheduler.requests and not self.flying)
    @rule()
    def restart(self) -> None:
        self.finish_all()
        self.start_engine()

    @invariant()
    def what_the_disk_works_on_is_held(self) -> None:
        pool = tiers_of(self.rig).host.pool
        for job in self.jobs:
            assert all(pool.references(slot) for _, slot in job.items)

    def finish_all(self) -> None:
        tiers = tiers_of(self.rig)
        for job in self.jobs:
            tiers.finish(job, self.disk.run(job, self.rig.executor))
        self.jobs.clear()
        self.rig.drain()

    def teardown(self) -> None:
        super().teardown()
        self.finish_all()
        assert held_slots(self.rig) == set()


TieredMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestTieredMachine = TieredMachine.TestCase


def test_two_tenants_share_nothing_in_any_tier() -> None:
    disk = MemoryDisk()
    rig = Rig(4, num_slots=16, disk=disk)
    info = rig.executor.info
    run(rig, "one", PROMPT)
    for name in ("tenant-a", "tenant-b"):
        root = key_root(b"k" * 32, info.fingerprint, name, info.block_size)
        request = rig.add(name, PROMPT, SamplingParams(max_tokens=1, seed=0), root=root)
        rig.drain()
        assert request.cached_tokens == 0
    assert tiers_of(rig).counts.loaded == 0
    assert len(disk.files) == 9
