"""The parts of `shoal bench cluster`, in order, as flat figures.

Invariant: two policies are compared on the same requests at the same times; a ratio is better the
higher it is, a loss the lower.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

from bench.cluster.shape import PUBLISHED, QUARTER, Shape
from bench.cluster.simulation import NETWORK_S, Simulation, Stage
from bench.cluster.sockets import measure_sockets
from bench.figures import Figures, Progress

POLICIES = ("prefix", "least_backlog", "round_robin", "power_of_two")
_UNSHARED = replace(
    PUBLISHED,
    num_groups=4096,
    num_users=1,
    shared_tokens=0,
    own_tokens=2000,
    output_tokens=300,
    asks_anew=True,
)
"""Nothing to find in a cache."""
_HOT = replace(
    PUBLISHED, num_groups=1, num_users=4096, own_tokens=300, output_tokens=300, asks_anew=True
)
"""One prefix for all."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rates that one cluster is given one after the other, after a stage that warms it."""

    shape: Shape
    policy: str
    rates: tuple[float, ...]
    num_requests: int
    num_ingresses: int = 1
    warm_rate: float = 15.0

    def climb(self) -> list[Stage]:
        simulation = Simulation(self.shape, self.policy, self.num_ingresses)
        simulation.stage(self.warm_rate, self.num_requests)
        return [simulation.stage(rate, self.num_requests) for rate in self.rates]


def bench_cluster(quick: bool, progress: Progress) -> Figures:
    shape = QUARTER if quick else PUBLISHED
    rates = (3, 120) if quick else (3, 10, 20, 30, 40, 50, 60)
    num_requests = shape.num_groups * shape.num_users
    figures: Figures = {"benchmark": "cluster", "network_s": NETWORK_S, "requests": num_requests}
    figures |= {key: value for key, value in asdict(shape).items() if key != "asks_anew"}
    figures["cached_set_pct"] = round(shape.cached_pct(), 1)
    progress(f"{len(POLICIES)} policies at {len(rates)} rates (simulated clock)")
    ladders = [Ladder(shape, policy, rates, num_requests) for policy in POLICIES]
    stages = dict(zip(POLICIES, _climb(ladders), strict=True))
    figures |= _compare(stages, rates)
    progress("several ingresses")
    figures |= _ingresses(replace(ladders[0], rates=(rates[len(rates) // 2],)), quick)
    if not quick:
        progress("new questions, nothing shared, and one prefix for all")
        figures |= _others()
    progress("over real sockets")
    sockets = measure_sockets(quick, progress)
    return figures | {key: round(value, 3) for key, value in sockets.items()}


def _climb(ladders: Sequence[Ladder]) -> list[list[Stage]]:
    """One process a core: a ladder is plain Python."""
    num_workers = min(len(ladders), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        return list(pool.map(Ladder.climb, ladders))


def _compare(stages: dict[str, list[Stage]], rates: Sequence[float]) -> Figures:
    ours = stages["prefix"]
    figures: dict[str, float] = {}
    for other in ("round_robin", "least_backlog"):
        top, low = stages[other][-1], ours[-1]
        figures[f"throughput_ratio_vs_{other}"] = low.tokens_per_s / top.tokens_per_s
        ratio = top.ttft_percentile_s(90) / low.ttft_percentile_s(90)
        figures[f"ttft_p90_ratio_vs_{other}"] = ratio
    others = [stages[policy][0] for policy in POLICIES if policy != "prefix"]
    figures["low_load_loss_pct"] = _loss_pct(
        ours[0].mean_ttft_s, min(stage.mean_ttft_s for stage in others)
    )
    for policy, each in stages.items():
        for rate, stage in zip(rates, each, strict=True):
            name = f"{policy}_{rate:g}"
            figures[f"output_tokens_per_s_{name}"] = stage.tokens_per_s
            figures[f"ttft_s_p50_{name}"] = stage.ttft_percentile_s(50)
            figures[f"ttft_s_p90_{name}"] = stage.ttft_percentile_s(90)
            figures[f"hit_rate_{name}"] = stage.hit_rate
    return {key: round(value, 3) for key, value in figures.items()}


def _ingresses(ladder: Ladder, quick: bool) -> Figures:
    """The same traffic through several: how far hit rate and balance are from those through one."""
    counts = (1, 2) if quick else (1, 2, 4)
    ladders = [replace(ladder, num_ingresses=count) for count in counts]
    stages = [climbed[-1] for climbed in _climb(ladders)]
    figures: dict[str, float] = {}
    for count, stage in zip(counts, stages, strict=True):
        figures[f"hit_rate_ingresses_{count}"] = stage.hit_rate
        figures[f"balance_ingresses_{count}"] = stage.balance
        figures[f"ttft_s_p90_ingresses_{count}"] = stage.ttft_percentile_s(90)
    figures["hit_rate_spread_pct"] = _spread_pct([stage.hit_rate for stage in stages])
    figures["balance_spread_pct"] = _spread_pct([stage.balance for stage in stages])
    return {key: round(value, 3) for key, value in figures.items()}


def _others() -> Figures:
    """Shapes that the published one says nothing of, each against a policy that suits it."""
    cases = [
        ("new_questions", replace(PUBLISHED, asks_anew=True), 30.0, "round_robin"),
        ("nothing_shared_low", _UNSHARED, 5.0, "least_backlog"),
        ("nothing_shared_high", _UNSHARED, 20.0, "least_backlog"),
        ("one_prefix", _HOT, 60.0, "least_backlog"),
    ]
    ladders = [
        Ladder(shape, policy, (rate,), 750, warm_rate=rate)
        for _, shape, rate, other in cases
        for policy in ("prefix", other)
    ]
    stages = iter(climbed[-1] for climbed in _climb(ladders))
    figures: dict[str, float] = {}
    for name, _, _, other in cases:
        ours, theirs = next(stages), next(stages)
        ratio = ours.tokens_per_s / theirs.tokens_per_s
        figures[f"{name}_throughput_ratio_vs_{other}"] = ratio
        loss_pct = _loss_pct(ours.mean_ttft_s, theirs.mean_ttft_s)
        figures[f"{name}_mean_ttft_loss_pct_vs_{other}"] = loss_pct
    return {key: round(value, 3) for key, value in figures.items()}


def _loss_pct(ours_s: float, theirs_s: float) -> float:
    return 100 * (ours_s / theirs_s - 1)


def _spread_pct(values: Sequence[float]) -> float:
    """The furthest from the first."""
    return max(100 * abs(value / values[0] - 1) for value in values)
