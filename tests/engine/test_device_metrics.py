"""Figures of GPUs that are made up: an object with the functions of NVML that are used."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from engine.device_metrics import DEVICE_STATS, DeviceSampler
from engine.nvml import NvmlDevice, visible_device
from tests.engine.rig import running_engine, wait_until

GIB = 1 << 30


@dataclass(eq=False)
class Card:
    uuid: str
    total: int = 80 * GIB
    used: int = 3 * GIB
    parts: list["Card"] = field(default_factory=list)
    """Of a card that is divided into MIG instances."""
    whole: "Card | None" = None
    lacks: frozenset[str] = frozenset()
    """Functions that it does not support."""


class FakeNvml:
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC = 1, 2, 0, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: Card, has_driver: bool = True) -> None:
        self.cards = cards
        self.has_driver = has_driver
        for card in cards:
            for part in card.parts:
                part.whole = card

    def check(self, holds: bool) -> None:
        if not holds:
            raise self.NVMLError

    def supports(self, card: Card, name: str) -> None:
        self.check(name not in card.lacks)

    def nvmlInit(self) -> None:
        self.check(self.has_driver)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self.check(index < len(self.cards))
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        every = [each for card in self.cards for each in (card, *card.parts)]
        found = [card for card in every if card.uuid == uuid]
        self.check(len(found) == 1)
        return found[0]

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        self.supports(card, "mig")
        return [int(bool(card.parts)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, number: int) -> Card:
        # The first place is empty, as it may be.
        self.check(1 <= number <= len(card.parts))
        return card.parts[number - 1]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Card) -> Card | None:
        return part.whole

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> SimpleNamespace:
        self.supports(card, "memory")
        return SimpleNamespace(free=card.total - card.used, total=card.total)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(gpu=25, memory=10)

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:
        self.check(card.whole is None)
        return 312_500

    def nvmlDeviceGetClockInfo(self, card: Card, kind: int) -> int:
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:
        return 41

    def nvmlDeviceGetTotalEccErrors(self, card: Card, kind: int, counter: int) -> int:
        self.supports(card, "ecc")
        return {0: 5, 1: 1}[kind]


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def read(nvml: FakeNvml, index: int = 0) -> dict[str, float]:
    device = NvmlDevice.open(index, nvml)
    assert device is not None
    return device.read()


def test_every_figure_in_its_unit() -> None:
    found = read(FakeNvml(Card("GPU-a")))
    assert found == {
        "device_memory_used_bytes": 3 * GIB,
        "device_memory_bytes": 80 * GIB,
        "device_power_w": 312.5,
        "device_sm_clock_hz": 1980e6,
        "device_memory_clock_hz": 2619e6,
        "device_temperature_c": 41,
        "device_ecc_corrected": 5,
        "device_ecc_uncorrected": 1,
        "device_utilisation": 0.25,
    }
    assert found.keys() == DEVICE_STATS.keys()


def test_what_a_card_does_not_support_is_absent() -> None:
    found = read(FakeNvml(Card("GPU-a", lacks=frozenset({"ecc", "memory", "mig"}))))
    absent = {name for name in DEVICE_STATS if "ecc" in name or name.startswith("device_memory_")}
    assert DEVICE_STATS.keys() - found.keys() == absent - {"device_memory_clock_hz"}


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (None, 3, 3),
        ("", 0, None),
        ("2,0", 0, 2),
        ("2, 0", 1, 0),
        ("2,0", 2, None),
        ("GPU-1f,MIG-7a", 1, "MIG-7a"),
        ("0,-1,1", 1, None),
        ("NoDevFiles", 0, None),
    ],
)
def test_what_is_visible(visible: str | None, index: int, expected: int | str | None) -> None:
    assert visible_device(index, visible) == expected


@pytest.mark.parametrize(
    ("visible", "total"), [("1", 40), ("GPU-bcd", 40), ("GPU-b", 40), ("GPU-a,1", 80)]
)
def test_the_device_that_cuda_means(
    monkeypatch: pytest.MonkeyPatch, visible: str, total: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = FakeNvml(Card("GPU-abc"), Card("GPU-bcd", total=40 * GIB))
    assert read(nvml)["device_memory_bytes"] == total * GIB


def test_a_name_that_could_be_two_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-")
    assert NvmlDevice.open(0, FakeNvml(Card("GPU-a"), Card("GPU-b"))) is None


@pytest.mark.parametrize(("visible", "total"), [("MIG-y", 20), ("0", 10), ("GPU-a", 10)])
def test_of_a_mig_instance_memory_is_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str, total: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parts = [Card("MIG-x", total=10 * GIB), Card("MIG-y", total=20 * GIB)]
    found = read(FakeNvml(Card("GPU-a", parts=parts)))
    assert found["device_memory_bytes"] == total * GIB
    assert found["device_power_w"] == 312.5
    assert "device_utilisation" not in found, "it would be the whole card's"


def test_no_driver_and_no_device_are_no_error() -> None:
    assert NvmlDevice.open(0, FakeNvml(has_driver=False)) is None
    assert NvmlDevice.open(1, FakeNvml(Card("GPU-a"))) is None
    assert DeviceSampler.of("cpu") is None
    assert DeviceSampler.of("simulated") is None


def test_it_asks_once_an_interval_and_stops() -> None:
    class Counting(NvmlDevice):
        num_reads = 0

        def read(self) -> dict[str, float]:
            self.num_reads += 1
            return super().read()

    card = Card("GPU-a")
    device = Counting(FakeNvml(card), card, card)
    sampler = DeviceSampler(device, interval_s=0.02)
    assert sampler.latest == {}
    sampler.start()
    wait_until(lambda: device.num_reads >= 3)
    assert sampler.latest["device_memory_used_bytes"] == 3 * GIB
    sampler.stop()
    wait_until(lambda: not any(thread.name == "shoal-device" for thread in threading.enumerate()))


def test_an_engine_on_a_gpu_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("GPU-a")
    device = NvmlDevice(FakeNvml(card), card, card)
    sampler = DeviceSampler(device)
    monkeypatch.setattr(DeviceSampler, "of", lambda name: sampler)
    with running_engine() as core:
        wait_until(lambda: "device_power_w" in core.stats())
        assert core.stats()["device_temperature_c"] == 41


def test_an_engine_on_a_cpu_has_none() -> None:
    with running_engine() as core:
        assert not DEVICE_STATS.keys() & core.stats().keys()
