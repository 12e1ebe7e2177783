"""Prefixes on a real disk, through engines that come and go."""

import os
import signal
from pathlib import Path

import pytest

from configs.engine import CacheConfig, EngineConfig
from configs.secret import write_secret
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.errors import ConfigurationError
from engine.launcher import EngineStartError, LocalEngine
from engine.wire import SamplingParams
from tests.engine.rig import reference_output, running_engine, simulated_config, wait_until
from tests.engine.wire_rig import with_client

PROMPT = list(range(1, 200))
PARAMS = SamplingParams(max_tokens=8, seed=1)


@pytest.fixture
def config(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    write_secret(tmp_path / "secret")
    cache = CacheConfig(
        block_size=4,
        num_blocks=128,
        host_memory_bytes=256 * 4 * 1024,
        disk_path=str(tmp_path / "kv"),
        disk_bytes=8 << 20,
    )
    changes = {"cache": cache, "cluster_secret_file": str(tmp_path / "secret")}
    folder = tmp_path_factory.mktemp("e")
    sockets = {"listen": f"ipc://{folder}/r", "listen_stream": f"ipc://{folder}/s"}
    return simulated_config(**sockets).model_copy(update=changes)


async def ask(client: EngineClient, config: EngineConfig, prompt: list[int]) -> int:
    """Returns how many of the prompt's tokens were found."""
    items = [item async for item in await client.add(EngineRequest(prompt, PARAMS))]
    output = [token_id for item in items for token_id in item.token_ids]
    assert output == reference_output(prompt, PARAMS, config.simulation)
    return items[-1].cached_tokens


def found(config: EngineConfig, prompt: list[int] = PROMPT) -> int:
    """What an engine of its own finds of a prompt."""
    counts = []

    async def use(client: EngineClient) -> None:
        counts.append(await ask(client, config, prompt))

    with running_engine(config) as core:
        with_client(core, use)
        wait_until(lambda: core.stats()["disk_blocks"] >= 49)
    return counts[0]


def files(config: EngineConfig) -> list[Path]:
    root = Path(str(config.cache.disk_path))
    return sorted(path for path in root.rglob("*") if len(path.name) == 32)


def test_a_restarted_engine_finds_what_the_last_one_computed(config: EngineConfig) -> None:
    assert found(config) == 0
    assert found(config) == 196
    assert found(config, [9, *PROMPT[1:]]) == 0


def test_files_that_are_damaged_are_computed_again(config: EngineConfig) -> None:
    found(config)
    for path in files(config)[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert found(config) < 196
    assert found(config) == 196


def test_another_secret_finds_nothing(config: EngineConfig, tmp_path: Path) -> None:
    found(config)
    write_secret(tmp_path / "other")
    other = config.model_copy(update={"cluster_secret_file": str(tmp_path / "other")})
    assert found(other) == 0


def test_a_killed_engine_leaves_what_it_has_written(config: EngineConfig) -> None:
    counts = []

    async def use(client: EngineClient) -> None:
        counts.append(await ask(client, config, PROMPT))

    for _ in range(2):
        with LocalEngine.start(config) as engine:
            with_client(engine, use)
            wait_until(lambda: len(files(config)) >= 49)
            os.kill(engine.pid, signal.SIGKILL)
    assert counts == [0, 196]


def test_without_a_secret_that_lasts_a_disk_is_refused(config: EngineConfig) -> None:
    with pytest.raises(EngineStartError, match=r"cache.disk_path needs cluster_secret_file"):
        LocalEngine.start(config.model_copy(update={"cluster_secret_file": None}))


def test_a_folder_that_cannot_be_made_is_named(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = config.cache.model_copy(update={"disk_path": str(tmp_path / "file" / "kv")})
    with (
        pytest.raises(ConfigurationError, match=r"cache.disk_path: .*/file/kv"),
        running_engine(config.model_copy(update={"cache": cache})),
    ):
        pass
