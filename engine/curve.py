"""Who may listen and connect where, and with which keys: CurveZMQ on the network (ZeroMQ RFC 26).

Invariant: bytes that leave the machine are encrypted, and both ends prove that they know the
cluster secret. The address an engine advertises decides, on both sides alike:

- `ipc://PATH` is plain: the permissions of its folder guard it.
- `tcp://ADDRESS:PORT` is plain, and loopback: an engine without a secret file binds nothing else,
  and a client connects to nothing else, so that a forged address gets nothing in the clear.
- `curve+tcp://ADDRESS:PORT` is what an engine with a secret file makes of any tcp address. A client
  needs the keys.

An engine's socket answers nobody who does not know its public key, and of those who do it admits
the ingresses' pair alone (`engine/zap.py`).
"""

import ipaddress
from dataclasses import dataclass, field
from typing import Self

import zmq
from zmq.utils import z85

from configs.secret import derive_key
from engine.errors import ConfigurationError, EngineLost

ZAP_DOMAIN = b"shoal"

_CURVE_TCP = "curve+tcp://"
_HANDSHAKE_MS = 5000
"""A handshake is two round trips and one turn of the engine's control thread; a connection that has
not done it by then is cut."""


@dataclass(frozen=True, slots=True)
class CurvePair:
    """One side's long-term keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, seed: bytes) -> Self:
        """The pair whose secret key is these 32 bytes."""
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The pairs of one cluster: one that all its engines share, one for all its ingresses."""

    engine: CurvePair
    ingress: CurvePair

    @classmethod
    def derive(cls, secret: bytes) -> Self:
        """From the cluster secret, 16 to 64 bytes of it. The same every time, on every node."""
        return cls(
            engine=CurvePair.of(derive_key(secret, "curve engine")),
            ingress=CurvePair.of(derive_key(secret, "curve ingress")),
        )


def check_listen(address: str, keys: CurveKeys | None) -> None:
    """Raises `ConfigurationError` if an engine must not, or cannot usefully, listen there."""
    if not address.startswith("tcp://"):
        return
    host = _host(address)
    if _is_wildcard(host):
        raise ConfigurationError(
            f"cannot listen on {address}: name one address of this node, to which others connect"
        )
    if keys is None and not _is_loopback(host):
        raise ConfigurationError(
            f"cannot listen on {address} in the clear: beyond loopback engines speak CurveZMQ, for "
            "which cluster_secret_file must be set, to the same secret as the ingresses'"
        )


def bind(socket: "zmq.Socket[bytes]", address: str, keys: CurveKeys | None) -> str:
    """Binds an engine's socket where `check_listen` allows it, and returns the address to
    advertise, its port known. With keys there must be a `Gate` in the socket's context. Raises
    `ConfigurationError` if the address cannot be had."""
    scheme, _, _ = address.partition("://")
    if scheme == "tcp" and keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.engine.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without a gate nobody gets in; libzmq's default is that everybody does.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    _allow_ipv6(socket, address)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    is_encrypted = socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    return f"curve+{endpoint}" if is_encrypted else endpoint


def connect(socket: "zmq.Socket[bytes]", endpoint: str, keys: CurveKeys | None) -> None:
    """Connects an ingress's socket to what an engine advertises. Raises `EngineLost` if that would
    need keys that are not there, or would send in the clear over a network."""
    address = transport_address(endpoint)
    if is_curve(endpoint):
        if keys is None:
            raise EngineLost("it speaks CurveZMQ, and there is no cluster secret here")
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.engine.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.ingress.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.ingress.secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    elif not address.startswith("ipc://") and not _is_loopback(_host(address)):
        raise EngineLost("its address is beyond loopback and not encrypted (curve+tcp://)")
    _allow_ipv6(socket, address)
    socket.connect(address)


def is_curve(endpoint: str) -> bool:
    return endpoint.startswith(_CURVE_TCP)


def transport_address(endpoint: str) -> str:
    """The address as ZeroMQ takes it."""
    return f"tcp://{endpoint.removeprefix(_CURVE_TCP)}" if is_curve(endpoint) else endpoint


def _host(address: str) -> str:
    """Of `tcp://HOST:PORT`; IPv6 addresses lose their brackets."""
    return address.partition("://")[2].rpartition(":")[0].strip("[]")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _allow_ipv6(socket: "zmq.Socket[bytes]", address: str) -> None:
    if address.startswith("tcp://") and ":" in _host(address):
        socket.setsockopt(zmq.IPV6, 1)
