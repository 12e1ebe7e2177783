"""Runs steps on a model that is shared out over processes: tensor parallelism.

Invariant: every rank executes the same plans in the same order and draws the same tokens; a result
is given only once all have said so. The first rank that fails, ends or draws otherwise costs the
engine: nothing can be computed without it, and what it holds of the KV is held by nobody else.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from configs.engine import EngineConfig
from engine.errors import RankLost
from engine.executors.messages import Connect, Done, Execute, Loaded, Ready, drawn_digest
from engine.executors.worker_group import WorkerGroup
from engine.plan import ExecutorInfo, StepPlan, StepResult
from engine.worker_launcher import LocalWorkerLauncher, WorkerLauncher

if TYPE_CHECKING:
    from engine.collectives import Collectives
    from engine.executors.model import ModelExecutor


class ParallelExecutor:
    """`engine.plan.Executor` over several ranks, of which this process is the first."""

    def __init__(
        self, executor: "ModelExecutor", workers: WorkerGroup, collectives: "Collectives"
    ) -> None:
        self._executor = executor
        self._workers = workers
        self._collectives = collectives

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda message: None,
        launcher: WorkerLauncher | None = None,
    ) -> Self:
        """Loads what `config` names on all ranks at once. Raises `ModelRefused`,
        `ConfigurationError`, or `RankLost` with the reason of another rank."""
        count = config.tensor_parallel_size
        workers = WorkerGroup.start(config, launcher or LocalWorkerLauncher())

        def meet() -> None:
            progress(f"the weights of {count} ranks")
            workers.receive(Loaded)
            workers.send(Connect())

        try:
            # While the workers start: torch takes seconds.
            from engine.collectives import TorchCollectives
            from engine.executors.model import ModelExecutor
            from engine.models.sharding import Shard

            collectives = TorchCollectives(Shard(0, count), workers.folder, meet)
            try:
                executor = ModelExecutor.load(config, progress, collectives=collectives)
                _check_equal(executor.info, workers.receive(Ready))
            except RuntimeError as error:
                # Of a connection that broke, the other end knows why.
                if (lost := workers.reason()) is not None:
                    raise lost from error
                raise
        except BaseException:
            workers.stop()
            raise
        return cls(executor, workers, collectives)

    @property
    def info(self) -> ExecutorInfo:
        """Rank 0's: bytes are of one rank."""
        return self._executor.info

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on all ranks; see `engine.plan.Executor`. Raises `RankLost`, or what rank 0
        failed by."""
        self._workers.send(Execute(plan))
        try:
            result = self._executor.execute(plan)
        except RuntimeError as error:
            if (lost := self._workers.reason()) is not None:
                raise lost from error
            raise
        digest = drawn_digest(result)
        for rank, done in enumerate(self._workers.receive(Done), start=1):
            if (done.step, done.digest) != (plan.step, digest):
                raise RankLost(f"rank {rank} drew other tokens than rank 0 in step {plan.step}")
        return result

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """See `engine.plan.Executor`. If the engine has not called `close` a few seconds after
        `on_lost`, the process is ended."""

        def lose(error: RankLost) -> None:
            self._collectives.abort()
            on_lost(error)

        self._workers.watch(lose)

    def slot_memory(self, slot: int) -> memoryview:
        raise NotImplementedError("every rank has its own part of a slot")

    def close(self) -> None:
        self._workers.stop()
        self._executor.close()


def _check_equal(info: ExecutorInfo, others: list[Ready]) -> None:
    own = info.num_blocks, info.num_slots
    for rank, other in enumerate(others, start=1):
        if own != (other.num_blocks, other.num_slots):
            raise RankLost(
                f"rank 0 has {own[0]} KV blocks and {own[1]} slots of host memory, and rank {rank} "
                f"{other.num_blocks} and {other.num_slots}"
            )
