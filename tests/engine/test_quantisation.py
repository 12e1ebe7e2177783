"""Quantised checkpoints: tiny ones written here must give the tokens of the same model unpacked by
hand, and what a machine lacks is named before anything is loaded."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from configs.engine import CacheConfig, EngineConfig
from engine.errors import ModelRefused
from engine.executors.model import ModelExecutor
from engine.models import quantisation
from engine.models.check import ServingPath, check_model
from engine.models.decoder_traits import NotFused
from engine.models.fused_decoder import FusedDecoder
from engine.models.load import load_model
from engine.models.quantisation import plan_quantisation
from engine.models.support import load_config
from engine.models.transformers_model import TransformersModel
from engine.wire import SamplingParams
from tests.engine.rig import Rig
from tests.engine.test_model_support import copy_of
from tests.tiny_models import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_VALUES += [-value for value in FP4_VALUES]
NUM_OUTPUT = 12
PROMPTS = [[5, 9, 200, 31], list(range(3, 60)), [7] * 33]


def read_json(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


def save(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fp8_pair(folder: Path) -> tuple[Path, Path]:
    """Tiny Llama with the matrices of its layers in FP8, a scale for 16 by 16; and unpacked."""
    config = read_json(tiny_model("llama") / "config.json")
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, weight in load_file(tiny_model("llama") / "model.safetensors").items():
        if ".layers." not in name or weight.dim() != 2:
            packed[name] = plain[name] = weight
            continue
        rows, columns = weight.shape
        blocks = weight.view(rows // 16, 16, columns // 16, 16)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        spread = scales[:, None, :, None]
        small = (blocks / spread).to(torch.float8_e4m3fn)
        packed[name] = small.view(rows, columns)
        packed[f"{name}_scale_inv"] = scales
        plain[name] = (small.float() * spread).view(rows, columns)
    quantised = config | {"quantization_config": FP8 | {"modules_to_not_convert": ["lm_head"]}}
    return save(folder / "packed", quantised, packed), save(folder / "plain", config, plain)


def mxfp4_pair(folder: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with experts in MXFP4: two values a byte, a power of two for 32 of them."""
    source = torch.Generator().manual_seed(4)
    shape = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    config = transformers.GptOssConfig(
        **shape,
        vocab_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(4)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=source)
    module.save_pretrained(folder / "whole")
    tensors = load_file(folder / "whole" / "model.safetensors")
    stated = read_json(folder / "whole" / "config.json")
    packed, plain = dict(tensors), dict(tensors)
    values = torch.tensor(FP4_VALUES)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=source
        )
        scales = torch.randint(
            122, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=source
        )
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        unpacked = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
        unpacked = unpacked.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        plain[name] = unpacked.flatten(-2).transpose(1, 2)
    quantised = stated | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        }
    }
    return save(folder / "packed", quantised, packed), save(folder / "plain", stated, plain)


def generate(folder: Path, prompt: list[int]) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_OUTPUT,
        min_new_tokens=NUM_OUTPUT,
        do_sample=False,
        eos_token_id=None,
    )
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize(("pair", "title"), [(fp8_pair, "fine-grained FP8"), (mxfp4_pair, "MXFP4")])
def test_on_a_cpu_it_gives_the_tokens_of_the_model_unpacked(tmp_path, pair, title) -> None:
    packed, plain = pair(tmp_path)
    phases: list[str] = []
    config = EngineConfig(
        model=str(packed),
        device="cpu",
        dtype="float32",
        threads=1,
        cache=CacheConfig(num_blocks=64),
    )
    executor = ModelExecutor.load(config, phases.append)
    rig = Rig(64, executor=executor, max_num_batched_tokens=40)
    for number, prompt in enumerate(PROMPTS):
        rig.add(str(number), prompt, SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True))
    rig.drain()
    for number, prompt in enumerate(PROMPTS):
        assert rig.output["ingress", str(number)] == generate(plain, prompt)
    assert any(f"quantised ({title}), unpacked to float32 at load" in phase for phase in phases)

    found = check_model(str(packed), CPU, "float32")
    assert found.path is ServingPath.TRANSFORMERS
    assert found.reason == (
        f"quantised ({title}), unpacked to float32 at load: its kernels run on a GPU, not on cpu"
    )
    assert found.need is not None
    stored = sum(tensor.nbytes for tensor in load_file(packed / "model.safetensors").values())
    assert found.need.stored_bytes == stored
    assert found.need.weight_bytes == pytest.approx(executor.info.weight_bytes, rel=2e-3)
    assert found.need.weight_bytes > stored
    executor.close()


def test_the_fused_decoder_leaves_it_to_transformers(tmp_path) -> None:
    packed, _ = fp8_pair(tmp_path)
    with pytest.raises(NotFused, match=r"quantised \(fp8\)"):
        FusedDecoder.load(packed, CPU)
    model = load_model(packed, CPU)
    assert isinstance(model, TransformersModel)
    model.close()


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "awq", "bits": 4}, r"AWQ\), which needs gptqmodel, not installed"),
        ({"quant_method": "gptq", "bits": 4}, r"GPTQ\), which needs optimum and gptqmodel, not"),
        ({"quant_method": "compressed-tensors"}, r"which needs compressed-tensors, not installed"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"needs bitsandbytes, not"),
        ({"load_in_8bit": True}, r"needs bitsandbytes, not installed"),
        ({"quant_method": "aqlm"}, r"'aqlm' is not served; these are: fp8, mxfp4, awq"),
        ({"bits": 4}, r"'unnamed' is not served"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"positive integers"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_loaded(
    tmp_path, monkeypatch, stated, reason
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(quantisation, "_is_installed", lambda module: False)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", fail)
    folder = copy_of("llama", tmp_path, {"quantization_config": stated})
    with pytest.raises(ModelRefused, match=reason):
        load_model(folder, CPU)
    found = check_model(str(folder), CPU)
    assert (found.path, found.need) == (ServingPath.REFUSED, None)


@pytest.mark.parametrize(
    ("capability", "installed", "reason"),
    [
        ((9, 0), True, None),
        ((8, 9), True, None),
        ((8, 6), True, "its kernels need compute capability 8.9, and this GPU has 8.6"),
        ((9, 0), False, "its kernels need kernels, not installed here"),
    ],
)
def test_a_gpu_computes_as_stored_where_it_can(
    tmp_path, monkeypatch, capability, installed, reason
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(quantisation, "_is_installed", lambda module: installed)
    config = load_config(copy_of("llama", tmp_path, {"quantization_config": FP8}))
    found = plan_quantisation(config, CUDA, "bfloat16")
    assert found is not None
    assert found.reason_unpacked == reason
    stated = found.loading_config(config).quantization_config
    assert stated == FP8 | ({} if reason is None else {"dequantize": True})
    assert "dequantize" not in config.quantization_config
    assert str(found).startswith("quantised (fine-grained FP8), ")


def test_an_ordinary_checkpoint_is_not_quantised() -> None:
    assert plan_quantisation(load_config(tiny_model("llama")), CPU, "float32") is None


def test_kernels_that_do_not_run_are_a_refusal(tmp_path, monkeypatch) -> None:
    """A package may be there, and what it downloads not."""
    packed, _ = fp8_pair(tmp_path)
    original = TransformersModel.forward

    def forward(self, *arguments: object) -> None:
        raise ImportError("no kernel for this machine")

    monkeypatch.setattr(TransformersModel, "forward", forward)
    with pytest.raises(ModelRefused, match=r"does not run on cpu: no kernel for this machine"):
        TransformersModel.load(packed, CPU)
    monkeypatch.setattr(TransformersModel, "forward", original)
