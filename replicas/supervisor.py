"""The supervisor: one Serve replica that places one EngineCore, watches it, and drains it.

Invariant: only the supervisor restarts its core. Each core has a socket folder of its own, so that
a restarted one is a new address; what an ingress sees of it is the entry in the Registry. When the
restarts are used up, the health check fails and Serve replaces the replica.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.shoal import ModelConfig, PlacementConfig
from replicas.directory import EngineEntry, EngineState, ModelEntry
from replicas.engine_actor import EngineActor, EngineProgress, endpoint_in
from replicas.registry import find_registry
from replicas.restarts import RestartBudget, has_stalled

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 10.0
_SUPERVISOR_CPUS = 0.01
_ACCELERATOR_SHARE = 0.001
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


class CoreEnded(Exception):
    """The core is no more, or never came up; the text says why."""


class EngineSupervisor:
    """Serve constructs it; nothing calls it but Serve and `shoal status`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, on the loop that runs the rest
        self, model_json: str, socket_root: str
    ) -> None:
        self._model = ModelConfig.model_validate_json(model_json)
        self._socket_root = Path(socket_root)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._registry = await asyncio.to_thread(find_registry)
        supervision = self._model.supervision
        self._budget = RestartBudget(supervision.max_restarts, supervision.restart_window_s)
        self._entry = EngineEntry(
            self._replica_id,
            self._model.name,
            EngineState.LOADING,
            node=ray.get_runtime_context().get_node_id(),
        )
        self._core: Any = None
        self._folder: Path | None = None
        self._exhausted: str | None = None
        self._tasks = [
            asyncio.create_task(self._supervise()),
            asyncio.create_task(self._report_for_ever()),
        ]

    async def entry(self) -> EngineEntry:
        """What the Registry is told."""
        return self._entry

    async def stats(self) -> dict[str, Any]:
        """The core's own figures; empty while there is none."""
        return dict(await self._core.stats.remote()) if self._core is not None else {}

    def check_health(self) -> None:
        """Raises once the core has failed more often than it may."""
        if self._exhausted is not None:
            raise RuntimeError(self._exhausted)

    async def __del__(self) -> None:
        """Serve's one hook for an end in order: publish, wait for what runs, stop the core."""
        for task in self._tasks[:1]:
            task.cancel()
        if self._entry.state is EngineState.READY:
            await self._change(EngineState.DRAINING)
            await self._drain()
        self._tasks[-1].cancel()
        await self._stop_core()
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
            await self._change(EngineState.FAILED, reason, endpoint="", pid=0, last_error=reason)
            await self._stop_core()
            if not self._budget.take(time.monotonic()):
                self._exhausted = reason
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
            self._folder = Path(tempfile.mkdtemp(prefix="e", dir=self._socket_root))
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

    def _place(self, folder: Path) -> Any:
        placement = self._model.placement
        group = ray.util.get_current_placement_group()
        config = self._model.engine
        threads = config.threads or len(os.sched_getaffinity(0))
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
            .remote(config.model_copy(update={"threads": threads}).model_dump_json(), str(folder))
        )

    async def _await_ready(self, ended: "asyncio.Future[str]") -> None:
        supervision = self._model.supervision
        end_s = time.monotonic() + supervision.start_timeout_s
        while True:
            # Its process takes seconds to be there, and native code may keep it from answering.
            patience_s = max(supervision.stall_s, end_s - time.monotonic())
            progress: EngineProgress = await self._ask("progress", ended, patience_s)
            if progress.error is not None:
                raise CoreEnded(progress.error)
            phase = progress.phases[-1][0] if progress.phases else "process"
            if progress.is_ready:
                assert self._folder is not None
                endpoint = endpoint_in(self._folder)
                await self._change(EngineState.READY, "", endpoint=endpoint, pid=progress.pid)
                return
            await self._change(EngineState.LOADING, phase, pid=progress.pid)
            if time.monotonic() > end_s:
                raise CoreEnded(f"not ready after {supervision.start_timeout_s:g} s ({phase})")
            await asyncio.wait({ended}, timeout=supervision.poll_interval_s)

    async def _watch(self, ended: "asyncio.Future[str]") -> NoReturn:
        supervision = self._model.supervision
        while True:
            await asyncio.wait({ended}, timeout=supervision.poll_interval_s)
            stats = await self._ask("stats", ended, supervision.stall_s)
            if has_stalled(stats["step_age_s"], stats["step_s"], supervision.stall_s):
                reason = f"a step has run for {stats['step_age_s']:.0f} s"
                await self._change(EngineState.STALLED, reason)
                raise CoreEnded(f"stalled: {reason}")

    async def _ask(self, method: str, ended: "asyncio.Future[str]", timeout_s: float) -> Any:
        """Calls the core's actor. Raises `CoreEnded` if it is gone, or silent for `timeout_s`."""
        answer = asyncio.ensure_future(_call(self._core, method))
        await asyncio.wait({answer, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            answer.cancel()
            raise CoreEnded(ended.result())
        if not answer.done():
            answer.cancel()
            await self._change(EngineState.STALLED, "its process does not answer")
            raise CoreEnded(f"its process has not answered for {timeout_s:g} s")
        try:
            return answer.result()
        except ray.exceptions.RayError as error:
            raise CoreEnded(await ended) from error

    async def _drain(self) -> None:
        end_s = time.monotonic() + self._model.supervision.drain_timeout_s
        while time.monotonic() < end_s:
            with contextlib.suppress(Exception):
                stats = await self._core.stats.remote()
                if not stats["running"] and not stats["waiting"]:
                    return
            await asyncio.sleep(0.1)

    async def _stop_core(self) -> None:
        """Ends the core, in order if it can, and removes its sockets."""
        core, self._core = self._core, None
        if core is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_stop(core), _STOP_TIMEOUT_S)
            with contextlib.suppress(Exception):
                ray.kill(core)
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


def engine_application(model: ModelConfig, socket_root: Path) -> Any:
    """The Serve application of one model: `model.replicas` supervisors, each with its core.

    Its arguments hold what identifies the engine; the number of replicas is Serve's own."""
    supervision = model.supervision
    deployment: Any = serve.deployment(
        name="Supervisor",
        num_replicas=model.replicas,
        ray_actor_options={"num_cpus": _SUPERVISOR_CPUS},
        placement_group_bundles=_bundles(model.placement),
        placement_group_strategy="STRICT_PACK",
        **_node_selector(model.placement),
        max_ongoing_requests=100,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=supervision.drain_timeout_s + 2 * _STOP_TIMEOUT_S,
    )(EngineSupervisor)
    return deployment.bind(model.model_dump_json(exclude={"replicas"}), str(socket_root))


def _bundles(placement: PlacementConfig) -> list[dict[str, float]]:
    engine = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
    if placement.accelerator_type is not None:
        # Ray's own way to ask for a kind: every node that has it offers one of this resource.
        engine[f"accelerator_type:{placement.accelerator_type}"] = _ACCELERATOR_SHARE
    return [
        {"CPU": _SUPERVISOR_CPUS},
        {kind: amount for kind, amount in engine.items() if amount > 0},
    ]


def _node_selector(placement: PlacementConfig) -> dict[str, Any]:
    """Labels that the engine's node must carry; its supervisor is packed beside it."""
    if not placement.node_labels:
        return {}
    return {"placement_group_bundle_label_selector": [{}, dict(placement.node_labels)]}
