"""Chooses the next token of each run from its logits.

Invariant: a run's token is a function of its own logits, tokens and parameters: ``argmax(logit / T
+ noise)`` over the candidates that its filters leave, ties to the lowest id. Neither the other rows
of the batch nor the number of tries changes it, and a row that cannot be drawn from fails alone.
"""

import math
from collections.abc import Callable, Sequence

import torch

from engine.kernels.ops import Ops, TorchOps
from engine.plan import Sampled
from engine.sampling.noise import gumbel_noise, noise_key
from engine.sampling.processors import apply_processors
from engine.sampling.state import SamplingState
from engine.wire import TokenLogprobs

# Rows of noise made at once: a float64 row of a 150,000-token vocabulary is 1.2 MB.
_NOISE_ROWS = 8
# Candidates looked at before the whole vocabulary is sorted for top-p.
_NUCLEUS_GUESS = 1024

_NOT_FINITE = "the model's output is not a number: this request cannot go on"
_NO_CANDIDATE = (
    "no token is left to choose from: allowed_token_ids, bad_words, logit_bias and min_tokens "
    "together rule out the whole vocabulary"
)


RowMax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of ``[N, V]``: the largest value of each row, NaN if there is one, and its place."""


class Sampler:
    """Draws for a batch of runs. Holds nothing but constants of the model."""

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        row_max: RowMax | None = None,
        ops: Ops | None = None,
    ) -> None:
        """`row_max` where a model has a quicker one than `ops`; `ops` are torch's by default."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._ops = ops or TorchOps()
        self._row_max = row_max or self._ops.row_max

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled | str]:
        """One draw for each row of `logits` (``[N, V]``, any float dtype, not changed), or the
        reason why there is none. The states are only read."""
        best, best_ids = self._row_max(logits)
        # The largest logit tells all: NaN passes through a maximum, and -inf means that nothing
        # is possible.
        raw_faults = _faults(best)
        draws: list[Sampled | str] = []
        special: list[int] = []
        for row, (state, token_id) in enumerate(zip(states, best_ids.tolist(), strict=True)):
            fault = raw_faults.get(row)
            draws.append(fault if fault is not None else Sampled((token_id,)))
            if fault is None and (not state.is_plain_greedy or state.is_below_min_tokens):
                special.append(row)
        if special:
            self._sample_special(logits, states, special, draws)
        return draws

    def _sample_special(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        rows: list[int],
        draws: list[Sampled | str],
    ) -> None:
        """Replaces the draws of `rows`, those for which the largest raw logit is not the answer."""
        raw = logits[torch.tensor(rows, device=logits.device)].float()
        work = raw.clone()
        chosen = [states[row] for row in rows]
        for row, state in zip(work, chosen, strict=True):
            apply_processors(row, state, self._eos_token_ids)
        best, best_ids = self._ops.row_max(work)
        token_ids: list[int] = best_ids.tolist()
        faults = _faults(best)
        sampled = [
            i for i, state in enumerate(chosen) if state.params.temperature > 0 and i not in faults
        ]
        for i, token_id in self._draw_sampled(work, chosen, sampled, best).items():
            token_ids[i] = token_id
        for i, row in enumerate(rows):
            if i in faults:
                draws[row] = faults[i]
                continue
            count = chosen[i].params.logprobs
            logprobs = None if count is None else (token_logprobs(raw[i], token_ids[i], count),)
            draws[row] = Sampled((token_ids[i],), logprobs)

    def _draw_sampled(
        self,
        work: torch.Tensor,
        states: list[SamplingState],
        rows: list[int],
        best: torch.Tensor,
    ) -> dict[int, int]:
        """Draws for the rows with a temperature: those with filters one by one over the few
        candidates left, the others in groups over the whole vocabulary."""
        tokens: dict[int, int] = {}
        whole: list[int] = []
        for i in rows:
            params = states[i].params
            if params.top_k or params.top_p < 1.0:
                scaled = _scaled(work[i : i + 1], states[i : i + 1], best[i : i + 1])[0]
                candidates = _candidates(scaled, params.top_k, params.top_p)
                noisy = scaled[candidates] + gumbel_noise([_key(states[i])], candidates)[0]
                tokens[i] = int(candidates[noisy.argmax()])
            else:
                whole.append(i)
        for first in range(0, len(whole), _NOISE_ROWS):
            group = whole[first : first + _NOISE_ROWS]
            index = torch.tensor(group, device=work.device)
            group_states = [states[i] for i in group]
            scaled = _scaled(work[index], group_states, best[index])
            drawn = self._ops.gumbel_argmax(scaled, [_key(state) for state in group_states])
            tokens.update(zip(group, drawn.tolist(), strict=True))
        return tokens


