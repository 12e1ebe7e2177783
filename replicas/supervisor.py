"""The supervisor: one Serve replica that places one EngineCore, watches it, and drains it.

Invariant: only the supervisor restarts its core. Each core has sockets of its own, so that a
restarted one is a new address; what an ingress sees of it is the entry in the Registry. When the
restarts are used up, the health check fails and Serve replaces the replica. What may change live
comes by Serve's `reconfigure` and restarts nothing.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from typing import Any, NoReturn

import msgspec
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.shoal import ModelConfig, RegistryConfig
from configs.tree import joined
from replicas.directory import EngineEntry, EngineState, ModelEntry
from replicas.engine_actor import EngineActor, EngineProgress
from replicas.load_window import LoadWindow
from replicas.metrics import EngineGauges
from replicas.registry import ensure_registry
from replicas.restarts import RestartBudget, StallWatch

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 10.0
_TELL_TIMEOUT_S = 5.0
_DRAIN_POLL_S = 0.05
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


class CoreEnded(Exception):
    """The core is no more, or never came up; the text says why."""


class EngineSupervisor:
    """Nothing calls it but Serve."""

    def __init__(self, identity: dict[str, Any], registry_json: str, socket_root: str | None):
        """`identity`: what of a `ModelConfig` takes new processes to change. Sockets are made in
        folders below `socket_root`, which only this user may enter; without one engines listen on
        their node's address. The work begins with the first `reconfigure`."""
        self._identity = identity
        self._registry_config = RegistryConfig.model_validate_json(registry_json)
        self._socket_root = socket_root
        self._model = joined(identity, {})
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._registry: Any = None
        self._budget = RestartBudget()
        self._entry = EngineEntry(
            self._replica_id,
            self._model.name,
            EngineState.LOADING,
            source=self._model.engine.model,
            node=ray.get_runtime_context().get_node_id(),
        )
        self._window = LoadWindow()
        self._gauges = EngineGauges(self._model.name, self._replica_id)
        self._core: Any = None
        self._folder: str | None = None
        self._exhausted: str | None = None
        self._settled = asyncio.Event()
        """Once a core has been ready, or none will be."""
        self._supervising: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Takes over what may change while the engine runs. The first time it returns when the
        engine is ready, and raises if it cannot start: until then Serve counts the replica as
        starting, and replaces no other one."""
        former, self._model = self._model, joined(self._identity, live)
        if self._supervising is None:
            config = self._registry_config
            self._registry = await asyncio.to_thread(ensure_registry, config.lease_s, config.path)
            self._supervising = asyncio.create_task(self._supervise())
            self._reporting = asyncio.create_task(self._report_for_ever())
            await self._settled.wait()
            self.check_health()
        elif self._core is not None and former.engine.scheduler != self._model.engine.scheduler:
            scheduler = self._model.engine.scheduler.model_dump_json()
            # A core that is gone, or hangs, is followed by one that is told when it starts.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_call(self._core, "configure", scheduler), _TELL_TIMEOUT_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks twice a second, and hands it to the policy."""
        thresholds = self._model.autoscaling.model_dump(exclude={"max_replicas"})
        return {**self._window.signals(), **thresholds}

    def check_health(self) -> None:
        """Raises once the core has failed more often than it may."""
        if self._exhausted is not None:
            raise RuntimeError(self._exhausted)

    async def __del__(self) -> None:
        """Serve's one hook for an end in order: publish, wait for what runs, stop the core."""
        if self._supervising is None or self._reporting is None:
            return
        self._supervising.cancel()
        if self._entry.state is EngineState.READY:
            await self._change(EngineState.DRAINING)
            await self._drain()
        self._reporting.cancel()
        await self._stop_core()
        self._gauges.clear()
        with contextlib.suppress(Exception):
            await self._registry.withdraw.remote(self._replica_id)

    # ------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        """Runs one core after another, for as long as the restart budget lasts. One that has
        served is followed at once, one that could not start after a pause."""
        pause_s = _FIRST_PAUSE_S
        while True:
            reason = await self._run_core()
            has_served = self._entry.state is not EngineState.LOADING
            logger.error("engine of %s: %s", self._model.name, reason)
            if self._entry.state is EngineState.STALLED and self._entry.pid:
                # It hears nothing, Ray's own kill included. It is on this node: STRICT_PACK.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._entry.pid, signal.SIGKILL)
            supervision = self._model.supervision
            can_restart = self._budget.take(
                time.monotonic(), supervision.max_restarts, supervision.restart_window_s
            )
            # One that comes back at once has not failed to those who wait for it.
            state = EngineState.LOADING if can_restart and has_served else EngineState.FAILED
            has_stalled = self._entry.state is EngineState.STALLED
            await self._change(
                state, reason, endpoint="", pid=0, last_error=reason, was_stalled=has_stalled
            )
            await self._stop_core()
            if not can_restart:
                self._exhausted = reason
                self._settled.set()
                return
            if has_served:
                pause_s = _FIRST_PAUSE_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            await self._change(EngineState.LOADING, restarts=self._entry.restarts + 1)

    async def _run_core(self) -> str:
        """Starts a core and watches it until it ends: why."""
        try:
            if self._socket_root is not None:
                self._folder = tempfile.mkdtemp(prefix="e", dir=self._socket_root)
            self._core = self._place(self._folder)
            ended = asyncio.ensure_future(_ended(self._core))
            try:
                await self._await_ready(ended)
                await self._watch(ended)
            finally:
                ended.cancel()
        except CoreEnded as error:
            return str(error)
        except Exception as error:
            logger.exception("supervision of %s failed", self._model.name)
            return f"{type(error).__name__}: {error}"

    def _place(self, folder: str | None) -> Any:
        placement = self._model.placement
        group = ray.util.get_current_placement_group()
        config = self._model.engine
        threads = config.threads or max(1, int(placement.num_cpus))
        return (
            ray.remote(EngineActor)
            .options(
                num_cpus=placement.num_cpus,
                num_gpus=placement.num_gpus,
                max_restarts=0,
                max_concurrency=64,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=1
                ),
            )
            .remote(config.model_copy(update={"threads": threads}).model_dump_json(), folder)
        )

    async def _await_ready(self, ended: "asyncio.Future[str]") -> None:
        began_s = time.monotonic()
        while True:
            supervision = self._model.supervision
            end_s = began_s + supervision.start_timeout_s
            # Its process takes seconds to be there, and native code may keep it from answering.
            patience_s = max(supervision.stall_s, end_s - time.monotonic())
            progress: EngineProgress = await self._ask("progress", ended, patience_s)
            if progress.error is not None:
                raise CoreEnded(progress.error)
            phase = progress.phases[-1][0] if progress.phases else "process"
            if progress.endpoint:
                await self._change(
                    EngineState.READY,
                    endpoint=progress.endpoint,
                    pid=progress.pid,
                    was_stalled=False,
                )
                self._settled.set()
                return
            await self._change(EngineState.LOADING, phase, pid=progress.pid)
            if time.monotonic() > end_s:
                raise CoreEnded(f"not ready after {supervision.start_timeout_s:g} s ({phase})")
            await asyncio.wait({ended}, timeout=supervision.poll_interval_s)

    async def _watch(self, ended: "asyncio.Future[str]") -> NoReturn:
        watch = StallWatch()
        while True:
            supervision = self._model.supervision
            await asyncio.wait({ended}, timeout=supervision.poll_interval_s)
            stats = await self._ask("stats", ended, supervision.stall_s)
            self._window.add(time.monotonic(), stats)
            self._gauges.set(self._window.signals(), stats)
            reason = watch.look(time.monotonic(), stats, supervision.stall_s)
            if reason:
                await self._eject(reason)
            elif self._entry.state is EngineState.STALLED:
                await self._change(EngineState.READY)

    async def _eject(self, reason: str) -> None:
        """Says that the core has stalled, and raises `CoreEnded` unless too many have: then it may
        yet come back."""
        await self._change(EngineState.STALLED, reason)
        # One that nobody can be asked about goes.
        may_eject = True
        with contextlib.suppress(Exception):
            asked = _call(self._registry, "may_eject", self._replica_id)
            may_eject = await asyncio.wait_for(asked, _REPORT_INTERVAL_S)
        if may_eject:
            raise CoreEnded(f"stalled: {reason}")

    async def _ask(self, method: str, ended: "asyncio.Future[str]", timeout_s: float) -> Any:
        """Calls the core's actor. Raises `CoreEnded` if it is gone, or silent for `timeout_s`."""
        answer = asyncio.ensure_future(_call(self._core, method))
        try:
            while not answer.done():
                await asyncio.wait(
                    {answer, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if ended.done():
                    raise CoreEnded(ended.result())
                if not answer.done():
                    await self._eject(f"its process has not answered for {timeout_s:g} s")
        finally:
            answer.cancel()  # Harmless when it is there.
        try:
            return answer.result()
        except ray.exceptions.RayError as error:
            raise CoreEnded(await ended) from error

    async def _drain(self) -> None:
        """Until the core has nothing left; from its `is_draining` on it takes nothing new."""
        began_s = time.monotonic()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_call(self._core, "drain"), _TELL_TIMEOUT_S)
        while time.monotonic() < began_s + self._model.supervision.drain_timeout_s:
            with contextlib.suppress(Exception):
                stats = await asyncio.wait_for(_call(self._core, "stats"), _TELL_TIMEOUT_S)
                if stats["is_draining"] and not stats["running"] and not stats["waiting"]:
                    return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _stop_core(self) -> None:
        """Ends the core, in order if it can, and removes its sockets."""
        core, self._core = self._core, None
        if core is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_stop(core), _STOP_TIMEOUT_S)
            with contextlib.suppress(Exception):
                ray.kill(core)
        self._window.reset()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ------------------------------------------------------------ telling

    async def _change(self, state: EngineState, detail: str = "", **changes: Any) -> None:
        changed = msgspec.structs.replace(self._entry, state=state, detail=detail, **changes)
        if changed != self._entry:
            self._entry = changed
            await self._report()

    async def _report_for_ever(self) -> None:
        while True:
            await self._report()
            await asyncio.sleep(_REPORT_INTERVAL_S)

    async def _report(self) -> None:
        # A Registry that is down is told again a second later.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(
                _call(self._registry, "report", self._entry, model_entry(self._model)),
                _REPORT_INTERVAL_S,
            )


async def _call(actor: Any, method: str, *args: Any) -> Any:
    return await getattr(actor, method).remote(*args)


async def _ended(core: Any) -> str:
    """Until the core has ended: why."""
    try:
        await core.wait.remote()
    except ray.exceptions.RayActorError:
        return "its process died"
    except Exception as error:
        return str(getattr(error, "cause", None) or error)
    return "it stopped"


async def _stop(core: Any) -> None:
    await core.stop.remote()
    await core.wait.remote()


def model_entry(model: ModelConfig) -> ModelEntry:
    """What ingresses are told of a model."""
    return ModelEntry(model.name, model.engine.model, tuple(model.aliases))
