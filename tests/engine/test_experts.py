"""Layers of experts in the C++ kernels against `mixture`; families are in test_fused_decoder."""

import dataclasses
import math
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.cpu.build import cpu_kernels
from engine.kernels.torch_ops import TorchOps
from engine.models.decoder_traits import NormPlan, read_decoder_traits
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import random_weights
from engine.models.mixture import ExpertWeights, mixture
from engine.models.native_decoder import NativeDecoder
from engine.models.op_decoder import OpDecoder
from engine.models.support import load_config
from engine.models.traits import read_traits
from tests.tiny_models import tiny_model

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not cpu_kernels(print), reason="no C++ compiler"),
]

CPU = torch.device("cpu")
# Rows whose choice hangs on less are not compared: rounding may decide it either way.
CLEAR = 1e-3


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Layer:
    """Random weights and rows; experts that no row goes to are NaN."""

    rows: int
    experts: int
    per_row: int
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16
    normalized: bool = True
    activation: str = "silu"
    seed: int = 0

    def __post_init__(self):
        source = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            values = torch.randn(shape, generator=source) * shape[-1] ** -0.5
            return values.to(self.dtype)

        self.weights = {
            "router": normal(self.experts, self.hidden) * 3,
            "expert_gate_up": normal(self.experts, 2 * self.intermediate, self.hidden),
            "expert_down": normal(self.experts, self.hidden, self.intermediate),
        }
        x = torch.randn(self.rows, self.hidden, generator=source).to(self.dtype)
        logits = x.float() @ self.weights["router"].float().T
        falling, order = logits.sort(descending=True)
        clear = torch.ones(self.rows, dtype=torch.bool)
        if self.per_row < self.experts:
            clear = falling[:, self.per_row - 1] - falling[:, self.per_row] > CLEAR
        self.x = x[clear].contiguous()
        unused = torch.ones(self.experts, dtype=torch.bool)
        unused[order[clear, : self.per_row].flatten()] = False
        for name in ("expert_gate_up", "expert_down"):
            self.weights[name][unused] = math.nan

    def native(self, x=None, use_amx=True):
        return torch.ops.shoal_cpu.experts(
            self.x if x is None else x,
            self.weights,
            self.per_row,
            self.normalized,
            self.activation,
            use_amx,
        )

    def expected(self):
        """Of the same values in float32; and the sizes of the terms summed up, by which rounding
        errs: what they come to may be next to nothing."""
        experts = dataclasses.replace(
            tiny_traits()[1].experts, num_per_token=self.per_row, normalized=self.normalized
        )
        router, gate_up, down = (weight.float() for weight in self.weights.values())

        def activation(pair):
            return TorchOps().gated_activation(pair, self.activation)

        def size(pair):
            return activation(pair).abs()

        x = self.x.float()
        return (
            mixture(x, ExpertWeights(router, gate_up, down), experts, activation),
            mixture(x, ExpertWeights(router, gate_up, down.abs()), experts, size),
        )


def tiny_traits():
    config = load_config(tiny_model("qwen3_moe"))
    traits = read_traits(config, tiny_model("qwen3_moe"))
    return traits, read_decoder_traits(config, traits)


