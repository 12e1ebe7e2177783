"""Figures of fronts side by side.

Invariant: pure. What a front adds is taken for each request by itself, before any percentile: its
time to first token over HTTP less its engine's own. A ratio above 1 says that Shoal adds less.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.figures import Figures
from bench.peers.engine_time import EngineShare
from bench.peers.front_client import Answer

OURS = "shoal"
_PERCENTS = (50, 99)
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One request at a front."""

    answer: Answer
    share: EngineShare

    @property
    def added_s(self) -> float:
        return self.answer.ttft_s - self.share.engine_s

    @property
    def parts_s(self) -> Mapping[str, float]:
        """All that was added: what the server names, and `http` for the rest."""
        named = self.share.parts_s
        return {"http": self.added_s - sum(named.values()), **named}


def flat(samples: Mapping[str, Sequence[Sample]]) -> Figures:
    """By front, one value a key; Shoal's keys are without its name. Times are in milliseconds."""
    figures: Figures = {}
    for front, those in samples.items():
        prefix = "" if front == OURS else f"{front}_"
        figures |= {f"{prefix}{key}": value for key, value in _of_one(those).items()}
    ours = _added_ms(samples[OURS])
    for front, those in samples.items():
        if front != OURS:
            figures[f"added_ttft_ratio_vs_{front}"] = round(_added_ms(those) / ours, _DIGITS)
    return figures


def _of_one(samples: Sequence[Sample]) -> Figures:
    measured = {
        "added": [each.added_s for each in samples],
        "http": [each.answer.ttft_s for each in samples],
        "engine": [each.share.engine_s for each in samples],
    }
    figures: Figures = {
        f"{name}_ttft_ms_p{percent}": _percentile_ms(seconds, percent)
        for name, seconds in measured.items()
        for percent in _PERCENTS
    }
    for part in samples[0].parts_s:
        figures[f"part_ms_p50_{part}"] = _percentile_ms([s.parts_s[part] for s in samples], 50)
    figures["prompt_tokens"] = samples[0].answer.prompt_tokens
    figures["cached_tokens_min"] = min(each.share.cached_tokens for each in samples)
    return figures


def _added_ms(samples: Sequence[Sample]) -> float:
    return _percentile_ms([each.added_s for each in samples], 50)


def _percentile_ms(seconds: Iterable[float], percent: int) -> float:
    values = [each * 1000 for each in seconds]
    return round(float(np.percentile(values, percent)), _DIGITS)
