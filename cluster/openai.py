"""The OpenAI dialect: what a client may send, and what it gets back.

Invariant: every value a client can send is bounded here, at parse, and a field that would change
the answer and is not served is refused by name rather than ignored. A request without
`temperature` is sampled at OpenAI's 1.0, whatever the model's own generation config says: the same
call means the same on every model.
"""

import time
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.preprocess import GenerationRequest
from engine.wire import MAX_TOP_LOGPROBS, SamplingParams

MAX_CHOICES = 8
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARS = 256
_TOKENS = 1 << 30
_INT64 = 1 << 63


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has a lone surrogate, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(_without_surrogates)]


class _Request(BaseModel):
    """Unknown keys are refused, as OpenAI's own servers do."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(_Request):
    type: Literal["text"]
    text: Text


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024)]
    name: Annotated[str, Field(max_length=256)] | None = None

    # ---- an answer sent back as history has these, empty
    refusal: Annotated[str, Field(max_length=65536)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None

    def as_template_input(self) -> dict[str, str]:
        """Text parts are joined by line ends; templates know 'system' where OpenAI's newer clients
        say 'developer'."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class StreamOptions(_Request):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted; nothing is obfuscated."""


class TextFormat(_Request):
    type: Literal["text"]


class ChatCompletionRequest(_Request):
    """`POST /v1/chat/completions`. Below the line: what OpenAI does not have."""

    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Text | list[Text] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[int, Field(ge=0, lt=1 << 31)], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # ---- extensions, under the names vLLM gave them
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None

    # ---- accepted, without effect on the answer
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    store: bool | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        for text in stops:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ValueError(
                    f"a stop string has 1 to {MAX_STOP_CHARS} characters, one has {len(text)}"
                )
        return stop

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) differ"
            )
        return self

    def as_generation(self) -> GenerationRequest:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationRequest(
            prompt=[message.as_template_input() for message in self.messages],
            sampling=self._sampling(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            num_choices=self.n or 1,
            stops=stops,
        )

    def _sampling(self) -> SamplingParams:
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
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


# ------------------------------------------------------------------ answers
# Dumped with `exclude_unset`: a field set to None is sent as null, one not set is left out.


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(_Answer):
    content: list[TokenLogprob]
    refusal: None = None


class PromptTokensDetails(_Answer):
    cached_tokens: int


class CompletionUsage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: CompletionUsage


class Delta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(_Answer):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | None = None


class ModelCard(_Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["shoal"] = "shoal"
    max_model_len: int | None = None


class ModelList(_Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Answer):
    """The body of every answer that is no success."""

    error: ErrorDetail


def now_s() -> int:
    """Seconds since 1970, as `created` fields have them."""
    return int(time.time())
