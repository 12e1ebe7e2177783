"""One GPU, or one MIG instance of a GPU, as NVML sees it.

Invariant: nothing here raises for what a machine, a driver or a card does not have: a device that
cannot be opened is None, and a figure that a card does not give is absent.

Of a MIG instance (a slice of a card) memory is its own; clocks, power, temperature and errors exist
for the whole card only, and are the card's.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, Self

Reading = Callable[[], float]


def visible_device(index: int, visible: str | None) -> int | str | None:
    """What `index`, CUDA's number of a device in this process, is to NVML: the number or UUID (also
    of a MIG instance) at that place in `visible`, the value of CUDA_VISIBLE_DEVICES. None: there is
    no such device. CUDA takes nothing at or after an entry that it does not know."""
    if visible is None:
        return index
    names: list[int | str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.isdecimal():
            names.append(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            names.append(name)
        else:
            break
    return names[index] if index < len(names) else None


class NvmlDevice:
    """Reads the counters of one device. Use from any thread."""

    def __init__(self, nvml: Any, handle: Any, card: Any) -> None:
        """`card` is the GPU that a MIG instance is a part of, else `handle` itself."""
        self._nvml = nvml
        self._handle = handle
        self._is_part = card is not handle
        self._readings = _readings(nvml, handle, card, self._is_part)

    @classmethod
    def open(cls, index: int, nvml: Any = None) -> Self | None:
        """The device that CUDA calls `index` in this process. None without NVML, a driver, or such
        a device."""
        if nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                return None
        name = visible_device(index, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if name is None:
            return None
        try:
            nvml.nvmlInit()
            handle, card = _find(nvml, name)
        except nvml.NVMLError:
            return None
        return cls(nvml, handle, card)

    @property
    def name(self) -> str:
        """What the card is sold as; empty where it does not say."""
        try:
            return str(self._nvml.nvmlDeviceGetName(self._handle))
        except self._nvml.NVMLError:
            return ""

    def memory(self) -> tuple[int, int] | None:
        """Free and total bytes."""
        try:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:
            return None
        return int(found.free), int(found.total)

    def read(self) -> dict[str, float]:
        """What the card gives, by the names of `engine.device_metrics.DEVICE_STATS`."""
        figures: dict[str, float] = {}
        if (memory := self.memory()) is not None:
            free, total = memory
            figures |= {"device_memory_used_bytes": total - free, "device_memory_bytes": total}
        for name, reading in self._readings.items():
            try:
                figures[name] = reading()
            except self._nvml.NVMLError:
                continue
        return figures


def _readings(nvml: Any, handle: Any, card: Any, is_part: bool) -> dict[str, Reading]:
    def errors(kind: int) -> int:
        return int(nvml.nvmlDeviceGetTotalEccErrors(card, kind, nvml.NVML_VOLATILE_ECC))

    readings: dict[str, Reading] = {
        "device_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
        "device_sm_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM) * 1e6,
        "device_memory_clock_hz": lambda: (
            nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM) * 1e6
        ),
        "device_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
            card, nvml.NVML_TEMPERATURE_GPU
        ),
        "device_ecc_corrected": lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "device_ecc_uncorrected": lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }
    if not is_part:
        # The card's would say how busy its other instances are.
        readings["device_utilisation"] = lambda: (
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        )
    return readings


def _find(nvml: Any, name: int | str) -> tuple[Any, Any]:
    """The handle of a device, and of its card. Raises `NVMLError`."""
    if isinstance(name, str) and name.startswith("MIG-"):
        part = nvml.nvmlDeviceGetHandleByUUID(name)
        return part, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
    by_index = nvml.nvmlDeviceGetHandleByIndex
    card = _by_uuid(nvml, name) if isinstance(name, str) else by_index(name)
    part = _first_instance(nvml, card)
    return (card if part is None else part), card


def _by_uuid(nvml: Any, name: str) -> Any:
    """CUDA takes the beginning of a UUID for the whole, where only one device begins so."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        cards = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        found = [card for card in cards if nvml.nvmlDeviceGetUUID(card).startswith(name)]
        if len(found) != 1:
            raise
        return found[0]


def _first_instance(nvml: Any, card: Any) -> Any | None:
    """What CUDA takes of a card that is divided and was not named by the instance. None for a card
    that is not, or cannot be."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(card)
        if current != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(card))
    except nvml.NVMLError:
        return None
    for number in numbers:
        try:
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
        except nvml.NVMLError:
            continue
    return None
