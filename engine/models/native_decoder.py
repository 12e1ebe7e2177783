"""The native decoder: a whole step in one call, with the GIL released.

Invariant: what it is given lives as long as the call; it keeps weights and scratch memory only.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.cpu.build import cpu_kernels
from engine.models.decoder_traits import DecoderTraits, ExpertTraits
from engine.models.kv_cache import KVCache
from engine.models.traits import ModelTraits


def why_not_native(traits: ModelTraits, decoder: DecoderTraits, device: torch.device) -> str | None:
    """What of this model its kernels do not cover, were they built; none: they cover it."""
    if device.type != "cpu":
        return f"the C++ kernels run on a CPU, not on {device.type}"
    if traits.dtype not in ("float32", "bfloat16"):
        return f"the C++ kernels compute in float32 and bfloat16, not in {traits.dtype}"
    if traits.kv_dtype is not None:
        return f"the C++ kernels keep KV in the model's dtype, not in {traits.kv_dtype}"
    if traits.head_dim % 16 != 0:
        return f"the C++ kernels need a head size that is a multiple of 16, not {traits.head_dim}"
    return None


class NativeDecoder:
    """`OpDecoder`'s interface over `engine/kernels/cpu/decoder.h`.

    It copies the weights into the order its kernels read them in, where the processor has a tile
    unit and they are bfloat16.
    """

    def __init__(
        self,
        traits: ModelTraits,
        decoder: DecoderTraits,
        tensors: dict[str, torch.Tensor],
        use_amx: bool = True,
    ) -> None:
        numbers = {
            "hidden_size": decoder.hidden_size,
            "intermediate_size": decoder.intermediate_size,
            "vocab_size": traits.vocab_size,
            "num_heads": traits.num_heads,
            "num_kv_heads": traits.num_kv_heads,
            "head_dim": traits.head_dim,
            "rms_norm_eps": decoder.rms_norm_eps,
            "embedding_scale": decoder.embedding_scale,
            "attention_scale": decoder.attention_scale,
            "attention_softcap": decoder.attention_softcap or 0.0,
            "final_softcap": decoder.final_softcap or 0.0,
            **_expert_numbers(decoder.experts),
        }
        self._decoder: Any = torch.classes.shoal_cpu.Decoder(
            {name: float(value) for name, value in numbers.items()},
            [window or 0 for window in traits.sliding_windows],
            decoder.activation,
            use_amx,
        )
        for name, tensor in tensors.items():
            self._decoder.set_weight(name, tensor)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        angles: Angles,
        rows: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """See `OpDecoder.forward`."""
        logits: torch.Tensor = self._decoder.forward(
            {
                "token_ids": token_ids,
                "cos": angles.cos,
                "sin": angles.sin,
                "slot_blocks": batch.slot_blocks,
                "slot_offsets": batch.slot_offsets,
                "query_starts": torch.tensor(batch.query_starts),
                "context_lens": torch.tensor(batch.context_lens),
                "block_tables": batch.block_tables,
                "rows": rows,
            },
            [keys for keys, _ in cache.layers],
            [values for _, values in cache.layers],
        )
        return logits

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits.max(dim=-1)`` of what `forward` gave, which torch takes 8 ms for at 64 rows of
        49,152."""
        best, ids = self._decoder.row_max(logits)
        return best, ids

    def take_timings(self) -> dict[str, float]:
        """Seconds spent in each part of a step since the last call."""
        return dict(self._decoder.take_timings())


def _expert_numbers(experts: ExpertTraits | None) -> dict[str, int]:
    """All 0 for a model without them."""
    return {
        "num_experts": experts.num_experts if experts else 0,
        "experts_per_token": experts.num_per_token if experts else 0,
        "expert_intermediate_size": experts.intermediate_size if experts else 0,
        "normalized_experts": int(experts.normalized) if experts else 0,
    }


def try_native_decoder(
    traits: ModelTraits,
    decoder: DecoderTraits,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    progress: Callable[[str], None],
) -> NativeDecoder | None:
    """None where the kernels do not cover the model or cannot be built."""
    if why_not_native(traits, decoder, device) or not cpu_kernels(progress):
        return None
    return NativeDecoder(traits, decoder, tensors)
