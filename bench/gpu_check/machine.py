"""What the check ran on: card, driver, versions. Uses no CUDA, so that the parts find the device as
the machine left it."""

import importlib
import importlib.metadata
import platform

from bench.figures import Figures
from engine.nvml import NvmlDevice

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "numpy", "nvidia-ml-py")


def describe_machine(device: str) -> Figures:
    """Flat keys; what cannot be told is absent."""
    figures: Figures = {"python": platform.python_version(), "device": device}
    for name in _PACKAGES:
        try:
            figures[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    kind, _, index = device.partition(":")
    card = NvmlDevice.open(int(index or 0)) if kind == "cuda" else None
    if card is not None:
        nvml = importlib.import_module("pynvml")
        figures["card"] = card.name
        figures["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        figures |= {f"at_start_{name}": value for name, value in card.read().items()}
    return figures
