"""The `transformers` module of a checkpoint, which a fused decoder is compared with at load.

Invariant: it takes no memory for weights of its own. It reads those of the decoder, or, where the
decoder holds a part of a model, has one of its layers' tensors from the checkpoint while that layer
runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights

from engine.models.decoder_traits import NotFused
from engine.models.merged_weights import MergedWeights, WholeTensors


def oracle_over(weights: MergedWeights, model_class: Any, config: Any) -> Any:
    """A module over views of `weights`. Raises `NotFused` where they do not fill it."""
    module = _empty(model_class, config)
    module.load_state_dict(weights.views, strict=False, assign=True)
    module.tie_weights()
    if left := [name for name, tensor in module.named_parameters() if tensor.is_meta]:
        raise _unknown(left)
    return module.to(weights.tensors["embedding"].device).eval().requires_grad_(False)


def oracle_from(weights: WholeTensors, model_class: Any, config: Any) -> Any:
    """A module that reads its weights as it runs. Raises `NotFused` where they do not fill it."""
    module = _empty(model_class, config).eval().requires_grad_(False)
    if left := [name for name, _ in module.named_parameters() if name not in weights]:
        raise _unknown(left)
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(weights.device))
        names = [name for name, _ in part.named_parameters(recurse=False)]
        if names:
            full = {name: f"{prefix}.{name}" for name in names}
            part.register_forward_pre_hook(_filling(full, weights.read))
            part.register_forward_hook(_emptying(full))
    return module


def _empty(model_class: Any, config: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        return model_class._from_config(config, attn_implementation="eager")


def _unknown(names: list[str]) -> NotFused:
    return NotFused(f"the model's own class has weights that it does not know: {names[0]}")


def _filling(
    full: dict[str, str], read: Callable[[str], torch.Tensor]
) -> Callable[[torch.nn.Module, Any], None]:
    def fill(part: torch.nn.Module, _: Any) -> None:
        for name, full_name in full.items():
            setattr(part, name, torch.nn.Parameter(read(full_name), requires_grad=False))

    return fill


def _emptying(full: dict[str, str]) -> Callable[[torch.nn.Module, Any, Any], None]:
    def empty(part: torch.nn.Module, *_: Any) -> None:
        for name in full:
            held = getattr(part, name)
            setattr(part, name, torch.nn.Parameter(held.to("meta"), requires_grad=False))

    return empty
