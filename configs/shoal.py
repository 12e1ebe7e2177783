"""The whole tree: what a Shoal cluster serves, and how.

Invariant: a tree that validates names every model once, holds no secret (only the paths of files
that do), and says of every field whether it may change while the cluster serves.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from configs.engine import EngineConfig
from configs.section import Section, live, restart
from configs.units import ByteSize, Duration

ModelName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$", strict=True
    ),
]
"""A model as a client calls it: letters, digits and `. _ : / @ + -`, a letter or digit first."""
_LabelKey = Annotated[
    str, StringConstraints(max_length=320, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", strict=True)
]
_LabelValue = Annotated[str, StringConstraints(max_length=256, strict=True)]


class PlacementConfig(Section):
    """Where one replica of a model runs: the resources and the node of its engine."""

    num_gpus: float = restart(
        0.0,
        "GPUs of one engine: a fraction, or `engine.tensor_parallel_size`; 0: a CPU replica.",
        ge=0,
        le=64,
    )
    num_cpus: float = restart(
        1.0,
        "CPUs that Ray sets aside for one engine, of several ranks one or more for each; "
        "`engine.threads` says how many it uses.",
        ge=0,
        le=4096,
    )
    accelerator_type: str | None = restart(
        None,
        "Ray's name of the accelerator a node must have, such as H100; none: any.",
        min_length=1,
        max_length=64,
    )
    node_labels: dict[_LabelKey, _LabelValue] = restart(
        {}, "Ray node labels that a node must carry.", max_length=32
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise _error("num_gpus above 1 must be a whole number", self.num_gpus, "num_gpus")
        if self.num_gpus == 0 and self.num_cpus == 0:
            raise _error("num_cpus and num_gpus are both 0", self.num_cpus, "num_cpus")
        return self


class SupervisionConfig(Section):
    """How one model's engines are watched, restarted and drained."""

    stall_s: Duration = live(
        30.0,
        "Age of a step after which an engine counts as stalled (or five predicted steps, "
        "whichever is longer).",
        ge=0.1,
        le=86400,
    )
    max_restarts: int = live(
        3,
        "Restarts of an engine within restart_window_s; after them its replica is replaced.",
        ge=0,
        le=1000,
    )
    restart_window_s: Duration = live(
        600.0, "Time over which restarts are counted.", ge=1, le=604800
    )
    start_timeout_s: Duration = live(
        1800.0, "Time an engine may take to load and warm up.", ge=1, le=86400
    )
    drain_timeout_s: Duration = live(
        30.0, "Time a draining engine waits for its requests before it stops.", ge=0, le=86400
    )
    poll_interval_s: Duration = live(
        0.5, "Time between two looks at an engine's state.", ge=0.01, le=60
    )


class AutoscalingConfig(Section):
    """When engines are added to a model and taken away."""

    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = live(
        None, "Most engines of the model; none: always `replicas`, which is the least otherwise."
    )
    up_queued_requests: float = live(
        4.0, "Waiting requests an engine above which more engines are added.", gt=0, le=1e6
    )
    up_backlog_s: Duration = live(
        5.0,
        "Seconds of prefill waiting on each engine, at the measured rate, above which more engines "
        "are added.",
        gt=0,
        le=86400,
    )
    up_delay_s: Duration = live(
        1.0, "How long one of the two must be exceeded first.", ge=0, le=86400
    )
    down_utilisation: float = live(
        0.5,
        "An engine is removed when the queues are short and the others would be used less than "
        "this: the largest of running sequences, KV blocks and token budget, each of its limit.",
        gt=0,
        lt=1,
    )
    down_delay_s: Duration = live(60.0, "How long that must hold first.", ge=0, le=86400)
    warmup_s: Duration = live(
        120.0,
        "Longest time that a growth waits for the engines it asked for before it asks for more.",
        ge=0,
        le=86400,
    )


