"""What a run is told, checked, and what follows from it.

Invariant: `Settings` that passed `check` make sense as a whole; an option that this workload does
not use is refused rather than ignored. All that makes two runs differ is in them, and in the JSON.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from bench.serve.dialect import Api, BodyOptions
from bench.serve.load import Pacing
from bench.serve.metrics import Slo
from bench.serve.prompts import Renderer, TokenIdRenderer, WordRenderer
from bench.serve.traces import TraceEntry, capped
from bench.serve.workloads import (
    Conversation,
    Lengths,
    arriving,
    from_trace,
    multi_turn,
    poisson_arrivals,
    random_prompts,
    shared_prefixes,
    take_requests,
)
from engine.errors import ShoalError

WorkloadKind = Literal["random", "shared-prefix", "multi-turn", "trace"]
WORKLOADS: tuple[WorkloadKind, ...] = ("random", "shared-prefix", "multi-turn", "trace")

_DEFAULT_CONCURRENCY = 8
_DEFAULT_REQUESTS = 100
_SYNTHETIC: tuple[WorkloadKind, ...] = ("random", "shared-prefix", "multi-turn")
_USED_BY: dict[str, tuple[WorkloadKind, ...]] = {
    "input_tokens": _SYNTHETIC,
    "output_tokens": _SYNTHETIC,
    "length_spread": _SYNTHETIC,
    "shared_tokens": ("shared-prefix", "multi-turn"),
    "groups": ("shared-prefix",),
    "users": ("shared-prefix",),
    "turns": ("multi-turn",),
    "think_time_s": ("multi-turn",),
    "trace": ("trace",),
    "time_scale": ("trace",),
    "max_input_tokens": ("trace",),
    "max_output_tokens": ("trace",),
}


class SettingsError(ShoalError):
    """Options that don't go together: wrong usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `shoal bench serve`, under the names they have there."""

    url: str
    api: Api
    model: str | None
    api_key_file: Path | None
    timeout_s: float
    workload: WorkloadKind
    input_tokens: int
    output_tokens: int
    length_spread: float
    shared_tokens: int
    groups: int
    users: int
    turns: int
    think_time_s: float
    trace: Path | None
    time_scale: float
    max_input_tokens: int | None
    max_output_tokens: int | None
    token_ids: bool
    vocab_size: int
    seed: int
    concurrency: int | None
    rate: float | None
    requests: int | None
    duration_s: float | None
    warmup: int
    ignore_eos: bool
    temperature: float
    extra_body: str | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None

    def check(self, given: Set[str]) -> None:
        """Raises `SettingsError`. `given` names the options that are no defaults."""
        for name in sorted(given & _USED_BY.keys()):
            if self.workload not in _USED_BY[name]:
                users = ", ".join(_USED_BY[name])
                raise SettingsError(f"{flag(name)} is for --workload {users}, not {self.workload}")
        if self.concurrency is not None and self.rate is not None:
            raise SettingsError("--concurrency is a closed loop, --rate an open one: give one")
        if self.workload == "trace" and self.trace is None:
            raise SettingsError("--workload trace needs --trace FILE")
        if self.token_ids and self.api != "completions":
            raise SettingsError("--token-ids needs --api completions: a chat is made of text")
        if self.token_ids and self.workload == "multi-turn":
            raise SettingsError("--token-ids: the answers of a multi-turn conversation are text")
        if "vocab_size" in given and not self.token_ids:
            raise SettingsError("--vocab-size is for --token-ids")
        self.base_url()
        self.extra_fields()

    def base_url(self) -> str:
        """Without a path, so that a URL with or without `/v1` will do."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"--url {self.url!r}: http://HOST:PORT is expected")
        if parts.username is not None or parts.password is not None:
            raise SettingsError("--url holds a user or password, which would end up in the JSON")
        return self.url.rstrip("/").removesuffix("/v1")

    def extra_fields(self) -> dict[str, Any]:
        try:
            extra = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError as error:
            raise SettingsError(f"--extra-body: {error}") from None
        if not isinstance(extra, dict):
            raise SettingsError("--extra-body: a JSON object is expected")
        return extra

    def body_options(self, model: str) -> BodyOptions:
        return BodyOptions(self.api, model, self.temperature, self.ignore_eos, self.extra_fields())

    @property
    def slo(self) -> Slo:
        ttft_ms, tpot_ms = self.slo_ttft_ms, self.slo_tpot_ms
        return Slo(
            None if ttft_ms is None else ttft_ms / 1000,
            None if tpot_ms is None else tpot_ms / 1000,
        )

    # ------------------------------------------------------------------ load

    @property
    def _by_trace_times(self) -> bool:
        return self.workload == "trace" and self.rate is None and self.concurrency is None

    @property
    def pacing(self) -> Pacing:
        is_open = self.rate is not None or self._by_trace_times
        concurrency = None if is_open else self.concurrency or _DEFAULT_CONCURRENCY
        return Pacing(concurrency, self.duration_s, self.think_time_s)

    @property
    def num_requests(self) -> int | None:
        """None: as many as the duration or the trace holds."""
        if self.requests is None and self.duration_s is None and self.workload != "trace":
            return _DEFAULT_REQUESTS
        return self.requests

    def renderer(self, purpose: str = "") -> Renderer:
        """Content for another purpose has nothing in common with this one's."""
        seed = f"{self.seed}{purpose}"
        return TokenIdRenderer(seed, self.vocab_size) if self.token_ids else WordRenderer(seed)

    def conversations(self, trace: list[TraceEntry]) -> Iterator[Conversation]:
        """Those to measure; `trace` is what `--trace` holds, or nothing."""
        conversations = self._endless(trace)
        if self.rate is not None:
            conversations = arriving(conversations, poisson_arrivals(self.rate, self.seed))
        return take_requests(conversations, self.num_requests)

    def warmup_conversations(self, trace: list[TraceEntry]) -> Iterator[Conversation]:
        return take_requests(self._endless(trace), self.warmup)

    def warmup_pacing(self) -> Pacing:
        """A closed loop, however the rest is paced."""
        return Pacing(min(self.concurrency or _DEFAULT_CONCURRENCY, max(1, self.warmup)))

    def _endless(self, trace: list[TraceEntry]) -> Iterator[Conversation]:
        lengths = Lengths(self.input_tokens, self.output_tokens, self.length_spread)
        match self.workload:
            case "random":
                return random_prompts(lengths, self.seed)
            case "shared-prefix":
                return shared_prefixes(
                    lengths, self.shared_tokens, self.groups, self.users, self.seed
                )
            case "multi-turn":
                return multi_turn(lengths, self.shared_tokens, self.turns, self.seed)
            case "trace":
                entries = capped(trace, self.max_input_tokens, self.max_output_tokens)
                return from_trace(entries, self.time_scale)

    # ------------------------------------------------------------------ words

    def titles(self, model: str) -> list[str]:
        """What was run, in lines for a reader."""
        return [
            f"{self.base_url()} · {self.api} · model {model}",
            f"{self._workload_words()} · seed {self.seed}",
            self._pacing_words(),
        ]

    def _workload_words(self) -> str:
        spread = f" ± {self.length_spread:.0%}" if self.length_spread else ""
        lengths = f"{self.input_tokens:,} tokens in, {self.output_tokens:,} out{spread}"
        match self.workload:
            case "random":
                return f"random: {lengths}"
            case "shared-prefix":
                return (
                    f"shared-prefix: {self.groups:,} groups × {self.users:,} users, "
                    f"{self.shared_tokens:,} shared + {lengths}"
                )
            case "multi-turn":
                return (
                    f"multi-turn: {self.turns:,} turns, {self.shared_tokens:,} of system prompt, "
                    f"{lengths} a turn"
                )
            case "trace":
                assert self.trace is not None
                caps = (
                    f"{limit:,} {way}"
                    for limit, way in (
                        (self.max_input_tokens, "in"),
                        (self.max_output_tokens, "out"),
                    )
                    if limit is not None
                )
                cut = ", ".join(caps)
                return f"trace: {self.trace.name}" + (f", cut to {cut}" if cut else "")

    def _pacing_words(self) -> str:
        if self._by_trace_times:
            scale = f", × {self.time_scale:g}" if self.time_scale != 1 else ""
            how = f"open loop at the trace's times{scale}"
        elif self.rate is not None:
            how = f"open loop, Poisson, {self.rate:g} conversations/s"
            if self.rate == float("inf"):
                how = "open loop, all at once"
        else:
            how = f"closed loop, {self.pacing.concurrency:,} at a time"
            return f"{how}: latency counts from when a request is sent"
        return f"{how}: latency counts from when a request is due"

    def as_flags(self) -> dict[str, float | int | str | None]:
        """Every option for the JSON; infinity, which JSON lacks, as a word."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            f"flag_{name}": str(value)
            if isinstance(value, Path) or value == float("inf")
            else value
            for name, value in values.items()
        }


def flag(name: str) -> str:
    """The option of a setting: its name without the unit."""
    return "--" + name.removesuffix("_s").removesuffix("_ms").replace("_", "-")


def read_preset(name: str) -> Mapping[str, Any]:
    """`bench/workloads/serve/<name>.json`, or a file, as values for options.

    Raises `SettingsError`; which keys are options is for the caller to check."""
    folder = files("bench") / "workloads" / "serve"
    known = sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())
    try:
        is_file = name not in known
        text = Path(name).read_text() if is_file else (folder / f"{name}.json").read_text()
        preset = json.loads(text)
    except OSError as error:
        raise SettingsError(
            f"--preset {name}: {error.strerror}; the presets are {', '.join(known)}"
        ) from None
    except ValueError as error:
        raise SettingsError(f"--preset {name}: {error}") from None
    if not isinstance(preset, dict):
        raise SettingsError(f"--preset {name}: a JSON object is expected")
    return dict(itertools.filterfalse(lambda item: item[0] == "description", preset.items()))