def _key(state: SamplingState) -> int:
    return noise_key(state.params.seed, state.params.choice, len(state.token_ids))


def _scaled(work: torch.Tensor, states: list[SamplingState], best: torch.Tensor) -> torch.Tensor:
    """``(logit - largest) / temperature`` as float64 ``[N, V]``, with what `min_p` removes at
    ``-inf``. Measured from the largest, no temperature overflows."""
    device = work.device
    temperatures = torch.tensor(
        [state.params.temperature for state in states], dtype=torch.float64, device=device
    )
    scaled = (work.double() - best.double()[:, None]) / temperatures[:, None]
    if any(state.params.min_p for state in states):
        # p < min_p * p_max is log p - log p_max < log min_p: the normaliser cancels.
        floors = [
            math.log(state.params.min_p) if state.params.min_p else -math.inf for state in states
        ]
        floor = torch.tensor(floors, dtype=torch.float64, device=device)[:, None]
        scaled.masked_fill_(scaled < floor, -math.inf)
    return scaled


def _candidates(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Ids that top-k and then top-p leave, in rising order.

    Top-k keeps exactly k, equal ones by lowest id. Top-p keeps the shortest run of the likeliest
    whose probability, among those that top-k left, reaches `top_p`.
    """
    ids = (scaled > -math.inf).nonzero()[:, 0]
    if 0 < top_k < len(ids):
        ids = top_ids(scaled, top_k)
    if top_p < 1.0:
        ids = _nucleus(scaled, ids, top_p)
    return ids.sort().values


def top_ids(row: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest values of ``[V]``, largest first, equal ones by lowest id (which
    `torch.topk` does not promise)."""
    count = min(count, len(row))
    threshold = row.topk(count).values[-1]
    above = (row > threshold).nonzero()[:, 0]
    equal = (row == threshold).nonzero()[: count - len(above), 0]
    above = above[row[above].sort(descending=True, stable=True).indices]
    return torch.cat([above, equal])


def _nucleus(scaled: torch.Tensor, ids: torch.Tensor, top_p: float) -> torch.Tensor:
    """The part of `ids` that top-p keeps. Looks at the likeliest few first: a nucleus seldom holds
    more, and sorting a vocabulary costs more than the rest of the draw."""
    values = scaled[ids]
    # The largest value is 0, so the sum neither overflows nor vanishes.
    total = values.exp().sum()
    if len(ids) > _NUCLEUS_GUESS:
        order = top_ids(values, _NUCLEUS_GUESS)
        mass = (values[order].exp() / total).cumsum(0)
        if mass[-1] < top_p:
            order = values.sort(descending=True, stable=True).indices
    else:
        order = values.sort(descending=True, stable=True).indices
    weights = values[order].exp() / total
    before = weights.cumsum(0) - weights
    return ids[order[before < top_p]]


def token_logprobs(row: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Natural log-probabilities of the raw logits `row` (float32 ``[V]``): of `token_id`, and of
    the `count` likeliest."""
    normaliser = row.logsumexp(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = top_ids(row, count)
        values = (row[ids] - normaliser).tolist()
        # A token that the model itself rules out has no logarithm to report.
        pairs = zip(ids.tolist(), values, strict=True)
        top = tuple((i, value) for i, value in pairs if value > -math.inf)
    return TokenLogprobs(logprob=float(row[token_id] - normaliser), top=top)


def _faults(best: torch.Tensor) -> dict[int, str]:
    """By row: why nothing can be drawn, given each row's largest logit."""
    return {
        row: _NO_CANDIDATE if value == -math.inf else _NOT_FINITE
        for row, value in enumerate(best.tolist())
        if not math.isfinite(value)
    }