class ModelConfig(Section):
    """One model as clients see it: its names, its replicas, and the engine of each."""

    name: ModelName = restart(..., "The model as clients call it; unique.")
    aliases: list[ModelName] = live([], "More names of it; unique over all models.", max_length=64)
    replicas: int = live(
        1, "Engines that serve it; with autoscaling.max_replicas the least of them.", ge=1, le=1000
    )
    engine: EngineConfig = Field(default_factory=EngineConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig)
    autoscaling: AutoscalingConfig = Field(default_factory=AutoscalingConfig)

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        most = self.autoscaling.max_replicas
        if most is not None and most < self.replicas:
            message = f"max_replicas is less than replicas, which is {self.replicas}"
            raise _error(message, most, "autoscaling", "max_replicas")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        ranks, placement = self.engine.tensor_parallel_size, self.placement
        takes_gpus = placement.num_gpus > (0 if ranks > 1 else 1)
        if takes_gpus and placement.num_gpus != ranks:
            message = f"num_gpus must be engine.tensor_parallel_size, which is {ranks}"
            raise _error(message, placement.num_gpus, "placement", "num_gpus")
        if ranks > 1 and placement.num_cpus < ranks:
            message = f"num_cpus is less than one for each of engine.tensor_parallel_size, {ranks}"
            raise _error(message, placement.num_cpus, "placement", "num_cpus")
        return self


class IngressConfig(Section):
    """The HTTP front."""

    host: str = restart(
        "127.0.0.1",
        "Address that HTTP binds to.",
        min_length=1,
        max_length=253,
    )
    port: int = restart(8000, "Port of HTTP.", ge=1, le=65535)
    replicas: int = live(1, "Ingress processes; all are active.", ge=1, le=256)
    max_body_bytes: ByteSize = live(
        8 << 20, "Largest request body accepted.", ge=1 << 10, le=1 << 30
    )
    hold_s: Duration = live(
        120.0,
        "Longest time a request waits for an engine of its model that is on its way; then 503.",
        ge=0,
        le=3600,
    )
    max_held: int = live(
        1024,
        "Requests of one model that may wait so in one ingress; beyond it 503.",
        ge=0,
        le=65536,
    )
    max_open_requests: int = live(
        4096,
        "Requests of one model that may be open in one ingress; beyond it 429.",
        ge=1,
        le=1 << 20,
    )
    max_open_tokens: int = live(
        1 << 28,
        "Tokens that those may have, prompts and max_tokens together; beyond it 429, unless it is "
        "the only one.",
        ge=1,
        le=1 << 50,
    )
    explained_requests: int = live(
        4096,
        "Latest requests that `shoal explain` can tell about, of each ingress.",
        ge=0,
        le=1 << 20,
    )
    keep_alive_s: Duration = live(
        15.0,
        "Silence after which a comment is sent on a stream, or a blank before a whole answer whose "
        "first token is there, to keep the connection open.",
        ge=0.1,
        le=3600,
    )
    session_header: str = live(
        "X-Session-ID",
        "Header (its value up to 1,024 characters) by which a session is known, before "
        "`prompt_cache_key` and `user` of the body: among engines that are as good, and where "
        "nobody has a prompt cached, its requests meet on one.",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9-]+$",
    )
    proxy: Literal["auto", "haproxy", "python"] = restart(
        "auto",
        "What accepts connections under `shoal serve` and the chart. haproxy: Ray Serve's HAProxy "
        "(on a cluster that `shoal serve` did not start, its metrics and statistics ports are open "
        "on all interfaces: close them from outside); python: Ray Serve's own proxy, which is "
        "slower; auto: HAProxy where it can run. Elsewhere the environment of the cluster decides.",
    )


