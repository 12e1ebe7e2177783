"""Random models in the shapes of well-known ones, made on the device: no file is read.

Invariant: what a shape computes a token, and the bytes it reads for one, follow from the shape.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.models.decoder_traits import DecoderTraits, read_decoder_traits
from engine.models.traits import ModelTraits


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    def config(self) -> Any:
        """Of `transformers`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=8192,
        )

    def traits(self, dtype: torch.dtype) -> tuple[ModelTraits, DecoderTraits]:
        traits = ModelTraits(
            model_type="llama",
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_model_len=8192,
            eos_token_ids=(),
            sliding_windows=(None,) * self.num_layers,
            dtype=str(dtype).removeprefix("torch."),
        )
        return traits, read_decoder_traits(self.config(), traits)

    @property
    def layer_elements(self) -> int:
        """Weights of the matrices of one layer."""
        heads = self.num_heads + self.num_kv_heads
        return self.hidden_size * (2 * heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def product_elements(self) -> int:
        """Weights that a token is multiplied with on its way to logits."""
        return self.num_layers * self.layer_elements + self.vocab_size * self.hidden_size

    def prefill_flops(self, num_tokens: int) -> float:
        """Of one prompt, whose last token alone gets logits: products, and causal attention."""
        products = 2.0 * self.num_layers * self.layer_elements * num_tokens
        head = 2.0 * self.vocab_size * self.hidden_size
        pairs = num_tokens * (num_tokens + 1) / 2
        return products + head + 4.0 * self.num_layers * self.num_heads * self.head_dim * pairs


ONE_BILLION = Shape(2048, 8192, 16, 32, 8, 64, 128256, True)
"""Llama 3.2 1B."""
EIGHT_BILLION = Shape(4096, 14336, 32, 32, 8, 128, 128256, False)
"""Llama 3.1 8B."""
TINY = Shape(64, 128, 2, 4, 2, 16, 512, False)
