"""What sampling must know of one run.

Invariant: it follows from (token ids, number of prompt tokens, parameters) alone, so a request that
is resumed with its output goes on exactly where it was.
"""

from collections.abc import Sequence

import torch

from engine.wire import SamplingParams


class SamplingState:
    """One run's tokens and parameters, with the counts that penalties need."""

    def __init__(
        self, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        self.params = params
        self.token_ids = list(token_ids)
        """Prompt and output so far."""
        self.num_prompt_tokens = num_prompt_tokens
        self.has_penalties = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self.is_plain_greedy = (
            params.temperature == 0.0
            and params.logprobs is None
            and params.allowed_token_ids is None
            and not (self.has_penalties or params.bad_words or params.logit_bias)
        )
        """Nothing but the largest logit matters, once `min_tokens` is reached."""
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_below_min_tokens(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens

    def append(self, token_id: int) -> None:
        """Adds a drawn token to the output."""
        self.token_ids.append(token_id)
        if self._counts is not None:
            seen, output = self._counts
            if token_id < len(output):
                seen[token_id] = True
                output[token_id] += 1

    def counts(self, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which ids occur in prompt or output (bool ``[V]``), and how often each occurs in the
        output (float32 ``[V]``). Kept dense, so that a step costs a penalised run O(1)."""
        if self._counts is None:
            ids = torch.tensor(self.token_ids, dtype=torch.int64)
            all_counts = _histogram(ids, vocab_size)
            output_counts = _histogram(ids[self.num_prompt_tokens :], vocab_size)
            self._counts = ((all_counts > 0).to(device), output_counts.float().to(device))
        return self._counts


def _histogram(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.bincount(ids[ids < vocab_size], minlength=vocab_size)
