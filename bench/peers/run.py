"""Every engine in every round: started, measured, stopped, before the next one starts.

Invariant: at any time at most one engine runs. All of them get the same token ids, which differ
from round to round; which engine goes first moves on with each round.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.figures import Progress
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.report import OTHERS, Round
from bench.peers.session import Engine, Shoal
from bench.peers.setup import (
    LLAMA_CPP,
    VLLM,
    PeerMissing,
    install,
    llama_binaries,
    llama_model,
)
from bench.peers.vllm import Vllm
from bench.workload import load_workload
from engine.models.resolve import DEFAULT_MODEL, resolve_model
from engine.models.support import load_config

_LISTEN_S = 2.0


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine in the run."""

    engine: Engine
    only_ready: bool = False
    """Its start is all that is asked of it."""


@dataclass(slots=True)
class Outcome:
    """What a run gave, also one that was not finished."""

    rounds: list[Round] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Why an engine was not measured, or not to the end."""


def set_up(root: Path, threads: int, outcome: Outcome, progress: Progress) -> list[Entry]:
    """Shoal and the peers that can be installed; those that cannot are noted as missing."""
    folder = resolve_model(DEFAULT_MODEL, progress)
    entries = [Entry(Shoal(threads))]
    try:
        environment = install(VLLM, root, progress)
        for number, kind in enumerate(({}, {"has_all_cores": True}, {"is_eager": True})):
            log = root / f"vllm-{number}.log"
            engine = Vllm(environment, folder, threads, log, **kind)
            entries.append(Entry(engine, only_ready=engine.is_eager))
    except PeerMissing as reason:
        names = ("vllm", "vllm_all_cores", "vllm_eager")
        outcome.missing |= dict.fromkeys(names, str(reason))
    try:
        binaries = llama_binaries(install(LLAMA_CPP, root, progress))
        model = llama_model(binaries, root, progress)
        entries.append(Entry(LlamaCpp(binaries, model, threads, root / "llamacpp.log")))
    except PeerMissing as reason:
        outcome.missing["llamacpp"] = str(reason)
    for entry in entries:
        pairs = (f"{name}={value}" for name, value in entry.engine.flags.items())
        outcome.flags[entry.engine.name] = " ".join(pairs)
    return entries


def measure_round(
    entries: Sequence[Entry], number: int, vocab_size: int, outcome: Outcome, progress: Progress
) -> None:
    """Adds a round to `outcome`. A peer that fails is left out from then on; Shoal itself raises
    `ShoalError`."""
    first = (number - 1) % len(entries)
    figures: dict[str, dict[str, float]] = {}
    for entry in (*entries[first:], *entries[:first]):
        name = entry.engine.name
        if name in outcome.missing:
            continue
        try:
            figures[name] = _measure(entry, number, vocab_size, progress)
        except PeerMissing as reason:
            outcome.missing[name] = str(reason)
            progress(f"{name} is left out: {reason}")
    outcome.rounds.append(figures)


def vocabulary() -> int:
    """Of the default model."""
    return int(load_config(resolve_model(DEFAULT_MODEL)).vocab_size)


def other_cores(seconds: float) -> float:
    """Cores that the whole machine is busy on while this process waits: what would slow one engine
    down and not the next."""
    before, began_s = _busy_s(), time.perf_counter()
    time.sleep(seconds)
    return (_busy_s() - before) / (time.perf_counter() - began_s)


def _busy_s() -> float:
    """CPU seconds of all programs, and those that a hypervisor took (`man 5 proc_stat`)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _measure(entry: Entry, number: int, vocab_size: int, progress: Progress) -> dict[str, float]:
    """One engine, from its start to its end."""

    def say(what: str) -> None:
        progress(f"round {number}: {entry.engine.name}: {what}")

    w1, w2, w3 = (load_workload(name) for name in ("w1", "w2", "w3"))
    warm_up = w1.prompts(vocab_size, round_number=0)
    others = other_cores(_LISTEN_S)
    say(f"start, while other programs take {others:.2f} cores")
    began_s = time.perf_counter()
    with entry.engine.open() as session:
        session.generate(warm_up, 1)
        figures = {"ready_s": time.perf_counter() - began_s, OTHERS: others}
        if entry.only_ready:
            return figures
        session.generate(warm_up, w1.output_tokens)
        say("w1")
        seconds = session.generate(w1.prompts(vocab_size, number), w1.output_tokens)
        figures["w1_tokens_per_s"] = w1.output_tokens / seconds
        say("w2")
        seconds = session.generate(w2.prompts(vocab_size, number), w2.output_tokens)
        figures["w2_prefill_tokens_per_s"] = w2.num_requests * w2.own_tokens / seconds
        for temperature in ("cold", "warm"):
            say(f"w3 {temperature}")
            seconds = session.generate(w3.prompts(vocab_size, number), w3.output_tokens)
            tokens = w3.num_requests * w3.output_tokens
            figures[f"w3_{temperature}_output_tokens_per_s"] = tokens / seconds
        say("stop")
    return figures