@st.composite
def layers(draw):
    experts = draw(st.integers(1, 40))
    return Layer(
        rows=draw(st.integers(1, 90)),
        experts=experts,
        per_row=draw(st.integers(1, min(experts, 9))),
        hidden=draw(st.integers(1, 130)),
        intermediate=draw(st.integers(1, 90)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        normalized=draw(st.booleans()),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        seed=draw(st.integers(0, 1000)),
    )


def check(layer, use_amx=True):
    found, (expected, sizes) = layer.native(use_amx=use_amx), layer.expected()
    assert found.dtype == torch.float32
    assert found.shape == layer.x.shape
    if not len(expected):
        return
    # What the second product reads is rounded to 8 bits; without a tile unit, results are too.
    tolerance = 1e-5 if layer.dtype == torch.float32 else 1e-2
    largest = sizes.max().item()
    torch.testing.assert_close(found, expected, atol=tolerance * largest, rtol=tolerance)


@given(layers(), st.booleans(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_they_compute_what_torch_does(layer, use_amx, num_threads):
    with threads(num_threads):
        check(layer, use_amx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_rows_and_few_experts(dtype):
    """More rows an expert than a product takes at once."""
    with threads(2):
        check(Layer(1100, 3, 2, 70, 48, dtype))


@pytest.mark.skipif(
    not (cpu_kernels(print) and torch.ops.shoal_cpu.amx_usable()), reason="no tile unit"
)
@given(st.integers(2, 500), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_row_depends_on_itself_alone(rows, seed):
    layer = Layer(rows, 12, 3, 96, 40, seed=seed)
    with threads(1):
        expected = layer.native()
    with threads(3):
        assert torch.equal(layer.native(), expected)
        few = layer.x[len(layer.x) // 3 :][:5].contiguous()
        assert torch.equal(layer.native(few), expected[len(layer.x) // 3 :][:5])
        ill = layer.x.clone()
        ill[0] = math.nan
        found = layer.native(ill)
    assert found[0].isnan().all()
    # Experts that only it goes to are NaN, and no other row notices.
    assert torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize("use_amx", [False, True])
def test_of_equal_scores_the_first_is_taken(use_amx):
    layer = Layer(9, 4, 1, 32, 16, normalized=False)
    layer.weights["router"][:] = layer.weights["router"][2]
    layer.weights["expert_gate_up"].normal_()
    layer.weights["expert_down"].normal_()
    found = layer.native(use_amx=use_amx)
    layer.weights["expert_gate_up"][1:] = math.nan
    assert found.isfinite().all()
    assert torch.equal(layer.native(use_amx=use_amx), found)


@pytest.mark.parametrize("use_amx", [False, True])
def test_close_scores_are_told_apart(use_amx):
    """By less than their own rounding in bfloat16."""
    layer = Layer(4, 2, 1, 64, 16)
    layer.x = torch.ones(4, 64, dtype=torch.bfloat16)
    layer.weights["router"][:] = 1.0
    layer.weights["router"][1, 0] = 1.0078125
    layer.weights["expert_gate_up"].normal_()[0] = math.nan
    layer.weights["expert_down"].normal_()
    assert layer.native(use_amx=use_amx).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router": torch.zeros(3, 8)}, r"router has shape \[3, 8\], not \[4, 8\]"),
        ({"expert_gate_up": torch.zeros(4, 6, 8)}, r"not \[4, 12, 8\]"),
        ({"expert_down": torch.zeros(4, 8)}, "expert_down"),
        ({"router": torch.zeros(4, 8).bfloat16()}, "router is not of the rows' dtype"),
    ],
    ids=["router", "gate up", "down", "dtype"],
)
def test_weights_of_other_shapes_are_refused(change, message):
    layer = Layer(2, 4, 2, 8, 6, torch.float32)
    layer.weights |= change
    with pytest.raises(RuntimeError, match=message):
        layer.native()


@torch.inference_mode()
def test_a_norm_of_what_experts_give():
    """No family has both; the traits can say it."""
    traits, decoder = tiny_traits()
    norms = NormPlan(mlp="pre_feedforward_layernorm", mlp_output="post_feedforward_layernorm")
    decoder = dataclasses.replace(decoder, norms=norms)
    tensors = random_weights(traits, decoder, CPU).tensors
    torch.manual_seed(3)
    for layer in range(traits.num_layers):
        tensors[f"{layer}.mlp_output_norm"].normal_()
    table = np.arange(4, dtype=np.int32)
    batch = AttentionBatch.build([SequenceSlice(0, 50, table)], 16)
    tokens = torch.arange(50) * 7 % traits.vocab_size
    logits = []
    for backend in (
        NativeDecoder(traits, decoder, tensors),
        OpDecoder(traits, decoder, tensors, TorchOps()),
    ):
        model = FusedDecoder(traits, decoder, backend, CPU, 0)
        cache = KVCache(traits, 4, 16, CPU)
        logits.append(model.forward(tokens, batch, torch.arange(50), cache))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
