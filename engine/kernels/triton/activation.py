"""The gated activation between a layer's two MLP products.

Invariant: computed in float32 and rounded once.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.numbers import tanh

_BLOCK = 1024


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See `engine.kernels.ops.Ops.gated_activation`."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape
    size = width // 2
    output = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    _gated[(tokens, triton.cdiv(size, block))](
        gate_up, output, SIZE=size, BLOCK=block, KIND=kind, num_warps=max(1, block // 256)
    )
    return output


@triton.jit
def _gated(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    row = gate_up + token * 2 * SIZE
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu_tanh":
        # sqrt(2 / pi), and the cubic term of https://arxiv.org/abs/1606.08415.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = 0.5 * gate * (1.0 + tanh(inner))
    else:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(output + token * SIZE + columns, (activated * up).to(output.dtype.element_ty), mask)
