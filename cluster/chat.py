"""`POST /v1/chat/completions`: what a client may send, and how its answer is written."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from cluster.generation import Usage
from cluster.openai import (
    MAX_TOKENS,
    AnswerHead,
    AnswerPart,
    CompletionUsage,
    OpenAIDialect,
    OptionalUsage,
    RequestPart,
    SamplingRequest,
    SmallObject,
    Text,
    encode,
    finite,
)
from cluster.postprocess import OutputDelta, OutputToken
from cluster.preprocess import GenerationRequest
from cluster.tokenizer import Tokenizer
from engine.wire import MAX_TOP_LOGPROBS

MAX_MESSAGES = 4096


class TextPart(RequestPart):
    type: Literal["text"]
    text: Text


class Message(RequestPart):
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


class TextFormat(RequestPart):
    type: Literal["text"]


class ChatCompletionRequest(SamplingRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # ---- accepted, without effect on the answer
    metadata: SmallObject | None = None
    store: bool | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) differ"
            )
        return self

    def as_generation(self) -> GenerationRequest:
        return GenerationRequest(
            prompt=[message.as_template_input() for message in self.messages],
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            num_choices=self.num_choices,
            stops=self.stops,
            cache_domain=self.cache_domain,
            service_class=self.service_class,
            retention=self.retention,
            session=self.session,
        )


# ------------------------------------------------------------------ answers


class TopLogprob(AnswerPart, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AnswerPart, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(AnswerPart, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(AnswerPart, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class Choice(AnswerPart, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class Delta(AnswerPart, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(AnswerPart, frozen=True):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(AnswerPart, frozen=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[AnswerPart]
    usage: OptionalUsage


class ChatDialect(OpenAIDialect):
    """One chat answer."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, include_usage: bool) -> None:
        super().__init__(head, include_usage)
        self._tokenizer = tokenizer

    def begin(self, index: int) -> bytes:
        return self.event(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        logprobs = self._logprobs(delta.tokens)
        if logprobs is not None:
            content = Delta(content=delta.text)
            events = self.event(ChunkChoice(index=index, delta=content, logprobs=logprobs))
        else:
            events = self.text_event(index, delta.text) if delta.text else b""
        if delta.end is not None:
            end = ChunkChoice(index=index, delta=Delta(), finish_reason=delta.end)
            events += self.event(end)
        return events

    def whole(self, choices: Mapping[int, Sequence[OutputDelta]], usage: Usage) -> bytes:
        answer = [
            Choice(
                index=index,
                message=AnswerMessage(
                    role="assistant", content="".join(delta.text for delta in deltas)
                ),
                logprobs=self._logprobs(token for delta in deltas for token in delta.tokens),
                finish_reason=deltas[-1].end or "",
            )
            for index, deltas in sorted(choices.items())
        ]
        return encode(self._answer("chat.completion", answer, CompletionUsage.of(usage)))

    def text_choice(self, index: int, text: str) -> AnswerPart:
        return ChunkChoice(index=index, delta=Delta(content=text))

    def chunk(self, choices: Sequence[AnswerPart], usage: OptionalUsage) -> AnswerPart:
        return self._answer("chat.completion.chunk", choices, usage)

    def _answer(
        self,
        kind: Literal["chat.completion", "chat.completion.chunk"],
        choices: Sequence[AnswerPart],
        usage: OptionalUsage,
    ) -> ChatCompletion:
        return ChatCompletion(
            id=self.head.id,
            object=kind,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, tokens: Iterable[OutputToken]) -> ChoiceLogprobs | None:
        """None when they were not asked for."""
        content = []
        for token in tokens:
            if token.logprobs is None:
                return None
            content.append(
                TokenLogprob(
                    **self._described(token.token_id, token.logprobs.logprob),
                    top_logprobs=[
                        TopLogprob(**self._described(*likely)) for likely in token.logprobs.top
                    ],
                )
            )
        return ChoiceLogprobs(content=content) if content else None

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
