"""The fused decoder against `transformers`, family by family (whole engines: test_equality)."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.cpu.build import cpu_kernels
from engine.models import fused_decoder
from engine.models.decoder_traits import NotFused, read_decoder_traits
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.load import load_model
from engine.models.merged_weights import read_weights
from engine.models.native_decoder import NativeDecoder
from engine.models.op_decoder import OpDecoder
from engine.models.support import load_config
from engine.models.traits import read_traits
from engine.models.transformers_model import TransformersModel
from tests.tiny_models import (
    FUSED_NAMES,
    reference_greedy,
    reference_module,
    tiny_model,
)

pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
LENGTHS = (40, 1, 23)
BLOCK_SIZE = 16


class Run:
    """Sequences in a cache full of NaN, one after the other's blocks in reverse."""

    def __init__(self, model, lengths, room=16):
        self.model = model
        counts = [-(-(length + room) // BLOCK_SIZE) for length in lengths]
        self.cache = KVCache(model.traits, sum(counts) + 1, BLOCK_SIZE, CPU)
        for layer in self.cache.layers:
            for cache in layer:
                cache.fill_(float("nan"))
        order = np.arange(sum(counts), dtype=np.int32)[::-1]
        ends = np.cumsum(counts)
        self.tables = [order[end - n : end] for end, n in zip(ends, counts, strict=True)]

    @torch.inference_mode()
    def step(self, parts, rows):
        """`parts`: (sequence, start, token ids)."""
        slices = [SequenceSlice(start, len(ids), self.tables[s]) for s, start, ids in parts]
        tokens = torch.tensor([i for _, _, ids in parts for i in ids])
        batch = AttentionBatch.build(slices, BLOCK_SIZE)
        return self.model.forward(tokens, batch, torch.tensor(rows, dtype=torch.int64), self.cache)


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in LENGTHS]


def chunked_logits(model):
    """All logits of `prompts`, the first computed in two chunks beside the others."""
    long, single, short = prompts()
    run = Run(model, LENGTHS)
    first = run.step([(2, 0, short), (0, 0, long[:17])], range(40))
    second = run.step([(0, 17, long[17:]), (1, 0, single)], range(24))
    return torch.cat([first[23:], second[:23], second[23:], first[:23]])


@torch.inference_mode()
def expected_logits(module):
    return torch.cat([module(input_ids=torch.tensor([ids])).logits[0] for ids in prompts()])


@pytest.fixture(params=["native", "reference"])
def backend(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(fused_decoder, "try_native_decoder", lambda *args: None)
        return OpDecoder
    if not cpu_kernels(print):
        pytest.skip("no C++ compiler")
    return NativeDecoder


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_float32_is_transformers(name, backend):
    model = load_model(tiny_model(name), CPU)
    assert isinstance(model, FusedDecoder)
    assert isinstance(model.backend, backend)
    expected = expected_logits(reference_module(name))
    torch.testing.assert_close(chunked_logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_bfloat16_is_as_close_as_transformers_own(name, backend):
    """Both round; measured from the same weights in float32, the fused one rounds less."""
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model(name), attn_implementation="eager", dtype=torch.bfloat16
    )
    own = expected_logits(exact).float()
    expected = expected_logits(exact.float())
    found = chunked_logits(load_model(tiny_model(name), CPU, "bfloat16"))
    assert found.dtype == torch.float32
    error = (found - expected).square().mean().sqrt()
    own_error = (own - expected).square().mean().sqrt()
    assert error <= 1.1 * own_error
    assert error <= 1e-2 * (expected.max() - expected.min())


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_threads_that_take_rows_of_their_own_compute_the_same(name):
    """Many rows are dealt out to threads by rows, where one thread alone takes all by columns."""
    if not cpu_kernels(print):
        pytest.skip("no C++ compiler")
    model = load_model(tiny_model(name), CPU, "bfloat16")
    generator = torch.Generator().manual_seed(11)
    parts = [(s, 0, torch.randint(3, 384, (n,), generator=generator).tolist())
             for s, n in enumerate((190, 7, 203, 1))]  # fmt: skip
    rows = [189, 196, 399, 400]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(Run(model, [len(ids) for _, _, ids in parts]).step(parts, rows))
    finally:
        torch.set_num_threads(before)
    assert torch.isfinite(found[0]).all()
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_greedy_is_transformers(name, backend):
    model = load_model(tiny_model(name), CPU)
    prompt = prompts()[0]
    run = Run(model, [len(prompt)])
    tokens = list(prompt)
    computed = 0
    for _ in range(16):
        logits = run.step([(0, computed, tokens[computed:])], [len(tokens) - computed - 1])
        computed = len(tokens)
        best, ids = model.row_max(logits)
        assert best.item() == logits.max().item()
        tokens.append(int(ids))
    assert tokens[len(prompt) :] == reference_greedy(name, prompt, 16)


def test_without_rows_only_the_cache_is_written(backend):
    model = load_model(tiny_model("llama"), CPU)
    ids = prompts()[2]
    run = Run(model, [len(ids)])
    assert run.step([(0, 0, ids[:-1])], []).shape == (0, 384)
    logits = run.step([(0, len(ids) - 1, ids[-1:])], [0])
    expected = reference_module("llama")(input_ids=torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_row_max_passes_nan_on_and_takes_the_first(backend):
    model = load_model(tiny_model("llama"), CPU)
    logits = torch.tensor([[1.0, 3.0, 3.0, -4.0], [0.0, float("nan"), 9.0, 1.0]])
    best, ids = model.row_max(logits)
    assert best[0] == 3.0
    assert ids.tolist() == [1, 1]
    assert best[1].isnan()


def copy_of(name, folder, changes):
    target = folder / name
    shutil.copytree(tiny_model(name), target)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    return target


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            }
        },
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=["linear", "llama3", "yarn", "gelu", "gelu tanh"],
)
def test_variants_are_transformers(tmp_path, changes, backend):
    folder = copy_of("llama", tmp_path, changes)
    model = FusedDecoder.load(folder, CPU)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.testing.assert_close(chunked_logits(model), expected_logits(oracle), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"num_experts_per_tok": 8}),
        ("mixtral", {"num_experts_per_tok": 1}),
    ],
    ids=["weights sum to one", "all experts", "one expert"],
)
def test_routing_is_transformers(tmp_path, name, changes, backend):
    folder = copy_of(name, tmp_path, changes)
    model = FusedDecoder.load(folder, CPU)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = expected_logits(oracle)
    torch.testing.assert_close(chunked_logits(model), expected, atol=1e-4, rtol=1e-4)
    unchanged = expected_logits(reference_module(name))
    assert (expected - unchanged).abs().max() > 0.1


