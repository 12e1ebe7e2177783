"""The messages between ingress and engine: fixed-schema msgpack, frozen, versioned.

Invariant: these are the only types that cross a process on the data plane, and every bound that can
be stated without the model is stated here, so that a malformed message fails at decode and never
reaches the engine's state.

A conversation: the ingress says `Hello` and gets `HelloReply`; it sends `AddRequest` and gets
`Accepted` or `Rejected`, then `TokenBatch`es; `Heartbeat` renews its lease. Cache events and load
reports travel on one ordered publish stream of `StreamFrame`s, repaired by `ReplayRequest` and
`SnapshotRequest`.
"""

from enum import IntEnum, StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from cache.events import Tier
from cache.wheel import Retention

WIRE_VERSION = 4

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds: TypeAlias = tuple[TokenId, ...]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
IngressId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Attempt = Annotated[int, Meta(ge=0, lt=1 << 16)]
Sequence = Annotated[int, Meta(ge=0, lt=1 << 62)]
Incarnation = Annotated[int, Meta(ge=0, lt=1 << 62)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]

MAX_TOP_LOGPROBS = 20


class RejectCode(StrEnum):
    """Why an engine refuses a request. The ingress maps each to one HTTP status."""

    INVALID = "invalid"
    """The request can never run; the message names the field, the limit and the value."""
    CONTEXT_LENGTH = "context_length"
    """Prompt plus max_tokens exceed what the model or the KV memory can hold."""
    STALE_INCARNATION = "stale_incarnation"
    """The request was meant for an engine that is no more."""
    STALE_ATTEMPT = "stale_attempt"
    """This attempt, or a later one, is already here."""
    OVERLOADED = "overloaded"
    """The queue is full: try again later, or elsewhere."""
    DRAINING = "draining"
    """The engine finishes what it has, and takes nothing new: try elsewhere."""
    INTERNAL = "internal"
    """A fault of the engine's; the log has the details."""


class RefuseCode(StrEnum):
    """Why an engine refuses a message that is no request."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    VERSION = "version"
    NO_SESSION = "no_session"
    """No Hello came before, the lease has expired, the outbox overflowed, or the engine stops: what
    ran is over, and the ingress must say Hello again."""


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token, or one of `stop_token_ids`."""
    LENGTH = "length"
    ABORT = "abort"
    QUEUE_TIMEOUT = "queue_timeout"
    """It had not begun when it had waited for as long as it may."""
    ERROR = "error"


class Message(
    msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Base of all messages: an array whose first element is the type's name."""


class SamplingParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """How tokens are chosen, and when a request ends. Defaults: greedy, no filter, no penalty."""

    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] = 16
    """Counts all output, also what came with the request from an earlier attempt."""
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """End and stop tokens are masked before this many output tokens."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """0 keeps all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)
    ] = {}
    allowed_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None
    bad_words: Annotated[
        tuple[Annotated[TokenIds, Meta(min_length=1, max_length=64)], ...], Meta(max_length=1024)
    ] = ()
    """Token sequences that must not appear."""
    stop_token_ids: Annotated[TokenIds, Meta(max_length=1024)] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """With `choice` and the position it fixes the noise of every draw."""
    choice: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    """Which of a request's `n` choices this is."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Report the log-probability of each output token and of this many likeliest ones."""


# ------------------------------------------------------------------ ingress to engine


class Hello(Message, frozen=True):
    """Opens or reopens a session. Everything else needs one."""

    wire_version: int
    ingress_id: IngressId


class ServiceClass(IntEnum):
    """Who goes first when not all can."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class AddRequest(Message, frozen=True):
    """One choice of one request. `output_ids` is what earlier attempts delivered: the engine goes
    on after it as after its own preemption (penalties, limits, offsets and usage included)."""

    request_id: RequestId
    attempt: Attempt
    number: Sequence
    """Rises with every request of this ingress; reports echo the highest seen."""
    incarnation: Incarnation
    prompt_ids: Annotated[TokenIds, Meta(min_length=1)]
    sampling: SamplingParams
    output_ids: TokenIds = ()
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Lower runs first, whatever its class."""
    service_class: ServiceClass = ServiceClass.STANDARD
    cache_domain: Annotated[str, Meta(max_length=256)] = ""
    """Requests share cached blocks only within one domain."""
    retention: Retention = Retention.NORMAL
    """How much its blocks are worth keeping."""


class Abort(Message, frozen=True):
    """Ends attempts up to and including the one named. Unknown ones are no error."""

    requests: tuple[tuple[RequestId, Attempt], ...]


class Heartbeat(Message, frozen=True):
    """Renews the lease."""


class Goodbye(Message, frozen=True):
    """Closes the session; what still runs for it is aborted."""


class ReplayRequest(Message, frozen=True):
    """Asks for the frames from `first` on; if they are gone, a snapshot is sent instead."""

    first: Sequence


class SnapshotRequest(Message, frozen=True):
    """Asks for the whole set of cached keys."""


# ------------------------------------------------------------------ engine to ingress


