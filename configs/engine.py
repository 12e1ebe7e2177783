"""What one EngineCore is told when it starts.

Invariant: every value an engine depends on is a field here, documented and bounded; an unknown key
is refused. A field that may change while the engine runs is marked ``live``, any other ``restart``.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.section import Section, live, restart
from configs.units import ByteSize, Duration

_GIB = 1 << 30


class CacheConfig(Section):
    """The KV cache of one engine."""

    block_size: int = restart(16, "Tokens in a KV block.", ge=1, le=256)
    memory_bytes: Annotated[ByteSize, Field(ge=1 << 20, le=1 << 44)] | None = restart(
        None,
        "KV memory in bytes, of each rank; the number of blocks follows from it. None given: 1 "
        "GiB, or on a GPU what memory_fraction leaves.",
    )
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = restart(
        None,
        "Share of a GPU that weights, the largest step and KV may take together, with what other "
        "processes use; KV gets the rest, found by running that step. None given: 0.9 on a GPU, "
        "unless memory_bytes or num_blocks is.",
    )
    num_blocks: Annotated[int, Field(ge=1, le=1 << 24)] | None = restart(
        None, "KV blocks; overrides memory_bytes and memory_fraction when given."
    )
    kv_dtype: Literal["auto", "fp8"] = restart(
        "auto",
        "What KV is kept in: the model's dtype, or 8-bit floats (e4m3), in which the same memory "
        "holds twice as many tokens of a model of 16 bits, rounded to 3 bits of mantissa.",
    )
    enable_prefix_caching: bool = restart(True, "Reuse full blocks of equal prefixes.")
    reuse_partial_blocks: bool = restart(
        True, "Copy the beginning of a block that begins like the next one needed."
    )
    pin_steps: int = restart(
        100_000,
        "Engine steps for which a prefix stays pinned after the last request that asked for it.",
        ge=1,
        le=1 << 40,
    )
    host_memory_bytes: Annotated[ByteSize, Field(ge=0, le=1 << 46)] | None = restart(
        None,
        "Host memory of each rank that keeps copies of cached blocks; 0: none; none given: 256 MiB "
        "beside a disk_path, else 0.",
    )
    disk_path: str | None = restart(
        None,
        "Folder on a local disk that keeps copies of cached blocks over restarts, for whoever has "
        "the same cluster secret.",
        min_length=1,
        max_length=4096,
    )
    disk_bytes: ByteSize = restart(
        16 * _GIB, "Most bytes that one engine keeps below disk_path.", ge=1 << 20, le=1 << 50
    )
    wheel_slots: int = restart(
        1024, "Slots of the time wheel that orders eviction.", ge=1, le=1 << 16
    )
    wheel_slot_width: int = restart(
        16, "Engine steps in one slot of the time wheel.", ge=1, le=1 << 20
    )

    @property
    def slot_bytes(self) -> int:
        """Bytes of host memory for slots."""
        if self.host_memory_bytes is None:
            return 256 << 20 if self.disk_path is not None else 0
        return self.host_memory_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV memory where they are not measured."""
        return _GIB if self.memory_bytes is None else self.memory_bytes

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.memory_bytes is not None and self.memory_fraction is not None:
            raise ValueError("give memory_bytes or memory_fraction, not both")
        return self

    @model_validator(mode="after")
    def _disk_needs_the_host(self) -> Self:
        if self.disk_path is not None and not self.slot_bytes:
            raise ValueError("disk_path needs host_memory_bytes: blocks pass through host memory")
        if self.slot_bytes and not self.enable_prefix_caching:
            raise ValueError("host_memory_bytes and disk_path need enable_prefix_caching")
        return self


class SchedulerConfig(Section):
    """How one engine fills its steps."""

    max_num_batched_tokens: int = live(2048, "Token budget of one step.", ge=1, le=1 << 20)
    max_num_seqs: int = live(256, "Requests that run at the same time.", ge=1, le=65536)
    long_prefill_threshold: int = live(
        1024, "Most tokens one request may compute in a step.", ge=1, le=1 << 20
    )
    overlap: bool = live(
        True, "Plan a step while the one before it runs, so that the device does not wait."
    )
    interactive_ttft_s: Duration = live(
        1.0, "Target for an interactive request's first token.", gt=0, le=86400
    )
    standard_ttft_s: Duration = live(
        10.0, "Target for a standard request's first token.", gt=0, le=86400
    )
    batch_ttft_s: Duration = live(
        600.0, "Target for a batch request's first token.", gt=0, le=86400
    )
    interactive_tpot_s: Duration = live(
        0.2,
        "Target between two tokens of an interactive request: while one decodes, prompts get no "
        "more of a step than takes this long.",
        gt=0,
        le=3600,
    )
    queue_timeout_s: Annotated[Duration, Field(gt=0, le=86400)] | None = live(
        None,
        "Longest that a request may wait to begin, batch ones apart; then it ends with the reason "
        "queue_timeout. None: for ever.",
    )
    max_waiting: int = live(
        4096, "Requests that may wait; beyond it one is refused.", ge=1, le=1 << 20
    )
    max_waiting_tokens: int = live(
        1 << 20,
        "Tokens that waiting requests may have together; beyond it one is refused, unless it is "
        "the only one.",
        ge=1,
        le=1 << 40,
    )


