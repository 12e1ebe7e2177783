"""What a GPU says of itself, sampled beside the engine.

Invariant: no step waits for it: a thread of its own asks the driver, at most once a second, and
whoever wants the figures gets the last ones. Without a GPU, a driver or NVML there are none.
"""

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from engine.nvml import NvmlDevice

_INTERVAL_S = 1.0

DEVICE_STATS: Mapping[str, str] = MappingProxyType(
    {
        "device_memory_used_bytes": "Device memory in use, by whomever.",
        "device_memory_bytes": "Device memory in all.",
        "device_utilisation": "Share of the last moments in which a kernel ran, 0 to 1.",
        "device_power_w": "Watts that the card draws.",
        "device_sm_clock_hz": "Clock of the multiprocessors.",
        "device_memory_clock_hz": "Clock of the memory.",
        "device_temperature_c": "Degrees Celsius of the card.",
        "device_ecc_corrected": "Memory errors corrected since the driver was loaded.",
        "device_ecc_uncorrected": "Memory errors not corrected since the driver was loaded.",
    }
)
"""Names and meanings. A figure that a card does not give is absent, not zero."""


class DeviceSampler:
    """Keeps the latest figures of one device, from `start` to `stop`."""

    def __init__(self, device: NvmlDevice, interval_s: float = _INTERVAL_S) -> None:
        self._device = device
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-device", daemon=True)
        self._latest: Mapping[str, float] = {}

    @classmethod
    def of(cls, device: str) -> Self | None:
        """Of a torch device's name; None where there is nothing to sample."""
        kind, _, index = device.partition(":")
        if kind != "cuda":
            return None
        found = NvmlDevice.open(int(index or 0))
        return None if found is None else cls(found)

    @property
    def latest(self) -> Mapping[str, float]:
        """By the names of `DEVICE_STATS`; empty before the first sample. Readable from any
        thread."""
        return self._latest

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once, even when the driver hangs."""
        self._stopped.set()

    def _run(self) -> None:
        while True:
            self._latest = self._device.read()
            if self._stopped.wait(self._interval_s):
                return
