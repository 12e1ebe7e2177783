"""Ranks live and die together: whichever process ends, the others end, and somebody is told why."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.core import EngineCore
from engine.errors import EngineLost, ModelRefused, RankLost
from engine.executors.parallel import ParallelExecutor
from engine.launcher import LocalEngine
from engine.wire import SamplingParams
from tests.engine.ranks import Launcher, children, config_of, folder_of, is_gone
from tests.engine.rig import wait_until
from tests.engine.wire_rig import with_client
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(180)

END_S = 5.0
"""Within it all processes of an engine are gone."""


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine.start(config_of(tiny_model("llama"))) as engine:
        yield engine


def test_a_killed_worker_ends_the_engine_and_its_clients_are_told(engine: LocalEngine) -> None:
    (worker,) = children(engine.pid)
    folder = folder_of(worker)

    async def use(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        stream = await client.add(EngineRequest([5, 6, 7], params))
        await anext(stream)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineLost):
            async for _ in stream:
                pass

    began_s = time.monotonic()
    with_client(engine, use)
    wait_until(lambda: not engine.alive(), END_S)
    assert time.monotonic() - began_s < END_S
    assert engine._process.returncode == 1
    assert is_gone(worker)
    assert not folder.exists()


def test_a_worker_that_is_killed_between_two_steps_is_noticed_too() -> None:
    launcher = Launcher()
    config = config_of(tiny_model("llama"))
    core = EngineCore(config, ParallelExecutor.load(config, launcher=launcher))
    killer = threading.Timer(0.3, os.kill, (launcher.worker.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(RankLost, match="rank 1: its process ended with code -9"):
        core.run()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_end_with_their_engine(engine: LocalEngine, number: int) -> None:
    (worker,) = children(engine.pid)
    folder = folder_of(worker)
    assert folder.stat().st_mode & 0o777 == 0o700
    os.kill(engine.pid, number)
    wait_until(lambda: not engine.alive() and is_gone(worker), END_S)
    wait_until(lambda: not folder.exists(), END_S)
    assert engine._process.returncode == (-number if number == signal.SIGKILL else 0)


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (Launcher(model="/no/such/model"), "rank 1: .*/no/such/model"),
        (Launcher(kill=True), "rank 1: its process ended with code -9"),
    ],
)
def test_a_rank_that_cannot_load_says_why(launcher: Launcher, reason: str) -> None:
    with pytest.raises(RankLost, match=reason):
        ParallelExecutor.load(config_of(tiny_model("llama")), launcher=launcher)
    assert is_gone(launcher.worker.pid)


def test_a_model_that_cannot_be_shared_out_leaves_no_worker() -> None:
    launcher = Launcher()
    with pytest.raises(ModelRefused, match="does not divide the model's 4 attention heads"):
        ParallelExecutor.load(
            config_of(tiny_model("llama"), tensor_parallel_size=3), launcher=launcher
        )
    assert is_gone(launcher.worker.pid)
