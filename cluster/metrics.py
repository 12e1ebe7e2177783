"""What an ingress counts, in Prometheus' text form.

Invariant: every ingress has a registry of its own; nothing is global, and labels are bounded: model
names come from the configuration, never from a client.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.generation import Generation
from cluster.routing.decision import Decision
from cluster.routing.index import PrefixIndex
from engine.observer import Followed
from engine.stream import StreamCounts
from engine.wire import LoadReport

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class IngressMetrics:
    """Counters and histograms of one ingress, and the engines' last reports."""

    def __init__(
        self,
        loads: Callable[[], Iterable[tuple[str, str, LoadReport]]],
        held: Callable[[], Iterable[tuple[str, int]]],
        moves: Callable[[], Iterable[tuple[str, str, int]]],
        caches: Callable[[], Iterable[tuple[str, PrefixIndex, Mapping[str, Followed]]]],
    ) -> None:
        """`loads` yields (model, engine, report) of every engine with a session, `held` (model,
        requests that wait for an engine to come), `moves` (model, kind, count) as `Placer.counts`
        has them, `caches` each model's index and how the streams of its engines are followed."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineLoads(loads))
        self._registry.register(_Held(held))
        self._registry.register(_Moves(moves))
        self._registry.register(_Caches(caches))
        self._requests = Counter(
            "shoal_requests", "Requests by status.", ("model", "status"), registry=self._registry
        )
        self._stages = Histogram(
            "shoal_stage_seconds",
            "Seconds a request spends in each stage up to its first token; ttft is their sum.",
            ("model", "stage"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "shoal_tokens",
            "Tokens: prompt, completion, cached (found by the engine), cached_predicted; how many "
            "of those were not found (cached_missed), and were found beyond (cached_unforeseen).",
            ("model", "kind"),
            registry=self._registry,
        )
        self._decisions = Counter(
            "shoal_routing_decisions",
            "Requests by the reason for their engine.",
            ("model", "reason"),
            registry=self._registry,
        )

    def answered(self, model: str, status: int) -> None:
        self._requests.labels(model, str(status)).inc()

    def routed(self, model: str, decision: Decision) -> None:
        self._decisions.labels(model, decision.reason.value).inc()
        self._tokens.labels(model, "cached_predicted").inc(decision.chosen.cached_tokens)

    def ended(self, model: str, generation: Generation, decision: Decision) -> None:
        for stage, seconds in generation.times.stages():
            self._stages.labels(model, stage).observe(seconds)
        usage = generation.usage
        self._tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(model, "completion").inc(usage.completion_tokens)
        self._tokens.labels(model, "cached").inc(usage.cached_tokens)
        if generation.times.first_token_s:
            more = usage.cached_tokens - decision.chosen.cached_tokens
            self._tokens.labels(model, "cached_unforeseen").inc(max(0, more))
            self._tokens.labels(model, "cached_missed").inc(max(0, -more))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineLoads(Collector):
    """Gauges made from the reports when they are asked for: an engine that is gone leaves none."""

    def __init__(self, loads: Callable[[], Iterable[tuple[str, str, LoadReport]]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        fields: dict[str, str] = {
            "running": "Requests running.",
            "waiting": "Requests waiting.",
            "waiting_tokens": "Tokens yet to be prefilled.",
            "used_blocks": "KV blocks held by requests.",
            "num_blocks": "KV blocks in all.",
            "prefill_tokens_per_s": "Prefill rate over busy time.",
            "decode_tokens_per_s": "Decode rate over busy time.",
            "step_s": "Seconds of the last step.",
            "step_age_s": "Seconds since the running step began.",
            "preemptions": "Preemptions since the engine started.",
        }
        loads = list(self._loads())
        for name, text in fields.items():
            family = GaugeMetricFamily(f"shoal_engine_{name}", text, labels=("model", "engine"))
            for model, engine, report in loads:
                family.add_metric((model, engine), getattr(report, name))
            yield family


class _Held(Collector):
    """Requests that wait here because their model has no engine yet."""

    def __init__(self, held: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._held = held

    def collect(self) -> Iterator[Metric]:
        text = "Requests that wait for an engine of their model to be ready."
        family = GaugeMetricFamily("shoal_held_requests", text, labels=("model",))
        for model, count in self._held():
            family.add_metric((model,), count)
        yield family


class _Moves(Collector):
    """Streams that went on elsewhere, and requests that were given up for killing engines."""

    def __init__(self, moves: Callable[[], Iterable[tuple[str, str, int]]]) -> None:
        self._moves = moves

    def collect(self) -> Iterator[Metric]:
        text = "Streams resumed after a death, moved off a draining engine; requests condemned."
        family = CounterMetricFamily("shoal_failovers", text, labels=("model", "kind"))
        for model, kind, count in self._moves():
            family.add_metric((model, kind), count)
        yield family


class _Caches(Collector):
    """What is known here of the engines' caches, and how well."""

    def __init__(
        self, caches: Callable[[], Iterable[tuple[str, PrefixIndex, Mapping[str, Followed]]]]
    ) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        size = GaugeMetricFamily(
            "shoal_index_bytes", "Memory of the index of cached blocks.", labels=("model",)
        )
        rough = GaugeMetricFamily(
            "shoal_index_rough_engines",
            "Engines that the index knows by a Bloom filter only.",
            labels=("model",),
        )
        stale = GaugeMetricFamily(
            "shoal_index_staleness_seconds",
            "Since the index was last in step with an engine's cache.",
            labels=("model", "engine"),
        )
        stream = CounterMetricFamily(
            "shoal_index_stream",
            "Of an engine's cache events: gaps, replays, snapshots, digest mismatches, refreshes.",
            labels=("model", "engine", "kind"),
        )
        for model, index, engines in self._caches():
            size.add_metric((model,), index.num_bytes)
            rough.add_metric((model,), index.num_rough)
            for engine, followed in engines.items():
                stale.add_metric((model, engine), followed.staleness_s)
                for kind in fields(StreamCounts):
                    count = getattr(followed.counts, kind.name)
                    stream.add_metric((model, engine, kind.name), count)
        yield from (size, rough, stale, stream)
