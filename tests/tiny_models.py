"""Tiny random models, saved as a checkpoint would be: safetensors, config, generation config.

They are made once in a test session (see `tiny_model`), in float32, a few hundred kilobytes each.
The weights are larger than a fresh model's, so that attention is far from uniform and a greedy
continuation far from a constant.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 384
EOS_TOKEN_ID = 2
SLIDING_WINDOW = 24
MAX_MODEL_LEN = 1024

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}


def _config(name: str) -> Any:
    """The config of one tiny model."""
    match name:
        case "llama":
            return transformers.LlamaConfig(**_SHAPE)
        case "qwen3":
            return transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True)
        case "gemma2":
            return transformers.Gemma2Config(
                **_SHAPE,
                # Tied to scaled embeddings, random weights would repeat their input for ever.
                tie_word_embeddings=False,
                query_pre_attn_scalar=16,
                sliding_window=SLIDING_WINDOW,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=10.0,
            )
        case "gpt_oss":
            return transformers.GptOssConfig(
                **_SHAPE,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=SLIDING_WINDOW,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        case "mistral":
            return transformers.MistralConfig(**_SHAPE, sliding_window=SLIDING_WINDOW)
        case "qwen2":
            return transformers.Qwen2Config(**_SHAPE)
        case "phi3":
            return transformers.Phi3Config(
                **_SHAPE,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
            )
        case "olmo2":
            return transformers.Olmo2Config(**_SHAPE)
    return _expert_config(name)


def _expert_config(name: str) -> Any:
    match name:
        case "qwen3_moe":
            return transformers.Qwen3MoeConfig(
                **_SHAPE,
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=32,
                norm_topk_prob=False,
                # Of three layers the second is plain.
                mlp_only_layers=[1],
            )
        case "mixtral":
            return transformers.MixtralConfig(
                **_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=SLIDING_WINDOW
            )
    raise ValueError(name)


NAMES = ("llama", "qwen3", "gemma2", "gpt_oss", "mistral")
FUSED_NAMES = (
    "llama",
    "qwen3",
    "gemma2",
    "mistral",
    "qwen2",
    "phi3",
    "olmo2",
    "qwen3_moe",
    "mixtral",
)
"""Those that the fused decoder knows."""
_SEEDS = {n: seed for seed, n in enumerate((*NAMES, "qwen2", "phi3", "olmo2", "qwen3_moe"))} | {
    # With it continuations are long enough for a small pool to preempt.
    "mixtral": 21
}


def save_tiny_model(name: str, folder: Path) -> Path:
    """Makes the model `name` anew in `folder`, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS[name])
        model = transformers.AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
                elif parameter_name.endswith("sinks"):
                    parameter.normal_(0.0, 1.0)
                elif parameter_name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@cache
def _session_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="shoal-tiny-models-")


@cache
def tiny_model(name: str) -> Path:
    """The folder of the tiny model `name`; gone when the process ends."""
    return save_tiny_model(name, Path(_session_folder().name) / name)


@cache
def reference_module(name: str) -> Any:
    """The same model as `transformers` runs it, with its own eager attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model(name), attn_implementation="eager", dtype=torch.float32
    ).eval()


def reference_greedy(name: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The continuation that `generate` gives, not stopping at an end token."""
    ids = torch.tensor([prompt])
    output = reference_module(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return list(output[0, len(prompt) :].tolist())