class RouterConfig(Section):
    """How a request finds its replica."""

    policy: Literal["prefix", "least_backlog", "round_robin", "power_of_two"] = live(
        "prefix",
        "prefix: seconds of prefill saved by the cached prefix less seconds of expected queueing; "
        "the others ignore the cache.",
    )
    tie_fraction: float = live(
        0.10,
        "Replicas whose score is within this fraction of the best are split by hash, so that "
        "several ingresses do not choose the same one at once.",
        ge=0,
        le=1,
    )
    cold_blocks: int = live(
        4, "First blocks of a prompt that are hashed to place such a prefix.", ge=1, le=1024
    )
    default_prefill_tokens_per_s: float = live(
        2000.0, "Prefill rate assumed of a replica that has not measured its own.", gt=0, le=1e9
    )
    default_decode_tokens_per_s: float = live(
        50.0, "Decode rate of one request, assumed likewise.", gt=0, le=1e9
    )
    max_attempts: int = live(
        3, "Replicas a request may be tried on, the first included.", ge=1, le=100
    )
    index_memory_bytes: ByteSize = live(
        256 << 20,
        "Memory that each ingress may take to know what the engines of a model have cached: some "
        "150 bytes a block and engine. Beyond it the largest engines are known by Bloom filters, "
        "in 5 to 20 bytes a block.",
        ge=1 << 20,
        le=1 << 40,
    )
    retry_share: float = live(
        0.2,
        "Further tries that new requests may have together, as a share of their number: when all "
        "engines are full, trying them in turn must not be what keeps them busy.",
        ge=0,
        le=10,
    )


class FailoverConfig(Section):
    """What becomes of a stream whose engine dies, hangs or drains."""

    enabled: bool = live(
        True,
        "Go on elsewhere with the output so far. False: a stream ends with its engine, and a drain "
        "waits for what runs.",
    )
    max_failovers: int = live(
        2,
        "Deaths of engines that one request may survive; leaving a draining one does not count.",
        ge=0,
        le=100,
    )
    probation_tokens: int = live(
        4,
        "Output tokens that a request must have delivered on an engine not to be suspected when "
        "that dies. A suspect is the only one on its next engine until it has delivered so many "
        "there, and fails if that dies first.",
        ge=1,
        le=1024,
    )


class RegistryConfig(Section):
    """The directory of engines, keys and live settings."""

    path: str | None = restart(
        None,
        "File that holds its state; none: kept in memory, lost when its node is.",
        min_length=1,
        max_length=4096,
    )
    lease_s: Duration = restart(
        5.0, "Silence after which an engine is struck off the directory.", ge=0.5, le=3600
    )


class ShoalConfig(Section):
    """The configuration of one cluster."""

    models: list[ModelConfig] = live(
        ..., "What is served; a change to one never touches another.", min_length=1, max_length=1000
    )
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    failover: FailoverConfig = Field(default_factory=FailoverConfig)
    registry: RegistryConfig = Field(default_factory=RegistryConfig)
    cluster_secret_file: str | None = restart(
        None,
        "File of 32 or more random bytes, mode 0600, from which the cluster's keys are derived; "
        "an engine without a file of its own uses it.",
        min_length=1,
        max_length=4096,
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        clashes = name_clashes((model.name, [*model.aliases]) for model in self.models)
        if clashes:
            raise _errors([(message, name, loc) for loc, name, message in clashes])
        return self


def name_clashes(
    names: Iterable[tuple[object, list[object]]],
) -> list[tuple[tuple[str | int, ...], str, str]]:
    """Given each model's name and aliases: the place in the tree, the name and a message for every
    name that was taken before. What is no text is passed over."""
    taken: dict[str, str] = {}
    clashes = []
    for index, (name, aliases) in enumerate(names):
        places: list[tuple[str | int, ...]] = [("models", index, "name")]
        places += [("models", index, "aliases", number) for number in range(len(aliases))]
        for loc, each in zip(places, [name, *aliases], strict=True):
            if not isinstance(each, str):
                continue
            if each in taken:
                clashes.append((loc, each, f"the name {each!r} is taken by {taken[each]}"))
            taken.setdefault(each, f"models[{index}]")
    return clashes


def _error(message: str, value: object, *loc: str | int) -> ValidationError:
    return _errors([(message, value, loc)])


def _errors(problems: list[tuple[str, object, tuple[str | int, ...]]]) -> ValidationError:
    """Raised inside a validator, its places are taken below that validator's own."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError("conflict", "{message}", {"message": message}),
            loc=loc,
            input=value,
        )
        for message, value, loc in problems
    ]
    return ValidationError.from_exception_data("configuration", details)
