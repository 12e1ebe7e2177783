"""The host tier's copies on streams that run late, and in any order that events allow.

What a device does is drawn: at each turn one of its streams does the next thing on its list, unless
that waits for an event. Whatever is drawn, every reader must see what a machine that does one thing
after the other would have shown; and without any one of the waits, some draw shows something else.
"""

import random
from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.engine import CacheConfig, EngineConfig
from engine.executors.model import ModelExecutor
from engine.models.copy_streams import CopyEvent, ImmediateStream
from engine.models.host_memory import HostMemory
from engine.models.kv_cache import KVCache
from engine.models.traits import ModelTraits
from engine.wire import SamplingParams
from tests.engine.rig import Rig
from tests.tiny_models import tiny_model

NUM_BLOCKS, NUM_SLOTS = 4, 3
TRAITS = ModelTraits("llama", 2, 1, 1, 1, 10, 100, (), (None, None), "float32")


class FakeEvent:
    def __init__(self, device: "FakeDevice") -> None:
        self.device = device
        self.has_come = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        while not self.has_come:
            self.device.advance()


class FakeStream:
    def __init__(self, device: "FakeDevice") -> None:
        self.device = device
        self.work: deque[tuple[FakeEvent | None, Callable[[], object]]] = deque()
        """What is to be done, each with what it waits for."""

    def run(self, action: Callable[[], object]) -> None:
        self.work.append((None, action))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.run(lambda: target.copy_(source))

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.device)
        self.run(lambda: setattr(event, "has_come", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append((event, lambda: None))

    def is_ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].has_come)


