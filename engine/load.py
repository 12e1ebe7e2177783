"""Measures how fast an engine is, for the router and the autoscaler.

Invariant: idle time counts for nothing; only the length of steps that did the work in question.
"""

from engine.plan import StepPlan, StepResult

_HALF_LIFE_S = 10.0
_WEIGHT = 0.3
"""Of the newest step in what such steps take."""


class _Rate:
    """Tokens per second over busy time that fades with a half-life."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 0.5 ** (seconds / _HALF_LIFE_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class LoadMeter:
    """Rates and totals over the steps so far. In a step that does both, prefill and decode each
    count the whole step: the rates are those under the present mixture."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        """Computed, of prompts and output alike."""
        self.busy_s = 0.0
        self.wait_s = 0.0
        """That the device stood still between two steps although there was work."""
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.last_step_s = 0.0
        self._ended_s: float | None = None
        self._prefill = _Rate()
        self._decode = _Rate()
        self._usual_s: dict[int, float] = {}
        """What a step takes, by the binary magnitude of its tokens."""

    def usual_s(self, plan: StepPlan) -> float:
        """What a step like this one has taken of late; 0 when there was none."""
        return self._usual_s.get(plan.num_tokens.bit_length(), 0.0)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill.per_s

    @property
    def decode_tokens_per_s(self) -> float:
        return self._decode.per_s

    def rest(self) -> None:
        """There is nothing to do until a request comes."""
        self._ended_s = None

    def add(self, plan: StepPlan, result: StepResult, began_s: float, ended_s: float) -> None:
        """Counts a slice of one sampling token as decode, any other as prefill."""
        step_s = ended_s - began_s
        if self._ended_s is not None:
            self.wait_s += max(0.0, began_s - self._ended_s)
        self._ended_s = ended_s
        num_tokens, num_decode = plan.num_tokens, plan.num_decodes
        num_prefill = num_tokens - num_decode
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.busy_s += step_s
        self.last_step_s = step_s
        magnitude = num_tokens.bit_length()
        usual_s = self._usual_s.get(magnitude, step_s)
        self._usual_s[magnitude] = usual_s + _WEIGHT * (step_s - usual_s)
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += len(result.sampled)
        if num_prefill:
            self._prefill.add(num_prefill, step_s)
        if num_decode:
            self._decode.add(num_decode, step_s)