class HelloReply(Message, frozen=True):
    """What an ingress must know of an engine before it sends to it."""

    wire_version: int
    engine_id: str
    incarnation: Incarnation
    model: str
    fingerprint: Annotated[str, Meta(max_length=64)]
    """Equal for equal weights, config and dtype: engines with equal ones are interchangeable."""
    block_size: int
    key_schema: int
    vocab_size: int
    max_model_len: int
    num_blocks: int
    eos_token_ids: TokenIds
    lease_s: float
    max_message_bytes: int
    stream_endpoint: str
    """Where the ordered stream of `StreamFrame`s is published."""


class Refused(Message, frozen=True):
    """A message was refused that is no request, or cannot be read as one."""

    code: RefuseCode
    message: str


class Accepted(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt


class Rejected(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    code: RejectCode
    message: str
    """Fit for a client's eyes."""
    retry_after_s: float = 0.0
    """When it may be worth trying again; 0: not known."""


class TokenLogprobs(Message, frozen=True):
    """Natural logarithms from the raw logits, before any bias, penalty, temperature or filter."""

    logprob: float
    """Of the token chosen."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """Likeliest first."""


class Finish(Message, frozen=True):
    reason: FinishReason
    message: str = ""


class FirstToken(Message, frozen=True):
    """How an attempt's first token came about, in seconds."""

    queue_s: float
    """From its arrival until a step was planned for it."""
    prefill_s: float
    """From then until the token was there."""


class TokenItem(Message, frozen=True):
    """Output of one attempt in one step."""

    request_id: RequestId
    attempt: Attempt
    offset: Annotated[int, Meta(ge=0)]
    """Index of the first of `token_ids` in the request's whole output."""
    token_ids: TokenIds
    finish: Finish | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the cache when this attempt started."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, when asked for."""
    first: FirstToken | None = None
    """With the first token of the attempt."""


class TokenBatch(Message, frozen=True):
    """All output of one step for one ingress."""

    step: Sequence
    seen: Sequence
    """Highest request number seen from this ingress."""
    items: tuple[TokenItem, ...]


# ------------------------------------------------------------------ the ordered stream


class BlocksStored(Message, frozen=True):
    """The first copies of these keys in a tier; each is the child of the one before it, the first
    of `parent` (a root when it is no block's key)."""

    parent: Key
    keys: tuple[Key, ...]
    tier: Tier = Tier.DEVICE


class BlocksRemoved(Message, frozen=True):
    """The last copies of these keys have left a tier."""

    keys: tuple[Key, ...]
    tier: Tier = Tier.DEVICE


class CacheDelta(Message, frozen=True):
    """Cache events, in order."""

    events: tuple[BlocksStored | BlocksRemoved, ...]


class LoadReport(Message, frozen=True):
    """How busy an engine is. Rates are moving averages over busy time."""

    running: int
    waiting: int
    waiting_tokens: int
    """Tokens that waiting and running requests have yet to prefill."""
    max_num_seqs: int
    """Requests that may run at the same time."""
    num_blocks: int
    used_blocks: int
    """Held by requests; cached blocks that can be evicted do not count."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_s: float
    """Duration of the last step."""
    step_age_s: float
    """Since the step now running began; 0 when none runs."""
    preemptions: int
    """Since the engine started."""
    seen: dict[IngressId, Sequence]
    """Highest request number seen from each ingress."""


class StreamFrame(Message, frozen=True):
    """One element of the stream. Numbers have no holes within one incarnation."""

    incarnation: Incarnation
    sequence: Sequence
    digest: Annotated[int, Meta(ge=0)]
    """Of the key set after this frame (`cache.events.KeySet`)."""
    body: CacheDelta | LoadReport


class Replay(Message, frozen=True):
    frames: tuple[StreamFrame, ...]


class SnapshotChunk(Message, frozen=True):
    """A part of the key set as it was at `sequence`; chunks come in order of `index`."""

    incarnation: Incarnation
    sequence: Sequence
    digest: Annotated[int, Meta(ge=0)]
    index: int
    is_last: bool
    keys: tuple[tuple[Key, Tier], ...]


ToEngine: TypeAlias = (
    Hello | AddRequest | Abort | Heartbeat | Goodbye | ReplayRequest | SnapshotRequest
)
ToIngress: TypeAlias = (
    HelloReply | Refused | Accepted | Rejected | TokenBatch | Replay | SnapshotChunk
)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_ingress: msgspec.msgpack.Decoder[ToIngress] = msgspec.msgpack.Decoder(ToIngress)
_stream: msgspec.msgpack.Decoder[StreamFrame] = msgspec.msgpack.Decoder(StreamFrame)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises `msgspec.DecodeError` (or its subclass `ValidationError`) for anything else."""
    return _to_engine.decode(frame)


def decode_to_ingress(frame: bytes) -> ToIngress:
    """Raises `msgspec.DecodeError` for anything else."""
    return _to_ingress.decode(frame)


def decode_stream(frame: bytes) -> StreamFrame:
    """Raises `msgspec.DecodeError` for anything else."""
    return _stream.decode(frame)