class FakeDevice:
    """Two streams, that of the steps and that of the copies."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.compute, self.copies = FakeStream(self), FakeStream(self)

    def advance(self) -> None:
        """One stream does one thing. Fails where all wait for each other."""
        ready = [stream for stream in (self.compute, self.copies) if stream.is_ready()]
        assert ready, "the streams wait for each other for ever"
        self.source.choice(ready).work.popleft()[1]()

    def loiter(self) -> None:
        """Does some of what there is to do, or nothing."""
        for _ in range(self.source.randrange(6)):
            if self.compute.is_ready() or self.copies.is_ready():
                self.advance()

    def finish(self) -> None:
        while self.compute.work or self.copies.work:
            self.advance()


class Machine:
    """Steps as an executor makes them, over blocks and slots that each hold one number; and what
    each place must hold, by a machine that does one thing after the other."""

    def __init__(self, source: random.Random, kind: type[HostMemory]) -> None:
        self.source = source
        self.device = FakeDevice(source)
        self.cache = KVCache(TRAITS, NUM_BLOCKS, 1, torch.device("cpu"))
        self.host = kind(self.cache, NUM_SLOTS, (self.device.compute, self.device.copies))
        self.blocks, self.slots = [0.0] * NUM_BLOCKS, [0.0] * NUM_SLOTS
        self.counter = 0.0
        self.faults = 0

    def fresh(self) -> float:
        self.counter += 1.0
        return self.counter

    def pairs(self, first: int, second: int) -> list[tuple[int, int]]:
        """As plans have them: nothing is a source twice, or a target twice."""
        count = self.source.randrange(min(first, second))
        return list(
            zip(
                self.source.sample(range(first), count),
                self.source.sample(range(second), count),
                strict=True,
            )
        )

    def step(self) -> None:
        saves, loads = self.pairs(NUM_BLOCKS, NUM_SLOTS), self.pairs(NUM_SLOTS, NUM_BLOCKS)
        self.host.save(saves)
        for block, slot in saves:
            self.slots[slot] = self.blocks[block]
        self.device.loiter()
        self.host.load(loads)
        for slot, block in loads:
            self.blocks[block] = self.slots[slot]
        written = self.source.sample(range(NUM_BLOCKS), self.source.randrange(NUM_BLOCKS))
        if self.host.is_saving:
            self.host.before_writes(written)
        for block in written:
            self.write_block(block, self.fresh())
        for block in range(NUM_BLOCKS):
            self.read_block(block, self.blocks[block])
        self.device.loiter()

    def write_block(self, block: int, value: float) -> None:
        self.device.compute.run(lambda: self.cache.storage[:, :, block].fill_(value))
        self.blocks[block] = value

    def read_block(self, block: int, expected: float) -> None:
        def look() -> None:
            self.faults += bool((self.cache.storage[:, :, block] != expected).any())

        self.device.compute.run(look)

    def use_disk(self) -> None:
        """Writes a slot to disk, or reads one from it."""
        slot = self.source.randrange(NUM_SLOTS)
        memory = self.host.memory(slot).cast("f")
        if self.source.random() < 0.5:
            self.faults += memory.tolist() != [self.slots[slot]] * len(memory)
        else:
            self.slots[slot] = self.fresh()
            for place in range(len(memory)):
                memory[place] = self.slots[slot]
        self.device.loiter()

    def run(self) -> int:
        """How often something was not what it must be."""
        for _ in range(self.source.randrange(2, 12)):
            self.step() if self.source.random() < 0.7 else self.use_disk()
        self.device.finish()
        for slot, value in enumerate(self.slots):
            self.faults += bool((self.host._slots[slot] != value).any())
        return self.faults


@settings(max_examples=500)
@given(st.integers(0, 2**64))
def test_copies_that_run_late_and_in_any_order_change_nothing(seed: int) -> None:
    assert Machine(random.Random(seed), HostMemory).run() == 0


class WithoutBlockWait(HostMemory):
    """Blocks are overwritten while their save may still read them."""

    def before_writes(self, blocks: object) -> None:
        pass


class WithoutSlotWait(HostMemory):
    """A disk does not wait for copies."""

    def memory(self, slot: int) -> memoryview:
        return self._slots[slot].view(torch.uint8).view(-1).numpy().data


class WithoutLoadWait(HostMemory):
    """Steps do not wait for what is loaded."""

    def load(self, pairs: object) -> None:
        wait, self._compute.wait_event = self._compute.wait_event, lambda event: None
        super().load(pairs)
        self._compute.wait_event = wait


class WithoutStepWait(HostMemory):
    """Copies do not wait for the steps before them."""

    def save(self, pairs: object) -> None:
        wait, self._copies.wait_event = self._copies.wait_event, lambda event: None
        super().save(pairs)
        self._copies.wait_event = wait


class WithoutStepWaitOfLoads(HostMemory):
    def load(self, pairs: object) -> None:
        wait, self._copies.wait_event = self._copies.wait_event, lambda event: None
        super().load(pairs)
        self._copies.wait_event = wait


class ForgetsSaves(HostMemory):
    """Takes the saves for done when they have not ended."""

    @property
    def is_saving(self) -> bool:
        self._saving.clear()
        return False


@pytest.mark.parametrize(
    "kind",
    [
        WithoutBlockWait,
        WithoutSlotWait,
        WithoutLoadWait,
        WithoutStepWait,
        WithoutStepWaitOfLoads,
        ForgetsSaves,
    ],
)
def test_every_wait_is_needed(kind: type[HostMemory]) -> None:
    assert any(Machine(random.Random(seed), kind).run() for seed in range(400))


def test_a_save_that_is_done_holds_no_step_up() -> None:
    machine = Machine(random.Random(0), HostMemory)
    machine.host.save([(0, 0), (1, 1)])
    assert machine.host.is_saving
    waiting = len(machine.device.compute.work)
    machine.host.before_writes([2, 3])
    assert len(machine.device.compute.work) == waiting, "other blocks wait for nothing"
    machine.host.before_writes([1])
    assert len(machine.device.compute.work) == waiting + 1
    machine.device.finish()
    assert not machine.host.is_saving
    machine.host.before_writes([0, 1])
    assert not machine.device.compute.work


def test_on_a_cpu_a_copy_is_done_when_the_call_returns() -> None:
    cache = KVCache(TRAITS, NUM_BLOCKS, 1, torch.device("cpu"))
    host = HostMemory(cache, NUM_SLOTS)
    cache.storage[:, :, 2] = 7.0
    host.save([(2, 1)])
    assert not host.is_saving
    assert host.memory(1).cast("f").tolist() == [7.0] * 4
    cache.storage.zero_()
    host.load([(1, 3)])
    assert cache.storage[:, :, 3].unique().tolist() == [7.0]
    host.close()


class LateEvent:
    def __init__(self, stream: "LateCopies", place: int) -> None:
        self.stream = stream
        self.place = place

    def query(self) -> bool:
        return self.stream.num_done >= self.place

    def synchronize(self) -> None:
        while not self.query():
            self.stream.work[self.stream.num_done]()
            self.stream.num_done += 1


class LateCopies:
    """Copies when somebody waits for it, and not before. Steps run at once."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.num_done = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.work.append(lambda: target.copy_(source))

    def record_event(self) -> LateEvent:
        return LateEvent(self, len(self.work))

    def wait_event(self, event: object) -> None:
        """The steps before have run."""


class StepsAtOnce(ImmediateStream):
    def wait_event(self, event: CopyEvent) -> None:
        event.synchronize()


def greedy_twice(executor: ModelExecutor) -> list[list[int]]:
    """Output of prompts too many for the device, computed and then found on the host."""
    rig = Rig(executor.info.num_blocks, executor=executor, num_slots=executor.info.num_slots)
    for turn in range(2):
        for number in range(12):
            source = random.Random(number)
            prompt = [source.randrange(3, 384) for _ in range(70)]
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            rig.add(f"{turn} {number}", prompt, params)
        rig.drain()
    assert rig.tiers is not None
    assert rig.tiers.counts.loaded > 10
    return list(rig.output.values())


def test_an_executor_waits_before_it_overwrites_what_is_being_saved(monkeypatch) -> None:
    cache = CacheConfig(block_size=8, num_blocks=24, host_memory_bytes=2 << 20)
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", threads=1, cache=cache)
    executor = ModelExecutor.load(config)
    expected = greedy_twice(executor)
    assert expected[:12] == expected[12:]

    def run_late() -> list[list[int]]:
        streams = StepsAtOnce(), LateCopies()
        executor._host = HostMemory(executor._cache, executor.info.num_slots, streams)
        return greedy_twice(executor)

    assert run_late() == expected
    monkeypatch.setattr(HostMemory, "before_writes", lambda self, blocks: None)
    assert run_late() != expected
    executor.close()
