"""One model in one ingress: its tokenizer, its router, and a session with each of its engines.

Invariant: models share nothing but the process. One that cannot be loaded, or has no engine, says
so to its own clients; the others never notice.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.keys import key_root
from cluster.generation import Generation, RequestTimes
from cluster.preprocess import GenerationRequest, ModelLimits, Preprocessor
from cluster.routing.decision import Decision, NoReplica, RouteRequest
from cluster.routing.router import Router
from cluster.session import EngineSession
from cluster.tokenizer import Tokenizer
from configs.shoal import RouterConfig
from engine.errors import EngineLost, RequestRejected, ShoalError
from engine.models.resolve import resolve_model
from engine.wire import HelloReply, RejectCode
from replicas.directory import EngineEntry, ModelEntry

logger = logging.getLogger(__name__)

_RETRY_S = 5.0


class ModelNotReady(ShoalError):
    """The model is known, but no engine can take a request for it now."""


@dataclass(frozen=True, slots=True)
class IngressIdentity:
    """What all models of an ingress have in common."""

    ingress_id: str
    secret: bytes
    """Keys the prefix hash; the engines have the same one."""
    router: RouterConfig


@dataclass(frozen=True, slots=True)
class Started:
    """A request on its way, and how it got there."""

    generation: Generation
    tokenizer: Tokenizer
    decision: Decision
    fingerprint: str


class ServedModel:
    """Use `open`, `update` with each view of the directory, `start` for requests, `close`."""

    def __init__(
        self,
        entry: ModelEntry,
        identity: IngressIdentity,
        load_tokenizer: Callable[[str], Tokenizer] | None = None,
    ) -> None:
        self.entry = entry
        self.router = Router(identity.router, identity.ingress_id)
        self.failure = ""
        """Why the tokenizer could not be loaded."""
        self.sessions: dict[str, EngineSession] = {}
        """By core id, which is what the router knows an engine by."""
        self._identity = identity
        self._load_tokenizer = load_tokenizer or _load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._preprocessor: Preprocessor | None = None
        self._info: HelloReply | None = None
        self._loading: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._loading = asyncio.create_task(self._load())

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in self.sessions.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._preprocessor is not None:
            self._preprocessor.close()

    # ------------------------------------------------------------ engines

    def update(self, engines: Sequence[EngineEntry], is_complete: bool) -> None:
        """Takes over which engines there are. If the list `is_complete`, those that are not on it
        are gone; else only those that it says otherwise of."""
        reported = {entry.replica_id for entry in engines}
        reachable = {entry.core_id: entry for entry in engines if entry.is_reachable}
        for core_id, session in list(self.sessions.items()):
            is_known = is_complete or session.entry.replica_id in reported
            if is_known and core_id not in reachable:
                del self.sessions[core_id]
                self._close_later(session)
        for core_id, entry in reachable.items():
            if core_id not in self.sessions:
                session = EngineSession(entry, self.router, self._identity.ingress_id)
                self.sessions[core_id] = session
                session.open()
            self.sessions[core_id].update(entry)

    @property
    def num_ready(self) -> int:
        """Engines with a session."""
        return sum(session.info is not None for session in self.sessions.values())

    @property
    def is_ready(self) -> bool:
        return self._preprocessor is not None and self.num_ready > 0

    @property
    def max_model_len(self) -> int | None:
        info = self._known_info()
        return info.max_model_len if info is not None else None

    def _close_later(self, session: EngineSession) -> None:
        task = asyncio.create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _known_info(self) -> HelloReply | None:
        """Of any engine: those of one model are interchangeable. Remembered while none is there."""
        for session in self.sessions.values():
            if session.info is not None:
                self._info = session.info
                break
        return self._info

    # ------------------------------------------------------------ requests

    async def start(
        self,
        request_id: str,
        request: GenerationRequest,
        on_close: Callable[[Generation], None] = lambda generation: None,
    ) -> Started:
        """Prepares a request, chooses an engine, and returns once that has accepted it.

        Raises what `Preprocessor.prepare` does, `RequestRejected`, or `ModelNotReady`."""
        if self._preprocessor is None or self._tokenizer is None:
            raise ModelNotReady(self.failure or f"model {self.entry.name} is still loading")
        info = self._known_info()
        if info is None:
            raise ModelNotReady(f"no engine of model {self.entry.name} is ready")
        times = RequestTimes()
        root = key_root(self._identity.secret, info.fingerprint, "", info.block_size)
        prepared = await self._preprocessor.prepare(request_id, request, ModelLimits.of(info), root)
        sampling = prepared.choices[0].sampling
        route = RouteRequest(
            request_id, prepared.block_keys, prepared.num_prompt_tokens, sampling.max_tokens
        )
        times.prepared_s = time.perf_counter()
        tried: set[str] = set()
        refusal: Exception | None = None
        while len(tried) < self._identity.router.max_attempts:
            try:
                decision = self.router.route(route, exclude=tried)
            except NoReplica:
                break
            tried.add(decision.replica_id)
            times.routed_s = time.perf_counter()
            try:
                session = self.sessions[decision.replica_id]
                streams = await session.start(prepared.choices, decision)
            except EngineLost as error:
                refusal = error
            except RequestRejected as error:
                if error.code is not RejectCode.OVERLOADED:
                    raise
                refusal = error
            else:
                times.accepted_s = time.perf_counter()
                generation = Generation(prepared, streams, self._tokenizer, times, on_close)
                return Started(generation, self._tokenizer, decision, info.fingerprint)
        raise refusal or ModelNotReady(f"no engine of model {self.entry.name} is ready")

    # ------------------------------------------------------------ tokenizer

    async def _load(self) -> None:
        while self._tokenizer is None:
            try:
                self._tokenizer = await asyncio.to_thread(self._load_tokenizer, self.entry.source)
            except Exception as error:
                self.failure = f"the tokenizer of model {self.entry.name} cannot be loaded"
                logger.warning("%s: %s", self.failure, error)
                await asyncio.sleep(_RETRY_S)
        self.failure = ""
        self._preprocessor = Preprocessor(self._tokenizer)


def _load_tokenizer(source: str) -> Tokenizer:
    folder: Path = resolve_model(source, lambda phase: None)
    return Tokenizer.load(folder)
