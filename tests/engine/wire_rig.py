"""Both ends of the wire for tests: the real client, and a peer that sends whatever it is told."""

import asyncio
from collections.abc import Awaitable, Callable

import zmq

from engine import wire
from engine.attempt import EngineStream
from engine.client import EngineClient
from engine.core import EngineCore
from engine.launcher import LocalEngine
from engine.wire import SamplingParams


class RawPeer:
    """A DEALER that sends whatever it is told."""

    def __init__(self, endpoint: str, ingress_id: str = "raw", receive_limit: int = 1000) -> None:
        self.ingress_id = ingress_id
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, ingress_id.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_limit)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)

    def ask(self, frame: bytes | wire.Message) -> wire.ToIngress:
        self.tell(frame)
        return wire.decode_to_ingress(self.socket.recv())

    def tell(self, frame: bytes | wire.Message) -> None:
        self.socket.send(frame if isinstance(frame, bytes) else wire.encode(frame))

    def hello(self) -> wire.HelloReply:
        reply = self.ask(wire.Hello(wire.WIRE_VERSION, self.ingress_id))
        assert isinstance(reply, wire.HelloReply)
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


def add_request(incarnation: int, **changes: object) -> wire.AddRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "attempt": 0,
        "number": 1,
        "incarnation": incarnation,
        "prompt_ids": (1, 2, 3),
        "sampling": SamplingParams(max_tokens=4),
    }
    return wire.AddRequest(**{**fields, **changes})  # type: ignore[arg-type]


def with_client(
    core: EngineCore | LocalEngine,
    use: Callable[[EngineClient], Awaitable[None]],
    timeout_s: float = 30,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(timeout_s), await EngineClient.connect(core.endpoint) as client:
            await use(client)

    asyncio.run(run())


async def collect(stream: EngineStream) -> tuple[list[int], wire.Finish | None]:
    output: list[int] = []
    finish = None
    async for item in stream:
        assert item.offset == len(output)
        output += item.token_ids
        finish = item.finish
    return output, finish
