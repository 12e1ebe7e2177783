"""The device that a configuration names."""

import torch

from engine.errors import ConfigurationError
from engine.models.sharding import WHOLE, Shard


def usable_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """Of ``auto``: the GPU where there is one; of several ranks each has its own. Raises
    `ConfigurationError` for one that torch cannot use here."""
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        try:
            device = torch.device(name)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"device {name!r} is not usable: {error}") from error
    return device if shard.count == 1 else _of_rank(device, shard)


def _of_rank(device: torch.device, shard: Shard) -> torch.device:
    if device.index is not None or device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"device is {device}, and tensor_parallel_size {shard.count} needs cpu, or cuda "
            "without a number"
        )
    if device.type == "cpu":
        return device
    if torch.cuda.device_count() < shard.count:
        raise ConfigurationError(
            f"tensor_parallel_size is {shard.count}, and this process sees "
            f"{torch.cuda.device_count()} GPUs"
        )
    device = torch.device("cuda", shard.rank)
    torch.cuda.set_device(device)
    return device
