"""A layer of experts: each token's few, weighted and summed, in float32.

Invariant: both ways of computing it give a token the same sum, but for the order of additions.

`mixture` reads on the host which experts were chosen, and computes those alone, each for its tokens
at once. `mixture_on_device` reads nothing, so that a CUDA graph can be captured of it. It takes
whichever of two forms moves fewer weights: copying the chosen ones out of the stack moves each
three times (read, written, and read by the product), the whole stack is read once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.models.decoder_traits import ExpertTraits

Activation = Callable[[torch.Tensor], torch.Tensor]
"""``[N, 2 I]``, gate first, to ``[N, I]``."""

_MOVES_OF_A_COPY = 3


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Of one layer, in the model's dtype."""

    router: torch.Tensor
    """[experts, hidden]"""
    gate_up: torch.Tensor
    """[experts, 2 * intermediate, hidden]"""
    down: torch.Tensor
    """[experts, hidden, intermediate]"""


def mixture(
    x: torch.Tensor, weights: ExpertWeights, traits: ExpertTraits, activation: Activation
) -> torch.Tensor:
    """Float32 ``[T, hidden]`` of `x` ``[T, hidden]``. Waits for the device."""
    shares, chosen = _routed(x, weights, traits)
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, places = torch.where(chosen == expert)
        activated = activation(F.linear(x[tokens], weights.gate_up[expert]))
        computed = F.linear(activated, weights.down[expert]).float()
        output.index_add_(0, tokens, computed * shares[tokens, places, None])
    return output


def mixture_on_device(
    x: torch.Tensor, weights: ExpertWeights, traits: ExpertTraits, activation: Activation
) -> torch.Tensor:
    """What `mixture` gives, by launches that depend on shapes alone, for the few tokens of a decode
    step: with many it computes, or copies, many times as much."""
    shares, chosen = _routed(x, weights, traits)
    if _MOVES_OF_A_COPY * chosen.numel() < traits.num_experts:
        return _by_copies(x, weights, activation, shares, chosen)
    return _by_all(x, weights, activation, shares, chosen)


def _routed(
    x: torch.Tensor, weights: ExpertWeights, traits: ExpertTraits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's shares of its experts, float32, and their numbers, int64, ``[T, chosen]``."""
    # In float32: rounded, close scores would send tokens to other experts.
    scores = F.linear(x.float(), weights.router.float()).softmax(dim=-1)
    shares, chosen = scores.topk(traits.num_per_token, dim=-1)
    if traits.normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, chosen


def _by_copies(
    x: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    shares: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """A product for each choice, with its own copy of the expert's weights."""
    numbers = chosen.flatten()
    inputs = x.repeat_interleave(chosen.shape[1], dim=0)
    gate_up = torch.bmm(weights.gate_up.index_select(0, numbers), inputs[:, :, None])
    activated = activation(gate_up.squeeze(2))
    computed = torch.bmm(weights.down.index_select(0, numbers), activated[:, :, None])
    each = computed.float().view(*chosen.shape, -1)
    return (each * shares[:, :, None]).sum(dim=1)


def _by_all(
    x: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    shares: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Every expert for every token; what was not chosen is dropped."""
    num_experts, doubled, hidden = weights.gate_up.shape
    num_tokens = len(x)
    inputs = x.expand(num_experts, num_tokens, hidden)
    gate_up = torch.bmm(inputs, weights.gate_up.transpose(1, 2))
    activated = activation(gate_up.view(-1, doubled)).view(num_experts, num_tokens, -1)
    computed = torch.bmm(activated, weights.down.transpose(1, 2)).float()
    spread = torch.zeros(num_tokens, num_experts, device=x.device).scatter_(1, chosen, shares)
    spread = spread.t()[:, :, None]
    # Times 0 is not enough: what was never meant to be computed may be infinite.
    return (computed * spread).masked_fill_(spread == 0.0, 0.0).sum(dim=0)
