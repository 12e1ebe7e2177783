"""`POST /v1/completions`: what a client may send, and how its answer is written.

Invariant: a choice's text is made of its own output tokens alone; the prompt stands before it only
if `echo` asks for it, as text that is complete before the first token.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from cluster.generation import Usage
from cluster.openai import (
    MAX_CHOICES,
    AnswerHead,
    AnswerPart,
    CompletionUsage,
    OpenAIDialect,
    OptionalUsage,
    SamplingRequest,
    check_text,
    encode,
    finite,
)
from cluster.postprocess import Detokenizer, OutputDelta, OutputToken
from cluster.preprocess import GenerationRequest, TokenPrompt
from cluster.tokenizer import Tokenizer

MAX_PROMPTS = 128
MAX_ALL_CHOICES = 256
"""Prompts times `n`."""
_MAX_TOP_LOGPROBS = 5
_DEFAULT_MAX_TOKENS = 16
_TOKEN_IDS = 1 << 31
_REPLACEMENT = "\ufffd"


def _prompts(value: object) -> tuple[str | TokenPrompt, ...]:
    """OpenAI's four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return (check_text(value),)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, or token ids")
    if not value:
        raise ValueError("must not be empty")
    if type(value[0]) is int:
        return (_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, got {len(value)}")
    if all(isinstance(prompt, str) for prompt in value):
        return tuple(check_text(prompt) for prompt in value)
    if all(isinstance(prompt, list) for prompt in value):
        return tuple(_token_ids(prompt) for prompt in value)
    raise ValueError("prompts must be all strings, or all lists of token ids")


def _token_ids(ids: list[Any]) -> TokenPrompt:
    # A set of types and the extremes: a prompt may have a million ids.
    if not ids or set(map(type, ids)) != {int}:
        raise ValueError("a prompt of token ids must be integers, one at least")
    if min(ids) < 0 or max(ids) >= _TOKEN_IDS:
        raise ValueError(f"token ids are 0 to {_TOKEN_IDS - 1}")
    return TokenPrompt(tuple(ids))


class CompletionRequest(SamplingRequest):
    prompt: Annotated[tuple[str | TokenPrompt, ...], PlainValidator(_prompts)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: Any = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None

    @field_validator("suffix")
    @classmethod
    def _no_insertion(cls, suffix: object) -> None:
        if suffix is not None:
            raise ValueError("inserting text before a suffix is not supported")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError(
                f"best_of ({self.best_of}) must equal n ({self.num_choices}): "
                "choosing among more candidates is not supported"
            )
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "echo with logprobs is not supported: prompt tokens have no log-probabilities yet"
            )
        num_all = len(self.prompt) * self.num_choices
        if num_all > MAX_ALL_CHOICES:
            raise ValueError(
                f"at most {MAX_ALL_CHOICES} choices in all, got {len(self.prompt)} prompts "
                f"times n ({self.num_choices}): {num_all}"
            )
        return self

    def as_generations(self) -> list[GenerationRequest]:
        """One for each prompt."""
        sampling = self.sampling(self.logprobs)
        return [
            GenerationRequest(
                prompt=prompt,
                sampling=sampling,
                max_tokens=self.max_tokens or _DEFAULT_MAX_TOKENS,
                seed=self.seed,
                num_choices=self.num_choices,
                stops=self.stops,
                cache_domain=self.cache_domain,
                service_class=self.service_class,
                retention=self.retention,
                session=self.session,
            )
            for prompt in self.prompt
        ]

    def echoed(self, tokenizer: Tokenizer) -> list[str]:
        """What stands before the output of each choice, in order; the ids must be known ones."""
        if not self.echo:
            return [""] * (len(self.prompt) * self.num_choices)
        texts = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt.ids)
            for prompt in self.prompt
        ]
        return [text for text in texts for _ in range(self.num_choices)]


# ------------------------------------------------------------------ answers


class CompletionLogprobs(AnswerPart, frozen=True):
    """Lists of equal length, an element for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The likeliest tokens, and the one chosen."""
    text_offset: list[int]
    """Characters of the choice's text before the token, as if no stop string had been cut."""


class CompletionChoice(AnswerPart, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(AnswerPart, frozen=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[AnswerPart]
    usage: OptionalUsage


class CompletionDialect(OpenAIDialect):
    """One answer to a completion request."""

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        include_usage: bool,
        echoed: Sequence[str],
    ) -> None:
        super().__init__(head, include_usage)
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._offsets: dict[int, _Offsets] = {}

    def begin(self, index: int) -> bytes:
        echoed = self._echoed[index]
        return self.text_event(index, echoed) if echoed else b""

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        logprobs = self._logprobs(index, delta.tokens)
        if logprobs is None and delta.end is None:
            return self.text_event(index, delta.text) if delta.text else b""
        return self.event(
            CompletionChoice(
                index=index, text=delta.text, logprobs=logprobs, finish_reason=delta.end
            )
        )

    def whole(self, choices: Mapping[int, Sequence[OutputDelta]], usage: Usage) -> bytes:
        answer = [
            CompletionChoice(
                index=index,
                text=self._echoed[index] + "".join(delta.text for delta in deltas),
                logprobs=self._logprobs(
                    index, [token for delta in deltas for token in delta.tokens]
                ),
                finish_reason=deltas[-1].end,
            )
            for index, deltas in sorted(choices.items())
        ]
        return encode(self.chunk(answer, CompletionUsage.of(usage)))

    def text_choice(self, index: int, text: str) -> AnswerPart:
        return CompletionChoice(index=index, text=text)

    def chunk(self, choices: Sequence[AnswerPart], usage: OptionalUsage) -> AnswerPart:
        return Completion(
            id=self.head.id,
            object="text_completion",
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, index: int, tokens: Sequence[OutputToken]) -> CompletionLogprobs | None:
        """None when they were not asked for."""
        if not tokens or tokens[0].logprobs is None:
            return None
        offsets = self._offsets.setdefault(index, _Offsets(self._tokenizer))
        texts, values, tops, starts = [], [], [], []
        for token in tokens:
            assert token.logprobs is not None
            text = self._token_text(token.token_id)
            value = finite(token.logprobs.logprob)
            top: dict[str, float] = {}
            for token_id, logprob in token.logprobs.top:
                top.setdefault(self._token_text(token_id), finite(logprob))
            top[text] = value
            texts.append(text)
            values.append(value)
            tops.append(top)
            starts.append(offsets.push(token.token_id))
        return CompletionLogprobs(
            tokens=texts, token_logprobs=values, top_logprobs=tops, text_offset=starts
        )

    def _token_text(self, token_id: int) -> str:
        """A part of a character is written as OpenAI does, `bytes:\\xf0\\x9f`: parts stay apart."""
        text = self._tokenizer.token_text(token_id)
        if _REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(
            f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(token_id)
        )


class _Offsets:
    """Where each token of one choice begins in its text, however the tokens were grouped. The
    parts of a character all begin where it does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._num_chars = 0
        self._is_unfinished = False
        """The token before ended inside a character."""

    def push(self, token_id: int) -> int:
        start = self._num_chars
        if token_id in self._tokenizer.special_ids:
            return start
        self._num_chars += len(self._detokenizer.push(token_id))
        is_complete = self._num_chars > start
        if self._is_unfinished and is_complete:
            text = self._tokenizer.token_text(token_id)
            if _REPLACEMENT not in text:
                start = self._num_chars - len(text)
        self._is_unfinished = not is_complete
        return start
