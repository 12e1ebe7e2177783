"""An ingress and engines on the network: its own secret opens a session, another does not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cluster.identity import IngressIdentity
from cluster.routing.router import Router
from cluster.session import EngineSession
from configs.secret import read_secret, write_secret
from configs.shoal import RouterConfig
from engine.core import EngineCore
from replicas.directory import EngineEntry, EngineState
from tests.engine.rig import running_engine, simulated_config


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[EngineCore, bytes]]:
    """An engine on the network, and its cluster's secret."""
    path = tmp_path / "secret"
    write_secret(path)
    config = simulated_config().model_copy(update={"cluster_secret_file": str(path)})
    with running_engine(config) as core:
        yield core, read_secret(path)


@contextlib.asynccontextmanager
async def session(endpoint: str, identity: IngressIdentity) -> AsyncIterator[EngineSession]:
    entry = EngineEntry("engine-0", "model", EngineState.READY, endpoint=endpoint)
    router = Router(RouterConfig(), identity.ingress_id)
    session = EngineSession(entry, router, identity, lambda: None)
    session.open()
    try:
        yield session
    finally:
        await session.close()


def test_the_cluster_secret_opens_a_session(engine: tuple[EngineCore, bytes]) -> None:
    core, secret = engine

    async def run() -> None:
        async with session(core.endpoint, IngressIdentity.random(secret)) as opened:
            while opened.load is None:
                await asyncio.sleep(0.01)

    assert core.endpoint.startswith("curve+tcp://")
    asyncio.run(asyncio.wait_for(run(), 10))


def test_another_secret_opens_none_and_the_reason_is_said_once(
    engine: tuple[EngineCore, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = engine
    identity = IngressIdentity.random()

    async def run() -> None:
        async with session(core.endpoint, identity) as refused:
            await asyncio.sleep(1.2)
            assert refused.info is None

    asyncio.run(asyncio.wait_for(run(), 10))
    said = [record.message for record in caplog.records if record.name == "cluster.session"]
    assert len(said) == 1
    assert "its cluster secret is probably another one; trying again" in said[0]


def test_an_identity_keeps_its_secret_to_itself() -> None:
    identity = IngressIdentity("ingress-0", b"secret-bytes-" * 3)
    assert "secret-bytes" not in repr(identity)
    for pair in (identity.curve.engine, identity.curve.ingress):
        assert pair.secret.decode() not in repr(identity)
