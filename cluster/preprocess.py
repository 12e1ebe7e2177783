"""From a client's messages to engine requests: the first stage of a request.

Invariant: what leaves this stage fits the model (context, vocabulary) and carries all that an
engine and the last stage need, its seed included; a request that cannot run is refused here with
the field, the limit and the value. No dialect of any API is known here.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from cache.events import BlockKey
from cache.keys import KeyRoot
from cache.wheel import Retention
from cluster.postprocess import OutputRules
from cluster.tokenizer import TemplateRefused, Tokenizer
from engine.attempt import EngineRequest
from engine.errors import RequestRejected, ShoalError
from engine.wire import HelloReply, RejectCode, SamplingParams, ServiceClass

_SEED_BITS = 63
_INLINE_CHARS = 4096
"""A prompt up to this length is tokenised in about a millisecond, no more than the way to another
thread and back costs beside it; a longer one must not hold up the event loop."""


class InvalidRequest(ShoalError):
    """A request that can never run, by the client's own field name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must fit."""

    max_model_len: int
    vocab_size: int
    end_token_ids: frozenset[int]

    @classmethod
    def of(cls, engine: HelloReply) -> "ModelLimits":
        return cls(engine.max_model_len, engine.vocab_size, frozenset(engine.eos_token_ids))


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that needs no tokenising."""

    ids: tuple[int, ...]


Prompt = str | TokenPrompt | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asks for, in no particular dialect."""

    prompt: Prompt
    """Raw text, token ids, or messages with `role` and `content`."""
    sampling: SamplingParams
    """Its `max_tokens`, `seed` and `choice` are set by this stage."""
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    seed: int | None = None
    """None: a random one."""
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    cache_domain: str = ""
    """Cached blocks are shared within it only."""
    service_class: ServiceClass = ServiceClass.STANDARD
    retention: Retention = Retention.NORMAL
    session: bytes = b""
    """What the client calls the session that it belongs to, if anything."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One engine request a choice, and the rules of their output."""

    choices: tuple[EngineRequest, ...]
    rules: OutputRules
    block_keys: tuple[BlockKey, ...] = ()
    """Of the prompt's full blocks, for the router."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.choices[0].prompt_ids)


class Preprocessor:
    """Renders and tokenises, long prompts in a few threads of its own: the tokenizer releases the
    GIL, and none of them holds up the event loop."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int = 2) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="preprocess")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(
        self,
        request_id: str,
        request: GenerationRequest,
        limits: ModelLimits,
        root: KeyRoot | None = None,
    ) -> PreparedRequest:
        """`root`: where the prompt's block keys start; none: they are not wanted.

        Raises `InvalidRequest`, or `RequestRejected` when the context is too short."""
        _check_tokens("logit_bias", request.sampling.logit_bias, limits.vocab_size)
        if isinstance(request.prompt, TokenPrompt):
            _check_tokens("prompt", request.prompt.ids, limits.vocab_size)
        if _size(request.prompt) <= _INLINE_CHARS:
            prompt_ids, keys = self._tokenise(request.prompt, root)
        else:
            loop = asyncio.get_running_loop()
            prompt_ids, keys = await loop.run_in_executor(
                self._threads, self._tokenise, request.prompt, root
            )
        max_tokens = _max_tokens(len(prompt_ids), request.max_tokens, limits.max_model_len)
        if request.sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                "min_tokens",
                f"min_tokens must be at most max_tokens ({max_tokens}), "
                f"got {request.sampling.min_tokens}",
            )
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        choices = tuple(
            EngineRequest(
                prompt_ids=prompt_ids,
                sampling=msgspec.structs.replace(
                    request.sampling,
                    max_tokens=max_tokens,
                    seed=seed & ((1 << _SEED_BITS) - 1),
                    choice=choice,
                ),
                request_id=f"{request_id}-{choice}",
                cache_domain=request.cache_domain,
                service_class=request.service_class,
                retention=request.retention,
            )
            for choice in range(request.num_choices)
        )
        rules = OutputRules(request.stops, request.sampling.min_tokens, limits.end_token_ids)
        return PreparedRequest(choices, rules, keys)

    def _tokenise(
        self, prompt: Prompt, root: KeyRoot | None
    ) -> tuple[Sequence[int], tuple[BlockKey, ...]]:
        ids: Sequence[int]
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        elif isinstance(prompt, TokenPrompt):
            ids = prompt.ids
        else:
            try:
                text = self.tokenizer.render_chat(prompt)
            except TemplateRefused as error:
                raise InvalidRequest("messages", str(error)) from error
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidRequest("prompt", "the prompt has no tokens")
        return ids, tuple(root.keys(ids)) if root is not None else ()


def _size(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, TokenPrompt):
        return len(prompt.ids)
    return sum(len(message["content"]) for message in prompt)


def _max_tokens(num_prompt_tokens: int, asked: int | None, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if asked is None and room > 0:
        return room
    if room <= 0 or (asked is not None and asked > room):
        output = "at least 1 is" if asked is None else f"{asked} are"
        raise RequestRejected(
            RejectCode.CONTEXT_LENGTH,
            f"the context limit is {max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} and {output} asked for as output: "
            f"{num_prompt_tokens + (asked or 1)} together",
        )
    assert asked is not None
    return asked


def _check_tokens(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            field,
            f"{field}: token ids must be below the vocabulary size ({vocab_size}), got {largest}",
        )
