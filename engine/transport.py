"""The engine's sockets: a ROUTER for requests, a PUB for the stream.

Invariant: nothing an ingress does, or fails to do, blocks the engine or costs it unbounded memory.
Sends never wait; what a peer does not take is kept in its bounded outbox; a peer that is silent
for `lease_s`, or lets its outbox overflow, loses its session. What cannot be read is answered and
logged.
"""

import contextlib
import logging
import math
import os
import select
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from configs.engine import TransportConfig
from engine import wire
from engine.curve import CurveKeys, bind, check_listen
from engine.wire import RefuseCode
from engine.zap import Gate

logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_RECEIVE = 256
_MAX_REFUSALS_LOGGED_PER_S = 10
_CLOSE_LINGER_MS = 200
_MAX_SUBSCRIPTION_BYTES = 4096
"""Far more than a subscription or a step of a handshake takes: all that comes in on the stream."""


@dataclass(slots=True, eq=False)
class Session:
    """One ingress, from its Hello to its end."""

    ingress_id: str
    heard_s: float
    seen: int = 0
    """Highest request number seen."""
    outbox: deque[bytes] = field(default_factory=deque)
    snapshot: Iterator[wire.SnapshotChunk] | None = None
    """Being sent, a chunk at a time."""
    is_open: bool = True

    @property
    def identity(self) -> bytes:
        return self.ingress_id.encode()


@dataclass(frozen=True, slots=True)
class Closed:
    """A session is over, and why."""

    session: Session
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    session: Session
    message: wire.AddRequest | wire.Abort | wire.ReplayRequest | wire.SnapshotRequest


Inbound = Closed | Received


