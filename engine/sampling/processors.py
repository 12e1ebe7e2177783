"""Changes to one row of logits before the draw, in the order that `apply` states.

Invariant: a processor only reads the run's state, and only writes the row it is given. A token that
a processor has ruled out is ``-inf`` and no later one can bring it back.
"""

from collections.abc import Iterable

import torch

from engine.sampling.state import SamplingState

_RULED_OUT = float("-inf")


def apply_processors(
    row: torch.Tensor, state: SamplingState, eos_token_ids: tuple[int, ...]
) -> None:
    """Applies everything that `state` asks for to `row` (float32 ``[V]``), in place: allowed ids,
    bad words, min_tokens, logit bias, penalties."""
    params = state.params
    if params.allowed_token_ids is not None:
        _keep_only(row, params.allowed_token_ids)
    if params.bad_words:
        _rule_out(row, _bad_endings(state))
    if state.is_below_min_tokens:
        # End tokens are held back under `ignore_eos` too: there they would not end the request,
        # but no model goes on sensibly after one.
        _rule_out(row, (*eos_token_ids, *params.stop_token_ids))
    if params.logit_bias:
        known = {i: bias for i, bias in params.logit_bias.items() if i < len(row)}
        row[_index(known, row)] += torch.tensor(list(known.values()), device=row.device)
    if state.has_penalties:
        _penalise(row, state)


def _keep_only(row: torch.Tensor, token_ids: Iterable[int]) -> None:
    index = _index((i for i in token_ids if i < len(row)), row)
    kept = row[index]
    row.fill_(_RULED_OUT)
    row[index] = kept


def _rule_out(row: torch.Tensor, token_ids: Iterable[int]) -> None:
    row[_index((i for i in token_ids if i < len(row)), row)] = _RULED_OUT


def _bad_endings(state: SamplingState) -> list[int]:
    """The tokens that would complete a bad word. A word counts when all of it is output: what the
    prompt says is the caller's own."""
    longest = max(len(word) for word in state.params.bad_words) - 1
    start = max(state.num_prompt_tokens, len(state.token_ids) - longest)
    tail = tuple(state.token_ids[start:])
    return [
        word[-1]
        for word in state.params.bad_words
        if len(word) == 1 or tail[-(len(word) - 1) :] == word[:-1]
    ]


def _penalise(row: torch.Tensor, state: SamplingState) -> None:
    """Repetition (prompt and output; Keskar et al., arXiv 1909.05858), then frequency and presence
    (output only; the OpenAI API's definition)."""
    params = state.params
    seen, output_counts = state.counts(len(row), row.device)
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / factor, row * factor), row))
    if params.frequency_penalty:
        row.sub_(output_counts, alpha=params.frequency_penalty)
    if params.presence_penalty:
        row.sub_((output_counts > 0).float(), alpha=params.presence_penalty)


def _index(token_ids: Iterable[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=row.device)
