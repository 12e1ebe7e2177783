"""An ingress's end of the wire: one asyncio client for one engine.

Invariant: what other attempts or a dead incarnation send reaches no stream, and every stream of a
session ends with it. Nothing here blocks the event loop, and nothing here imports torch.
"""

import asyncio
import contextlib
import errno
import logging
import math
import secrets
import struct
from types import TracebackType
from typing import Self

import msgspec
import zmq

from engine import wire
from engine.attempt import EngineRequest, EngineStream
from engine.curve import CurveKeys, connect, is_curve, transport_address
from engine.errors import EngineDied, EngineLost, EngineSilent, RequestRejected
from engine.observer import EngineObserver, Followed
from engine.stream import Need, StreamCounts, StreamFollower
from engine.wire import RefuseCode, RejectCode

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_REPAIR_INTERVAL_S = 1.0
_MONITOR_EVENT = struct.Struct("=HI")
"""First frame of a monitor's message: event and value."""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class EngineClient:
    """A session with one engine. Use `connect`, then `add` for each request."""

    def __init__(
        self,
        endpoint: str,
        ingress_id: str,
        observer: EngineObserver | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self._observer = observer
        self._keys = keys
        self.endpoint = endpoint
        self.ingress_id = ingress_id
        self.info: wire.HelloReply | None = None
        """What the engine said of itself; None while there is no session."""
        self.follower: StreamFollower | None = None
        """The engine's cache and load, as published."""
        self._counts = StreamCounts()
        self._in_step_s = 0.0
        self._streams: dict[str, EngineStream] = {}
        self._number = 0
        self._heard_s = 0.0
        self._answered = asyncio.Event()
        """Set once the engine has greeted, or cannot be expected to."""
        self._refusal = ""
        self._repair_sent_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._socket(zmq.DEALER)
        self._requests.setsockopt(zmq.ROUTING_ID, ingress_id.encode())
        # A connection that breaks tells of a dead engine long before its silence does.
        self._monitor = self._requests.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        )
        self._stream = self._socket(zmq.SUB)
        self._stream.subscribe(b"")
        self._stream_endpoint = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._drain_scheduled = False

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        ingress_id: str | None = None,
        timeout_s: float = 10.0,
        observer: EngineObserver | None = None,
        keys: CurveKeys | None = None,
    ) -> Self:
        """Opens a session; `keys` are for an endpoint that asks for them (`engine/curve.py`).

        Raises `EngineLost` if the engine does not answer in `timeout_s`, refuses, or cannot be
        spoken to safely (why is in the text)."""
        client = cls(endpoint, ingress_id or f"client-{secrets.token_hex(6)}", observer, keys)
        loop = asyncio.get_running_loop()
        try:
            connect(client._requests, endpoint, keys)
        except EngineLost as error:
            await client.close()
            raise EngineLost(f"no session with engine at {endpoint}: {error}") from None
        loop.add_reader(client._requests.FD, client._drain)
        loop.add_reader(client._stream.FD, client._drain)
        loop.add_reader(client._monitor.FD, client._drain)
        client._heard_s = loop.time()
        client._send(client._hello())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client._answered.wait(), timeout_s)
        if client.info is None:
            await client.close()
            reason = client._refusal or f"no answer within {timeout_s:g} s"
            raise EngineLost(f"no session with engine at {endpoint}: {reason}")
        client._tasks.append(asyncio.create_task(client._keep_alive()))
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def add(self, request: EngineRequest, accept_timeout_s: float = 10.0) -> EngineStream:
        """`send`, then wait until the engine has accepted."""
        stream = self.send(request)
        await stream.accepted(accept_timeout_s)
        return stream

    def send(self, request: EngineRequest) -> EngineStream:
        """Sends a request. Whether the engine takes it is for `EngineStream.accepted` to say.

        Raises `EngineLost` when there is no session, `RequestRejected` for what cannot be sent."""
        if self.info is None:
            raise EngineLost(f"no session with engine at {self.endpoint}")
        if request.request_id in self._streams:
            raise RequestRejected(
                RejectCode.INVALID, f"request_id {request.request_id!r} is already running"
            )
        self._number += 1
        frame = wire.encode(
            wire.AddRequest(
                request_id=request.request_id,
                attempt=request.attempt,
                number=self._number,
                incarnation=self.info.incarnation,
                prompt_ids=tuple(request.prompt_ids),
                sampling=request.sampling,
                output_ids=tuple(request.output_ids),
                priority=request.priority,
                service_class=request.service_class,
                cache_domain=request.cache_domain,
                retention=request.retention,
            )
        )
        limit = self.info.max_message_bytes
        if len(frame) > limit:
            raise RequestRejected(
                RejectCode.INVALID, f"the request takes {len(frame)} bytes; the limit is {limit}"
            )
        stream = EngineStream(self, request, self._number)
        self._streams[request.request_id] = stream
        self._send_frame(frame)
        return stream

    @property
    def followed(self) -> Followed | None:
        """None while there is no session."""
        if self.follower is None:
            return None
        return Followed(self._counts, asyncio.get_running_loop().time() - self._in_step_s)

    def ask_to_move(self) -> None:
        """Has every stream of the session raise `MoveAsked`."""
        for stream in self._streams.values():
            stream.ask_to_move()

    def fail_streams(self, error: EngineLost) -> None:
        """Ends every attempt here, and in the engine should it hear of it."""
        for stream in list(self._streams.values()):
            self.abort_stream(stream)
            stream.fail(type(error)(str(error)))

    async def close(self, error: EngineLost | None = None) -> None:
        """Ends the session; the engine aborts what still runs for it, and its streams raise
        `error`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose(error or EngineLost("the client was closed"))
        if self._requests.closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._requests.FD)
        loop.remove_reader(self._stream.FD)
        loop.remove_reader(self._monitor.FD)
        self._send(wire.Goodbye())
        self._requests.disable_monitor()
        self._monitor.close(linger=0)
        self._requests.close(linger=100)
        self._stream.close(linger=0)
        self._context.term()

    # ------------------------------------------------------------ sending

    def _hello(self) -> wire.Hello:
        return wire.Hello(wire.WIRE_VERSION, self.ingress_id)

    def abort_stream(self, stream: EngineStream) -> None:
        """For the stream's own use, as is the next one; `EngineStream.abort` is for callers."""
        if self.info is not None:
            self._send(wire.Abort(((stream.request_id, stream.attempt),)))

    def forget_stream(self, stream: EngineStream) -> None:
        self._streams.pop(stream.request_id, None)

    def _send(self, message: wire.Message) -> None:
        self._send_frame(wire.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        # A full pipe means that the engine is not reading: its silence will end the session.
        with contextlib.suppress(zmq.Again):
            self._requests.send(frame, zmq.NOBLOCK)
        # A send may swallow the edge that signals incoming messages on the same descriptor.
        if not self._drain_scheduled:
            self._drain_scheduled = True
            asyncio.get_running_loop().call_soon(self._drain)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Several a lease, so that one late heartbeat costs nothing.
            lease_s = self.info.lease_s if self.info is not None else math.inf
            await asyncio.sleep(min(_HEARTBEAT_S, lease_s / 4))
            if self.info is None:
                self._send(self._hello())
                continue
            silence_s = loop.time() - self._heard_s
            if silence_s > self.info.lease_s:
                text = f"engine at {self.endpoint} has been silent for {silence_s:.1f} s"
                self._lose(EngineSilent(text))
                continue
            self._send(wire.Heartbeat())
            self._repair_stream()

    def _repair_stream(self) -> None:
        follower, now = self.follower, asyncio.get_running_loop().time()
        if follower is None or follower.in_sync or now - self._repair_sent_s < _REPAIR_INTERVAL_S:
            return
        self._repair_sent_s = now
        if follower.need is Need.REPLAY:
            self._send(wire.ReplayRequest(follower.sequence + 1))
        else:
            self._send(wire.SnapshotRequest())

    # ------------------------------------------------------------ receiving

    def _drain(self) -> None:
        """Reads all that has arrived. The descriptor is edge-triggered, hence to the last one."""
        self._drain_scheduled = False
        if self._requests.closed:
            return
        for socket, handle in (
            (self._requests, self._on_reply),
            (self._stream, self._on_frame),
            (self._monitor, self._on_connection),
        ):
            while True:
                try:
                    frame = socket.recv_multipart(zmq.NOBLOCK)[0]
                except zmq.Again:
                    break
                self._heard_s = asyncio.get_running_loop().time()
                try:
                    handle(frame)
                except msgspec.DecodeError:
                    logger.exception("unreadable message from engine at %s", self.endpoint)

    def _on_connection(self, frame: bytes) -> None:
        event, value = _MONITOR_EVENT.unpack(frame)
        if event & _HANDSHAKE_FAILED:
            self._on_handshake_failed(event, value)
        elif self.info is not None:
            text = f"the connection to the engine at {self.endpoint} has broken"
            self._lose(EngineDied(text))

    def _on_handshake_failed(self, event: int, value: int) -> None:
        if not is_curve(self.endpoint):
            self._refusal = "it broke off the handshake: it may not be an engine, or want CurveZMQ"
        elif value == errno.EAGAIN:
            self._refusal = "it did not go on with the handshake"
        else:
            # Who does not know an engine's public key gets no answer, only a closed connection.
            reason = "it did not admit this ingress"
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                reason = "it broke off the CurveZMQ handshake"
            self._give_up(f"{reason}: its cluster secret is probably another one")

    def _give_up(self, reason: str) -> None:
        """Of a first session, waiting longer would not help; a later one may come back."""
        if self._answered.is_set() and reason != self._refusal:
            logger.warning("engine at %s: %s", self.endpoint, reason)
        self._refusal = reason
        self._answered.set()

    def _on_frame(self, frame: bytes) -> None:
        if self.follower is None:
            return
        message = wire.decode_stream(frame)
        self.follower.on_frame(message)
        self._note_step()
        self._repair_stream()
        if self._observer is not None and isinstance(message.body, wire.LoadReport):
            self._observer.load_reported(message.body)

    def _note_step(self) -> None:
        if self.follower is not None and self.follower.in_sync:
            self._in_step_s = asyncio.get_running_loop().time()

    def _on_reply(self, frame: bytes) -> None:
        message = wire.decode_to_ingress(frame)
        match message:
            case wire.TokenBatch(items=items, seen=seen):
                if self._observer is not None:
                    self._observer.request_seen(seen)
                for item in items:
                    stream = self._streams.get(item.request_id)
                    if stream is not None and stream.attempt == item.attempt:
                        stream.put(item)
            case wire.Accepted() | wire.Rejected():
                self._on_admission(message)
            case wire.HelloReply():
                self._on_hello(message)
            case wire.Refused():
                self._on_refused(message)
            case wire.Replay(frames=frames) if self.follower is not None:
                self.follower.on_replay(frames)
                self._note_step()
            case wire.SnapshotChunk() if self.follower is not None:
                self.follower.on_snapshot(message)
                self._note_step()

    def _on_admission(self, message: wire.Accepted | wire.Rejected) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None or stream.attempt != message.attempt:
            return
        if isinstance(message, wire.Accepted):
            stream.accept()
        elif message.code is RejectCode.STALE_INCARNATION:
            stream.fail(EngineLost(message.message))
        else:
            refusal = RequestRejected(message.code, message.message, message.retry_after_s)
            stream.fail(refusal)

    def _on_hello(self, reply: wire.HelloReply) -> None:
        if self._stream_endpoint != reply.stream_endpoint:
            if self._stream_endpoint:
                self._stream.disconnect(transport_address(self._stream_endpoint))
                self._stream_endpoint = ""
            try:
                connect(self._stream, reply.stream_endpoint, self._keys)
            except EngineLost as error:
                self._give_up(f"its stream at {reply.stream_endpoint}: {error}")
                return
            self._stream_endpoint = reply.stream_endpoint
        self.info = reply
        keys = self._observer.session_opened(reply) if self._observer is not None else None
        self.follower = StreamFollower(reply.incarnation, keys=keys, counts=self._counts)
        self._in_step_s = asyncio.get_running_loop().time()
        self._repair_sent_s = 0.0
        self._answered.set()
        self._repair_stream()

    def _on_refused(self, message: wire.Refused) -> None:
        logger.warning("engine at %s: %s: %s", self.endpoint, message.code, message.message)
        self._refusal = message.message
        if message.code in (RefuseCode.NO_SESSION, RefuseCode.VERSION):
            text = f"engine at {self.endpoint} closed the session: {message.message}"
            self._lose(EngineLost(text))

    def _lose(self, error: EngineLost) -> None:
        if self.info is not None and self._observer is not None:
            self._observer.session_lost(str(error))
        self.info = None
        self.follower = None
        for stream in list(self._streams.values()):
            stream.fail(type(error)(str(error)))  # Raised once each: a traceback is its own.
