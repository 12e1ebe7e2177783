"""What tests of engines on the network stand on: a secret in its file, and a client that asks."""

import time
from dataclasses import dataclass
from pathlib import Path

from zmq.utils import z85

from configs.engine import EngineConfig, SimulationConfig
from configs.secret import read_secret, write_secret
from engine.attempt import EngineRequest, EngineStream
from engine.client import EngineClient
from engine.curve import CurveKeys
from engine.errors import EngineLost
from engine.wire import FinishReason, SamplingParams
from tests.engine.rig import reference_output, simulated_config
from tests.engine.wire_rig import collect

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@dataclass(frozen=True)
class Secret:
    """A cluster's secret as its file, and what follows from it."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> "Secret":
        write_secret(path)
        return cls(path)

    @property
    def keys(self) -> CurveKeys:
        return CurveKeys.derive(read_secret(self.path))

    def config(self, **options: object) -> EngineConfig:
        config = simulated_config(**options)  # type: ignore[arg-type]
        return config.model_copy(update={"cluster_secret_file": str(self.path)})

    def words(self) -> list[str]:
        """What must not be read anywhere."""
        pairs = self.keys.engine, self.keys.ingress
        seeds = [z85.decode(pair.secret) for pair in pairs]
        text = read_secret(self.path).decode()
        return [
            text,
            *(p.secret.decode() for p in pairs),
            *map(repr, seeds),
            *map(bytes.hex, seeds),
        ]


async def ask(client: EngineClient) -> list[int]:
    output, finish = await collect(
        await client.add(EngineRequest(PROMPT, SamplingParams(max_tokens=8)))
    )
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    return output


EXPECTED = reference_output(PROMPT, SamplingParams(max_tokens=8), SimulationConfig(vocab_size=1000))


async def seconds_until_lost(stream: EngineStream) -> tuple[float, str]:
    began_s = time.monotonic()
    try:
        async for _ in stream:
            pass
    except EngineLost as error:
        return time.monotonic() - began_s, str(error)
    raise AssertionError("the stream ended as if nothing had happened")
