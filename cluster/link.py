"""An ingress's lasting connection to one engine.

Invariant: there is at most one session at a time; while there is none, a request is refused at once
with `EngineLost` rather than left to wait.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from engine.client import EngineClient
from engine.errors import EngineLost

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.5


class EngineLink:
    """`open` it, ask for `client` at each request, and `close` it."""

    def __init__(
        self, endpoint: str, until_engine_ends: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`until_engine_ends` returns or raises when the engine is no more: sooner than its
        silence would tell."""
        self._endpoint = endpoint
        self._until_engine_ends = until_engine_ends
        self._client: EngineClient | None = None
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def client(self) -> EngineClient:
        """The session's client. Raises `EngineLost` when there is no session."""
        if self._ended:
            raise EngineLost("the engine has ended")
        if self._client is None or self._client.info is None:
            raise EngineLost("the engine does not answer yet")
        return self._client

    def open(self) -> None:
        self._tasks.append(asyncio.create_task(self._connect()))
        if self._until_engine_ends is not None:
            self._tasks.append(asyncio.create_task(self._watch(self._until_engine_ends)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> None:
        """Until the first session; after that the client itself says hello again when needed."""
        while True:
            try:
                self._client = await EngineClient.connect(
                    self._endpoint, timeout_s=_CONNECT_TIMEOUT_S
                )
                return
            except EngineLost as error:
                logger.warning("%s; trying again", error)
                await asyncio.sleep(_RETRY_S)

    async def _watch(self, until_engine_ends: Callable[[], Awaitable[None]]) -> None:
        # Any error means that the engine's process cannot be reached: it is gone all the same.
        with contextlib.suppress(Exception):
            await until_engine_ends()
        logger.error("the engine has ended")
        self._ended = True
        if self._client is not None:
            await self._client.close()
