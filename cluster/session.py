"""One engine as one ingress sees it: a lasting connection that feeds the router.

Invariant: the router knows the engine exactly while there is a session with it; a session that ends
takes the engine's blocks and bookings out of the router at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from cache.events import KeySet
from cluster.identity import IngressIdentity
from cluster.routing.decision import Decision
from cluster.routing.router import Router
from engine.attempt import EngineRequest, EngineStream
from engine.client import EngineClient
from engine.errors import EngineDied, EngineLost
from engine.observer import Followed
from engine.wire import HelloReply, LoadReport
from replicas.directory import EngineEntry, EngineState

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_RETRY_S = 0.2
_ACCEPT_TIMEOUT_S = 5.0


class EngineSession:
    """`open` it, `start` requests on it, and `close` it."""

    def __init__(
        self,
        entry: EngineEntry,
        router: Router,
        identity: IngressIdentity,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a session has begun or ended."""
        self.entry = entry
        self.core_id = entry.core_id
        self.info: HelloReply | None = None
        """What the engine says of itself; None while there is no session."""
        self.load: LoadReport | None = None
        self.incarnation_id = ""
        """Which life of which core this is; kept when the session has ended."""
        self.fingerprint = ""
        """Of what it runs; likewise."""
        self._is_ejected = False
        self._router = router
        self._identity = identity
        self._on_change = on_change
        self._client: EngineClient | None = None
        self._connecting: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._connecting = asyncio.create_task(self._connect())

    async def close(self, error: EngineLost | None = None) -> None:
        """Ends the session; what runs on the engine raises `error`."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._client is not None:
            await self._client.close(error)

    def update(self, entry: EngineEntry, is_ejected: bool) -> None:
        """Takes over its state: a draining engine gets no more, and what it has moves if it can; an
        ejected one is given up, whether or not it still answers."""
        self.entry = entry
        was_ejected, self._is_ejected = self._is_ejected, is_ejected
        self._update_router()
        if is_ejected and not was_ejected and self._client is not None:
            self._client.fail_streams(EngineDied(f"engine {self.core_id} has stalled"))

    @property
    def followed(self) -> Followed | None:
        """How its stream is followed; None while there is no session."""
        return self._client.followed if self._client is not None else None

    @property
    def is_draining(self) -> bool:
        return self.entry.state is EngineState.DRAINING

    def ask_to_move(self) -> None:
        """Has every stream on the engine try to go on elsewhere."""
        if self._client is not None:
            self._client.ask_to_move()

    def _update_router(self) -> None:
        if self.info is not None:
            in_order = self.entry.state is EngineState.READY or (
                self.entry.state is EngineState.STALLED and not self._is_ejected
            )
            is_routable = in_order and self._client is not None
            self._router.set_routable(self.core_id, is_routable)

    async def start(
        self, requests: Sequence[EngineRequest], decision: Decision
    ) -> list[EngineStream]:
        """Sends the choices of one request; returns once the engine has accepted them all.

        Raises `RequestRejected` or `EngineLost`; then none of them runs."""
        if self._client is None:
            raise EngineLost("the engine has ended")
        streams: list[EngineStream] = []
        try:
            for request in requests:
                stream = self._client.send(request)
                streams.append(stream)
                self._router.book(decision, stream.number)
            for stream in streams:
                await stream.accepted(_ACCEPT_TIMEOUT_S)
        except BaseException:
            for stream in streams:
                stream.abort()
                self._router.unbook(self.core_id, stream.number)
            raise
        return streams

    async def _connect(self) -> None:
        """Until the first session; after that the client itself says hello again when needed."""
        said = ""
        while True:
            try:
                self._client = await EngineClient.connect(
                    self.entry.endpoint,
                    self._identity.ingress_id,
                    _CONNECT_TIMEOUT_S,
                    observer=self,
                    keys=self._identity.curve,
                )
                self._update_router()
                self._on_change()
                return
            except EngineLost as error:
                if (text := str(error)) != said:
                    logger.warning("%s; trying again", text)
                    said = text
                await asyncio.sleep(_RETRY_S)

    # ------------------------------------------------------------ engine.observer.EngineObserver

    def session_opened(self, info: HelloReply) -> KeySet:
        self._router.remove_replica(self.core_id)
        keys = self._router.add_replica(self.core_id, info.block_size)
        self.info = info
        self.incarnation_id = f"{self.core_id}/{info.incarnation}"
        self.fingerprint = info.fingerprint
        self._update_router()
        self._on_change()
        return keys

    def session_lost(self, reason: str) -> None:
        logger.warning("engine %s: %s", self.core_id, reason)
        self.info = self.load = None
        self._router.remove_replica(self.core_id)
        self._on_change()

    def load_reported(self, report: LoadReport) -> None:
        self.load = report
        self._router.on_load(self.core_id, report)

    def request_seen(self, number: int) -> None:
        self._router.on_seen(self.core_id, number)