def test_which_layers_have_experts():
    def layers(**changes):
        config = load_config(tiny_model("qwen3_moe"))
        for key, value in changes.items():
            setattr(config, key, value)
        found = read_decoder_traits(config, read_traits(config, tiny_model("qwen3_moe")))
        return None if found.experts is None else sorted(found.experts.layers)

    assert layers() == [0, 2]
    assert layers(mlp_only_layers=[], decoder_sparse_step=2) == [1]
    assert layers(mlp_only_layers=[0, 1, 2]) is None
    with pytest.raises(NotFused, match="9 of 8 experts"):
        layers(num_experts_per_tok=9)


def test_experts_are_the_memory_that_the_oracle_reads():
    """Stacked for both, from single tensors in the checkpoint: none is held twice."""
    folder = tiny_model("qwen3_moe")
    config = load_config(folder)
    traits = read_traits(config, folder)
    weights = read_weights(folder, traits, read_decoder_traits(config, traits), CPU)
    stacked = weights.tensors["0.expert_gate_up"]
    assert stacked.shape == (8, 64, 48)
    assert weights.views["model.layers.0.mlp.experts.gate_up_proj"] is stacked
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(stacked[5, :32], saved["model.layers.0.mlp.experts.5.gate_proj.weight"])
    assert torch.equal(stacked[5, 32:], saved["model.layers.0.mlp.experts.5.up_proj.weight"])
    assert weights.num_bytes == sum(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": {"a": {"rope_type": "default"}}}, "between layers"),
    ],
    ids=["model type", "activation", "rope", "rope by layer"],
)
def test_what_is_not_understood_is_left_to_transformers(changes, reason):
    config = load_config(tiny_model("llama"))
    traits = read_traits(config, tiny_model("llama"))
    for name, value in changes.items():
        if name == "model_type":
            traits = dataclasses.replace(traits, model_type=value)
        else:
            object.__setattr__(config, name, value)
    with pytest.raises(NotFused, match=reason):
        read_decoder_traits(config, traits)


def test_an_unknown_family_runs_on_transformers():
    model = load_model(tiny_model("gpt_oss"), CPU)
    assert isinstance(model, TransformersModel)
    model.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.update({"model.layers.0.mlp.gate_proj.bias": torch.zeros(96)}), "know.*bias"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 tensors"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape \(3,\), not \(48,\)"),
    ],
    ids=["extra", "missing", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_not_fused(tmp_path, change, reason):
    folder = copy_of("llama", tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotFused, match=reason):
        FusedDecoder.load(folder, CPU)


@pytest.mark.parametrize("field", ["attention_scale", "rms_norm_eps", "rotary_scale"])
def test_the_comparison_at_load_notices_a_wrong_trait(monkeypatch, field):
    def wrong(config, traits):
        found = read_decoder_traits(config, traits)
        return dataclasses.replace(found, **{field: getattr(found, field) * 1.1 + 0.01})

    monkeypatch.setattr(fused_decoder, "find_record", lambda *args: None)
    monkeypatch.setattr(fused_decoder, "read_decoder_traits", wrong)
    with pytest.raises(NotFused, match="other logits than alone"):
        FusedDecoder.load(tiny_model("llama"), CPU)


def test_files_in_shards(tmp_path):
    reference_module("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = FusedDecoder.load(tmp_path, CPU)
    whole = FusedDecoder.load(tiny_model("llama"), CPU)
    assert torch.equal(chunked_logits(model), chunked_logits(whole))
    assert model.weight_bytes == whole.weight_bytes


def test_weights_are_counted_once():
    model = FusedDecoder.load(tiny_model("qwen3"), CPU)
    tied = sum(
        tensor.nbytes for tensor in load_file(tiny_model("qwen3") / "model.safetensors").values()
    )
    assert model.weight_bytes == tied