class TransportConfig(Section):
    """The engine's sockets."""

    listen: str = restart(
        "tcp://127.0.0.1:*",
        "Where the request socket binds: ipc://PATH, or tcp://ADDRESS:PORT ('*': any free port); "
        "beyond loopback only with cluster_secret_file, and encrypted.",
        pattern=r"^(ipc|tcp)://.+",
        max_length=256,
    )
    listen_stream: str = restart(
        "tcp://127.0.0.1:*",
        "Where the event and load stream binds; the same forms.",
        pattern=r"^(ipc|tcp)://.+",
        max_length=256,
    )
    lease_s: Duration = restart(
        5.0, "Seconds of silence after which an ingress's requests are aborted.", gt=0, le=3600
    )
    max_message_bytes: ByteSize = restart(
        16 << 20, "Largest message accepted from an ingress.", ge=1024, le=1 << 30
    )
    outbox_messages: int = restart(
        1024,
        "Unsent messages kept for one ingress; beyond it its requests are aborted.",
        ge=1,
        le=1 << 20,
    )
    load_report_interval_s: Duration = restart(
        0.1, "Seconds between load reports on the stream.", gt=0, le=60
    )
    replay_frames: int = restart(
        4096, "Frames of the stream kept for replay after a gap.", ge=1, le=1 << 20
    )
    snapshot_chunk_keys: int = restart(
        4096, "Block keys in one chunk of a snapshot.", ge=1, le=1 << 20
    )


class SimulationConfig(Section):
    """Cost model of the simulated executor: a step lasts
    ``step_s + token_s * tokens computed + context_token_s * tokens attended to``."""

    vocab_size: int = restart(32000, "Token ids run from 0 to this, exclusive.", ge=2, le=1 << 20)
    max_model_len: int = restart(131072, "Longest prompt plus output.", ge=1, le=1 << 30)
    step_s: Duration = restart(0.0, "Fixed seconds of a step.", ge=0, le=3600)
    token_s: Duration = restart(0.0, "Seconds for each token computed.", ge=0, le=3600)
    context_token_s: Duration = restart(0.0, "Seconds for each token of KV read.", ge=0, le=3600)
    gil_share: float = restart(
        0.0, "Share of a step's seconds in which it holds Python's lock.", ge=0, le=1
    )
    eos_period: int = restart(
        0, "One token in this many is the end token; 0: never.", ge=0, le=1 << 20
    )
    poison_token_id: Annotated[int, Field(ge=0, lt=1 << 20)] | None = restart(
        None,
        "For tests of failover: computing this token kills the engine's process, as a request does "
        "that a driver or kernel cannot take; none: nothing does.",
    )


class EngineConfig(Section):
    """One EngineCore: what it runs, with how much, and where it listens."""

    model: str = restart(
        "default",
        "Local folder, hub id, or 'default' for the bundled model.",
        min_length=1,
        max_length=4096,
    )
    executor: Literal["model", "simulated"] = restart(
        "model", "Real model, or the stated cost model of `simulation` that answers with hashes."
    )
    device: str = restart(
        "auto",
        "torch device; 'auto' takes CUDA when there is one, else CPU.",
        min_length=1,
        max_length=64,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = restart(
        "auto",
        "Weights, and KV unless cache.kv_dtype says otherwise; 'auto' is the checkpoint's own.",
    )
    cuda_graphs: bool = restart(
        True, "On a GPU, replay decode steps from graphs; off, launch every step op by op."
    )
    compile_prefill: bool = restart(
        False,
        "Have torch.compile compile the prefill of a model that runs op by op, while it loads; "
        "what cannot be compiled runs as it is.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = restart(
        None,
        "CPU threads of the engine; none: under `shoal serve` an equal share of the cores, on a "
        "cluster placement.num_cpus.",
    )
    tensor_parallel_size: int = restart(
        1,
        "Ranks that compute every step together, on one node: each has a GPU of its own, or on a "
        "CPU an equal share of `threads`.",
        ge=1,
        le=64,
    )
    max_model_len: Annotated[int, Field(ge=1, le=1 << 30)] | None = restart(
        None, "Longest prompt plus output; none: what the model and the KV memory allow."
    )
    cluster_secret_file: str | None = restart(
        None,
        "File of 32 or more random bytes, mode 0600, that keys the prefix hash and connections "
        "over tcp; none: a fresh random key for each engine start, and no connections but local "
        "ones.",
        min_length=1,
        max_length=4096,
    )
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)

    @model_validator(mode="after")
    def _ranks_hold_parts_of_a_model(self) -> Self:
        if self.tensor_parallel_size > 1 and self.executor == "simulated":
            raise ValueError("tensor_parallel_size above 1 needs executor: model, not simulated")
        if self.tensor_parallel_size > 1 and self.compile_prefill:
            raise ValueError(
                "compile_prefill and tensor_parallel_size above 1 exclude each other: the sums "
                "over the ranks are not compiled"
            )
        if self.tensor_parallel_size > 1 and self.cache.disk_path is not None:
            raise ValueError(
                "tensor_parallel_size above 1 and cache.disk_path exclude each other: every rank "
                "has its own part of a block"
            )
        return self

    @model_validator(mode="after")
    def _a_simulation_has_no_kv(self) -> Self:
        if self.executor == "simulated" and self.cache.kv_dtype != "auto":
            raise ValueError(
                f"cache.kv_dtype {self.cache.kv_dtype} needs executor: model, not simulated"
            )
        return self

    def with_secret(self, path: str | None) -> Self:
        """This engine with the cluster's secret file, unless it names one of its own."""
        if self.cluster_secret_file is not None:
            return self
        return self.model_copy(update={"cluster_secret_file": path})
