"""Quantised checkpoints: which quantiser of `transformers` loads one here, and how.

Invariant: it is decided from the config and the machine, before any weight is read. What is not
listed, or lacks something, is refused with what it lacks.

Some methods multiply by packed weights with kernels of their own; where those cannot run, their
quantiser unpacks the weights while loading, and the model takes as much memory as one that was
never quantised, with the quantised one's values.
"""

import copy
import importlib.util
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from engine.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class _Method:
    title: str
    packages: tuple[tuple[str, str], ...] = ()
    """(module, package) that its quantiser imports."""
    kernel_packages: tuple[tuple[str, str], ...] = ()
    """Likewise, to multiply by packed weights; without them they are unpacked."""
    capability: tuple[int, int] | None = None
    """Least compute capability of a GPU that multiplies by packed weights; below it, and on a CPU,
    they are unpacked. None: its quantiser knows."""


_KERNELS = ("kernels", "kernels")
_METHODS = MappingProxyType(
    {
        "fp8": _Method("fine-grained FP8", kernel_packages=(_KERNELS,), capability=(8, 9)),
        "mxfp4": _Method(
            "MXFP4", kernel_packages=(_KERNELS, ("triton", "triton")), capability=(7, 5)
        ),
        "awq": _Method("AWQ", (("gptqmodel", "gptqmodel"),)),
        "gptq": _Method("GPTQ", (("optimum", "optimum"), ("gptqmodel", "gptqmodel"))),
        "compressed-tensors": _Method(
            "compressed-tensors", (("compressed_tensors", "compressed-tensors"),)
        ),
        "bitsandbytes": _Method("bitsandbytes", (("bitsandbytes", "bitsandbytes"),)),
    }
)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a quantised checkpoint is served."""

    method: str
    reason_unpacked: str | None
    """Why its weights are unpacked while they are loaded; none: they stay as they are stored."""
    dtype: str
    """What its quantiser computes in, given the dtype that was asked for."""

    def __str__(self) -> str:
        title = _METHODS[self.method].title
        if self.reason_unpacked is None:
            return f"quantised ({title}), computed as stored"
        return f"quantised ({title}), unpacked to {self.dtype} at load: {self.reason_unpacked}"

    def loading_config(self, config: Any) -> Any:
        """`config`, telling the quantiser to unpack where that was decided."""
        if self.reason_unpacked is None:
            return config
        config = copy.deepcopy(config)
        config.quantization_config = _stated(config) | {"dequantize": True}
        return config


def quantised_by(config: Any) -> str | None:
    """The method that a config states; none for an ordinary checkpoint."""
    stated = _stated(config)
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        return "bitsandbytes"
    return str(stated.get("quant_method", "unnamed")) if stated else None


def plan_quantisation(config: Any, device: torch.device, dtype: str) -> Quantisation | None:
    """None for an ordinary checkpoint. `dtype` is a key of `traits.DTYPE_BYTES`. Raises
    `ModelRefused` where this machine lacks what the method needs."""
    name = quantised_by(config)
    if name is None:
        return None
    method = _METHODS.get(name)
    if method is None:
        raise ModelRefused(
            f"its quantisation method {name!r} is not served; these are: {', '.join(_METHODS)}"
        )
    if missing := _missing(method.packages):
        raise ModelRefused(
            f"it is quantised ({method.title}), which needs {' and '.join(missing)}, not installed "
            "here"
        )
    reason_unpacked = _reason_unpacked(method, device)
    stated = _stated(config)
    if reason_unpacked is not None:
        stated["dequantize"] = True
    return Quantisation(
        name, reason_unpacked, _checked_dtype(method, stated, device, getattr(torch, dtype))
    )


def _checked_dtype(
    method: _Method, stated: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> str:
    """Asks the quantiser itself, which knows versions and devices better than any list."""
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantiser = AutoHfQuantizer.from_config(stated, pre_quantized=True)
        quantiser.validate_environment(device_map={"": str(device)}, weights_only=True)
        wanted: torch.dtype = quantiser.update_dtype(dtype)
    except Exception as error:
        raise ModelRefused(f"it is quantised ({method.title}), and {error}") from error
    return str(wanted).removeprefix("torch.")


def _reason_unpacked(method: _Method, device: torch.device) -> str | None:
    if method.capability is None:
        return None
    if device.type != "cuda":
        return f"its kernels run on a GPU, not on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < method.capability:
        return (
            f"its kernels need compute capability {_version(method.capability)}, and this GPU has "
            f"{_version(found)}"
        )
    if missing := _missing(method.kernel_packages):
        return f"its kernels need {' and '.join(missing)}, not installed here"
    return None


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _missing(packages: tuple[tuple[str, str], ...]) -> list[str]:
    return [name for module, name in packages if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _stated(config: Any) -> dict[str, Any]:
    """A copy of what the config says of quantisation; empty for nothing."""
    stated = getattr(config, "quantization_config", None)
    if not stated:
        return {}
    return copy.deepcopy(stated) if isinstance(stated, dict) else dict(stated.to_dict())
