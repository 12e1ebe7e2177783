"""An EngineCore as a process: configuration in on stdin, progress out on stdout.

Invariant: the process ends when its stdin closes (its parent has ended), on SIGTERM, or when its
executor is lost, and for no other reason. stdout carries one JSON object a line: `{"phase": text}`
while it loads, then `{"endpoint": address}`, or `{"error": text}`.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from configs.engine import EngineConfig
from engine.core import EngineCore
from engine.errors import ShoalError
from engine.plan import Executor

_EXIT_GRACE_S = 10.0


def load_executor(config: EngineConfig, progress: Callable[[str], None]) -> Executor:
    """The executor that the configuration names. Raises `ModelRefused` or `ConfigurationError`."""
    if config.executor == "simulated":
        from engine.executors.simulated import SimulatedExecutor

        return SimulatedExecutor(config)
    progress("torch")
    if config.tensor_parallel_size > 1:
        from engine.executors.parallel import ParallelExecutor

        return ParallelExecutor.load(config, progress)
    from engine.executors.model import ModelExecutor

    return ModelExecutor.load(config, progress)


def build_core(config: EngineConfig, progress: Callable[[str], None]) -> EngineCore:
    """Loads the executor and binds the sockets; `progress` is told of each phase as it begins."""
    executor = load_executor(config, progress)
    try:
        core = EngineCore(config, executor)
    except BaseException:
        executor.close()
        raise
    # A collection need not walk what stays for ever: it would stand between two steps.
    gc.collect()
    gc.freeze()
    return core


def main() -> int:
    """Runs one engine; the exit code is 0 after an orderly stop."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    line = sys.stdin.readline()
    stop_requested = threading.Event()
    cores: list[EngineCore] = []

    def stop(*_: object) -> None:
        stop_requested.set()
        for core in cores:
            core.stop()

    def on_sigterm(*_: object) -> None:
        stop()
        if not cores:  # It loads, which may take minutes and serves nobody any more.
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
    try:
        config = EngineConfig.model_validate_json(line)
        core = build_core(config, lambda phase: _say(phase=phase))
    except (ShoalError, ValueError, OSError) as error:
        _say(error=str(error))
        return 1
    cores.append(core)
    if not stop_requested.is_set():
        _say(endpoint=core.endpoint)
        core.run()
    return 0


def _say(**event: str) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _watch_parent(stop: Callable[[], None]) -> None:
    """Blocks until the parent's end of stdin closes; then stops, by force if need be."""
    while sys.stdin.read(4096):
        pass
    stop()
    threading.Event().wait(_EXIT_GRACE_S)
    os._exit(1)
