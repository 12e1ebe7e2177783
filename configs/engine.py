"""What one EngineCore is told when it starts.

Invariant: every value an engine depends on is a field here, documented and bounded; an unknown key
is refused. A field that may change while the engine runs is marked ``live``, any other ``restart``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_GIB = 1 << 30


def _restart(default: Any, description: str, **bounds: Any) -> Any:
    return Field(
        default, description=description, json_schema_extra={"change": "restart"}, **bounds
    )


def _live(default: Any, description: str, **bounds: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"change": "live"}, **bounds)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheConfig(_Section):
    """The KV cache of one engine."""

    block_size: int = _restart(16, "Tokens in a KV block.", ge=1, le=256)
    memory_bytes: int = _restart(
        _GIB, "KV memory in bytes; the number of blocks follows from it.", ge=1 << 20
    )
    num_blocks: int | None = _restart(
        None, "KV blocks; overrides memory_bytes when given.", ge=1, le=1 << 24
    )
    enable_prefix_caching: bool = _restart(True, "Reuse full blocks of equal prefixes.")


class SchedulerConfig(_Section):
    """How one engine fills its steps."""

    max_num_batched_tokens: int = _live(2048, "Token budget of one step.", ge=1, le=1 << 20)
    max_num_seqs: int = _live(256, "Requests that run at the same time.", ge=1, le=65536)
    long_prefill_threshold: int = _live(
        1024, "Most tokens one request may compute in a step.", ge=1, le=1 << 20
    )
    max_waiting: int = _live(4096, "Requests that may wait; beyond it one is refused.", ge=1)


class TransportConfig(_Section):
    """The engine's sockets."""

    listen: str = _restart(
        "tcp://127.0.0.1:*",
        "Where the request socket binds: ipc://PATH, or tcp://ADDRESS:PORT ('*': any free port).",
        pattern=r"^(ipc|tcp)://.+",
    )
    listen_stream: str = _restart(
        "tcp://127.0.0.1:*",
        "Where the event and load stream binds; the same forms.",
        pattern=r"^(ipc|tcp)://.+",
    )
    lease_s: float = _restart(
        5.0, "Seconds of silence after which an ingress's requests are aborted.", gt=0, le=3600
    )
    max_message_bytes: int = _restart(
        16 << 20, "Largest message accepted from an ingress.", ge=1024, le=1 << 30
    )
    outbox_messages: int = _restart(
        1024, "Unsent messages kept for one ingress; beyond it its requests are aborted.", ge=1
    )
    load_report_interval_s: float = _restart(
        0.1, "Seconds between load reports on the stream.", gt=0, le=60
    )
    replay_frames: int = _restart(
        4096, "Frames of the stream kept for replay after a gap.", ge=1, le=1 << 20
    )
    snapshot_chunk_keys: int = _restart(
        4096, "Block keys in one chunk of a snapshot.", ge=1, le=1 << 20
    )


class SimulationConfig(_Section):
    """Cost model of the simulated executor: a step lasts
    ``step_s + token_s * tokens computed + context_token_s * tokens attended to``."""

    vocab_size: int = _restart(32000, "Token ids run from 0 to this, exclusive.", ge=2, le=1 << 20)
    max_model_len: int = _restart(131072, "Longest prompt plus output.", ge=1)
    step_s: float = _restart(0.0, "Fixed seconds of a step.", ge=0)
    token_s: float = _restart(0.0, "Seconds for each token computed.", ge=0)
    context_token_s: float = _restart(0.0, "Seconds for each token of KV read.", ge=0)
    eos_period: int = _restart(
        0, "One token in this many is the end token; 0: never.", ge=0, le=1 << 20
    )


class EngineConfig(_Section):
    """One EngineCore: what it runs, with how much, and where it listens."""

    model: str = _restart("default", "Local folder, hub id, or 'default' for the bundled model.")
    executor: Literal["model", "simulated"] = _restart(
        "model", "Real model, or the stated cost model of `simulation` that answers with hashes."
    )
    device: str = _restart("auto", "torch device; 'auto' takes CUDA when there is one, else CPU.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _restart(
        "auto", "Weights and KV; 'auto' is the checkpoint's own."
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = _restart(
        None, "CPU threads of the engine; none: the cores this process may use."
    )
    max_model_len: Annotated[int, Field(ge=1)] | None = _restart(
        None, "Longest prompt plus output; none: what the model and the KV memory allow."
    )
    cluster_secret_file: str | None = _restart(
        None,
        "File of 32 or more random bytes, mode 0600, that keys the prefix hash; "
        "none: a fresh random key for each engine start.",
    )
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)
