"""The device that a configuration names."""

import torch

from engine.errors import ConfigurationError


def usable_device(name: str) -> torch.device:
    """Of ``auto``: the GPU where there is one. Raises `ConfigurationError` for one that torch
    cannot use here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device {name!r} is not usable: {error}") from error
    return device
