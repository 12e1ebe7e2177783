"""Whom an engine's sockets admit: the server's side of CurveZMQ (ZAP, ZeroMQ RFC 27).

Invariant: who does not prove to be an ingress never gets a message to a socket, and whatever such
peers do costs the engine a bounded part of a turn and one line of log a second.

The control thread answers ZAP in its own turns, beside its other sockets. pyzmq's
`ThreadAuthenticator` would be a third thread with an event loop, to compare one key, and logs each
denial. Here a handshake waits for a turn, once in a connection's life; an idle engine still sleeps
in one poll; and a peer that stalls in its handshake holds a descriptor of libzmq's I/O thread until
HANDSHAKE_IVL, and nothing of ours.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator

import zmq
from zmq.utils import z85

from engine.curve import ZAP_DOMAIN, CurveKeys

logger = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "without this cluster's secret",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "without finishing the handshake",
}
"""By a monitor's event, what is to be said of the peer."""
_MAX_PER_TURN = 1000
_LOG_INTERVAL_S = 1.0
_MAX_NAMED = 8
"""Kinds of denial told apart in one line of log."""


class Gate:
    """Admits the ingresses of one cluster to the sockets of one context. Make it before they
    bind, `serve` it each turn, close it after them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys) -> None:
        self._admitted = z85.decode(keys.ingress.public)
        self._context = context
        self.socket = context.socket(zmq.REP)
        """Readable when somebody knocks."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)
        self._monitors: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._denied: Counter[str] = Counter()
        """Since the last line of log."""
        self._logged_s = 0.0

    def watch(self, socket: "zmq.Socket[bytes]") -> None:
        """Counts handshakes at `socket` that fail before they come to the question of admission."""
        address = f"inproc://failed-handshakes-{len(self._monitors)}"
        socket.monitor(address, sum(_FAILURES))
        monitor = self._context.socket(zmq.PAIR)
        # libzmq waits where a monitor's queue is full, in the thread that carries the tokens. It
        # cannot fail handshakes faster than turns drain them.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)
        self._monitors.append((socket, monitor))

    def serve(self, now: float) -> None:
        """Answers who has knocked. Never waits."""
        for _ in range(_MAX_PER_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.socket.send_multipart(self._answer(frames), zmq.NOBLOCK)
        for socket, monitor in self._monitors:
            for failure in _drain(monitor):
                where = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                self._deny(f"at {where} {_FAILURES[failure]}")
        if self._denied and now - self._logged_s >= _LOG_INTERVAL_S:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._denied.items())
            logger.warning("denied connections: %s", kinds)
            self._denied.clear()
            self._logged_s = now

    def close(self) -> None:
        for _, monitor in self._monitors:
            monitor.close()
        self.socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Of a request: version, request id, domain, address, routing id, mechanism and, for CURVE,
        the client's public key, 32 bytes, which it has proved to be its own."""
        request_id = frames[1] if len(frames) > 1 else b""
        asked = [_VERSION, request_id, ZAP_DOMAIN, b"CURVE", self._admitted]
        if len(frames) == 7 and [*frames[:3], *frames[5:]] == asked:
            return [_VERSION, request_id, b"200", b"OK", b"", b""]
        address = frames[3].decode(errors="replace")[:64] if len(frames) > 3 else "?"
        self._deny(f"from {address} without the ingresses' key")
        return [_VERSION, request_id, b"400", b"not an ingress of this cluster", b"", b""]

    def _deny(self, kind: str) -> None:
        is_told_apart = kind in self._denied or len(self._denied) < _MAX_NAMED
        self._denied[kind if is_told_apart else "others"] += 1


def _drain(monitor: "zmq.Socket[bytes]") -> Iterator[int]:
    """The events that wait in a monitor."""
    for _ in range(_MAX_PER_TURN):
        try:
            event, _ = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield int.from_bytes(event[:2], sys.byteorder)
