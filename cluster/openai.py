"""The OpenAI dialect: what its endpoints share of what a client may send and gets back.

Invariant: every value a client can send is bounded here or in an endpoint's own module, at parse,
types are not converted, and a field that would change the answer and is not served is refused by
name rather than ignored. A request without `temperature` is sampled at OpenAI's 1.0, whatever the
model's own generation config says: the same call means the same on every model.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from cache.wheel import Retention
from cluster.generation import Usage
from cluster.postprocess import OutputDelta
from engine.wire import SamplingParams, ServiceClass

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TOKENS = 1 << 30
MAX_SESSION_CHARS = 1024
_MAX_FIELDS = 64
_INT64 = 1 << 63
_LOGPROB_FLOOR = -9999.0
"""What OpenAI reports for a token of no probability: JSON has no infinity."""


def check_text(text: str) -> str:
    """Raises `ValueError` for text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has a lone surrogate, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(check_text)]


def check_size(value: object, limit: int) -> object:
    """Raises `ValueError` for an object of more than `limit` entries, before they are looked at:
    pydantic reports every bad one, which takes a minute for the millions that a body can hold."""
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"at most {limit} entries, got {len(value)}")
    return value


class RequestPart(BaseModel):
    """Unknown keys are refused and values are not converted, as by OpenAI's own servers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        return check_size(value, _MAX_FIELDS)


SmallObject = Annotated[dict[str, str], BeforeValidator(partial(check_size, limit=_MAX_FIELDS))]


class StreamOptions(RequestPart):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is obfuscated."""


class SamplingRequest(RequestPart):
    """The fields of every endpoint that generates. Null means the default."""

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[
                # The one conversion: JSON knows no keys but strings.
                Annotated[int, Field(ge=0, lt=1 << 31, strict=False)],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            BeforeValidator(partial(check_size, limit=1024)),
        ]
        | None
    ) = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    """`priority` is our class interactive, `flex` is batch, any other is standard."""
    user: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] | None = None
    """Requests with the same one, or else of the same user, go to the same engine where nothing
    speaks against it. Neither has any effect on the answer."""

    # ---- extensions, under the names vLLM gave them
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    """Cached prefixes are shared only among requests with the same one."""

    # ---- our own
    cache_retention: Literal["low", "normal", "pinned"] | None = None
    """How much the prompt is worth keeping: `low` for work that does not come back."""

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        for text in stops:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ValueError(
                    f"a stop string has 1 to {MAX_STOP_CHARS} characters, one has {len(text)}"
                )
        return stop

    @model_validator(mode="after")
    def _options_fit_the_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def cache_domain(self) -> str:
        return self.cache_salt or ""

    @property
    def session(self) -> bytes:
        return (self.prompt_cache_key or self.user or "").encode("utf-8", "surrogatepass")

    @property
    def service_class(self) -> ServiceClass:
        match self.service_tier:
            case "priority":
                return ServiceClass.INTERACTIVE
            case "flex":
                return ServiceClass.BATCH
        return ServiceClass.STANDARD

    @property
    def retention(self) -> Retention:
        return Retention[(self.cache_retention or "normal").upper()]

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """`logprobs`: how many likeliest tokens to report beside each token; None: nothing."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=self.logit_bias or {},
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


# ------------------------------------------------------------------ answers


class AnswerPart(msgspec.Struct, frozen=True, gc=False):
    """A field set to None is sent as null, one left UNSET is left out."""


class PromptTokensDetails(AnswerPart, frozen=True):
    cached_tokens: int


class CompletionUsage(AnswerPart, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> "CompletionUsage":
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        )


OptionalUsage = CompletionUsage | UnsetType | None


def finite(logprob: float) -> float:
    return max(logprob, _LOGPROB_FLOOR)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str


encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_MARK = "\0text\0"
"""Stands for the text of a chunk that is encoded to be cut there."""


class OpenAIDialect(ABC):
    """One answer as OpenAI writes it; see `cluster.answer.Dialect`.

    Most chunks add text and nothing else, and differ in the text only. So the first of a choice is
    encoded from its types, and the others are made by putting their text in its place, in less than
    half the time."""

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        self.head = head
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        """With `include_usage` every chunk but the last has `"usage": null`."""
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def begin(self, index: int) -> bytes: ...

    @abstractmethod
    def delta(self, index: int, delta: OutputDelta) -> bytes: ...

    @abstractmethod
    def whole(self, choices: Mapping[int, Sequence[OutputDelta]], usage: Usage) -> bytes: ...

    @abstractmethod
    def chunk(self, choices: Sequence[AnswerPart], usage: OptionalUsage) -> AnswerPart: ...

    @abstractmethod
    def text_choice(self, index: int, text: str) -> AnswerPart: ...

    def event(self, choice: AnswerPart) -> bytes:
        return _event(self.chunk([choice], self._no_usage))

    def text_event(self, index: int, text: str) -> bytes:
        """Equal to `event(text_choice(index, text))`."""
        around = self._around_text.get(index)
        if around is None:
            start, end = self.event(self.text_choice(index, _MARK)).split(encode(_MARK))
            around = self._around_text[index] = (start, end)
        return around[0] + encode(text) + around[1]

    def end(self, usage: Usage) -> bytes:
        if self._no_usage is UNSET:
            return _DONE
        return _event(self.chunk([], CompletionUsage.of(usage))) + _DONE

    def failed(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"


def _event(chunk: AnswerPart) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True)


class ModelCard(_Described):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["shoal"] = "shoal"
    max_model_len: int | None = None


class ModelList(_Described):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(_Described):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Described):
    """The body of every answer that is no success."""

    error: ErrorDetail


def now_s() -> int:
    """Seconds since 1970, as `created` fields have them."""
    return int(time.time())