class EngineTransport:
    """Used by the control thread alone, but for `wake`."""

    def __init__(self, config: TransportConfig, keys: CurveKeys | None = None) -> None:
        """With `keys`, tcp sockets speak CurveZMQ and admit ingresses alone (`engine/curve.py`).
        Raises `ConfigurationError` for where an engine must not or cannot listen."""
        for address in (config.listen, config.listen_stream):
            check_listen(address, keys)
        self.config = config
        self.sessions: dict[str, Session] = {}
        self._inbound: list[Inbound] = []
        self._refusals_s = 0.0
        self._num_refusals = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # An ingress that comes back under its name takes over from its former connection.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.SNDHWM, 64)
        # Beyond this the connection is cut before the message is in memory; between the two the
        # sender is told.
        self._router.setsockopt(zmq.MAXMSGSIZE, 2 * config.max_message_bytes)
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, config.replay_frames)
        self._publisher.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
        for socket in (self._router, self._publisher):
            socket.setsockopt(zmq.LINGER, 0)
        self._gate = self._make_gate(keys)
        self.endpoint = bind(self._router, config.listen, keys)
        self.stream_endpoint = bind(self._publisher, config.listen_stream, keys)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Returns when something has arrived, after `wake`, or after `timeout_s`."""
        # Rounded up, or the last fraction of a millisecond would be spent turning.
        self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """Ends `wait`. May be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def receive(self, now: float, hello: wire.HelloReply) -> list[Inbound]:
        """What has come in and which sessions have ended, in order; a bounded number, so that a
        flood cannot keep the engine from its steps. A new session is greeted with `hello`."""
        for _ in range(_MAX_MESSAGES_PER_RECEIVE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._read(frames, now, hello)
        if self._gate is not None:
            self._gate.serve(now)
        self._expire(now)
        inbound, self._inbound = self._inbound, []
        return inbound

    def send(self, session: Session, message: wire.Message) -> None:
        """Queues a message; it leaves at once if the peer takes it."""
        if not session.is_open:
            return
        if len(session.outbox) >= self.config.outbox_messages:
            self.close_session(session, "it reads too slowly: its outbox is full")
            return
        session.outbox.append(wire.encode(message))
        self._flush(session)

    def flush(self) -> None:
        """Tries again what peers did not take, and goes on with snapshots."""
        for session in list(self.sessions.values()):
            if session.outbox:
                self._flush(session)
            if session.snapshot is not None and not session.outbox:
                chunk = next(session.snapshot, None)
                if chunk is None:
                    session.snapshot = None
                else:
                    self.send(session, chunk)

    @property
    def has_unsent(self) -> bool:
        return any(s.outbox or s.snapshot is not None for s in self.sessions.values())

    def publish(self, frame: wire.StreamFrame) -> None:
        # A slow subscriber loses frames here and repairs the gap by replay.
        with contextlib.suppress(zmq.Again):
            self._publisher.send(wire.encode(frame), zmq.NOBLOCK)

    def close_session(self, session: Session, reason: str) -> None:
        if session.is_open:
            session.is_open = False
            session.outbox.clear()
            session.snapshot = None
            del self.sessions[session.ingress_id]
            self._inbound.append(Closed(session, reason))

    def close(self) -> None:
        self._router.close(linger=_CLOSE_LINGER_MS)
        self._publisher.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        os.close(self._wake_fd)

    # ------------------------------------------------------------ inside

    def _make_gate(self, keys: CurveKeys | None) -> Gate | None:
        if keys is None:
            return None
        gate = Gate(self._context, keys)
        for socket in (self._router, self._publisher):
            gate.watch(socket)
        return gate

    def _read(self, frames: list[bytes], now: float, hello: wire.HelloReply) -> None:
        identity, payload = frames[0], frames[-1]
        limit = self.config.max_message_bytes
        if len(frames) != 2:
            text = f"{len(frames) - 1} frames, not 1"
            return self._refuse(identity, now, RefuseCode.MALFORMED, text)
        if len(payload) > limit:
            text = f"the message has {len(payload)} bytes; the limit is {limit}"
            return self._refuse(identity, now, RefuseCode.OVERSIZED, text)
        try:
            message = wire.decode_to_engine(payload)
        except msgspec.DecodeError as error:
            return self._refuse(identity, now, RefuseCode.MALFORMED, str(error))
        if isinstance(message, wire.Hello):
            return self._greet(identity, message, now, hello)
        session = self.sessions.get(identity.decode(errors="replace"))
        if session is None:
            text = "no session: say Hello first, or again after the lease has expired"
            return self._refuse(identity, now, RefuseCode.NO_SESSION, text)
        session.heard_s = now
        match message:
            case wire.Heartbeat():
                return None
            case wire.Goodbye():
                return self.close_session(session, "it said goodbye")
            case wire.AddRequest(number=number):
                session.seen = max(session.seen, number)
        self._inbound.append(Received(session, message))
        return None

    def _greet(
        self, identity: bytes, message: wire.Hello, now: float, hello: wire.HelloReply
    ) -> None:
        if message.wire_version != wire.WIRE_VERSION:
            text = f"wire version {message.wire_version}; this engine speaks {wire.WIRE_VERSION}"
            return self._refuse(identity, now, RefuseCode.VERSION, text)
        if message.ingress_id.encode() != identity:
            text = "ingress_id is not the socket's routing id"
            return self._refuse(identity, now, RefuseCode.MALFORMED, text)
        if (former := self.sessions.get(message.ingress_id)) is not None:
            self.close_session(former, "it opened a new session")
        session = self.sessions[message.ingress_id] = Session(message.ingress_id, now)
        return self.send(session, hello)

    def _refuse(self, identity: bytes, now: float, code: RefuseCode, text: str) -> None:
        """Answers and logs, the log at a bounded rate: a flood of rubbish must not fill a disk."""
        if now - self._refusals_s >= 1:
            self._refusals_s, self._num_refusals = now, 0
        self._num_refusals += 1
        if self._num_refusals <= _MAX_REFUSALS_LOGGED_PER_S:
            logger.warning("refused a message from %r: %s: %s", identity[:64], code, text[:200])
        self._try_send(identity, wire.encode(wire.Refused(code, text[:200])))

    def _expire(self, now: float) -> None:
        lease_s = self.config.lease_s
        for session in list(self.sessions.values()):
            if now - session.heard_s > lease_s:
                self.close_session(session, f"its lease of {lease_s:g} s has expired")

    def _flush(self, session: Session) -> None:
        while session.outbox and self._try_send(session.identity, session.outbox[0]):
            session.outbox.popleft()

    def _try_send(self, identity: bytes, frame: bytes) -> bool:
        """False if the peer takes nothing now. To an unknown peer it is dropped."""
        try:
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True
