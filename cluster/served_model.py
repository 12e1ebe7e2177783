"""One model in one ingress: its tokenizer, its router, and a session with each of its engines.

Invariant: models share nothing but the process. One that cannot be loaded, or has no engine, says
so to its own clients; the others never notice. A request waits for an engine that is on its way
(`ingress.hold_s`), and fails at once when none is.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.keys import key_root
from cluster.generation import Generation, RequestTimes
from cluster.identity import IngressIdentity
from cluster.preprocess import GenerationRequest, ModelLimits, PreparedRequest, Preprocessor
from cluster.routing.decision import Decision, NoReplica, RouteRequest
from cluster.routing.router import Router
from cluster.session import EngineSession
from cluster.tokenizer import Tokenizer
from engine.attempt import EngineStream
from engine.errors import EngineLost, RequestRejected, ShoalError
from engine.models.resolve import resolve_tokenizer
from engine.wire import HelloReply, RejectCode
from replicas.directory import EngineEntry, EngineState, ModelEntry

logger = logging.getLogger(__name__)

_RETRY_S = 5.0


class ModelNotReady(ShoalError):
    """The model is known, but no engine can take a request for it now."""


class ModelReplaced(ShoalError):
    """The model's name stands for something else now: ask the fleet again."""


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
        self.router = Router(identity.settings.router, identity.ingress_id)
        self.failure = ""
        """Why the tokenizer could not be loaded."""
        self.sessions: dict[str, EngineSession] = {}
        """By core id, which is what the router knows an engine by."""
        self.num_held = 0
        """Requests that wait for an engine."""
        self._identity = identity
        self._load_tokenizer = load_tokenizer or _load_tokenizer
        self._preprocessor: Preprocessor | None = None
        self._info: HelloReply | None = None
        self._loading: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._engines: Sequence[EngineEntry] = ()
        self._is_retired = False
        self._changed = asyncio.Event()

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
        self._engines = engines
        reported = {entry.replica_id for entry in engines}
        reachable = {entry.core_id: entry for entry in engines if entry.is_reachable}
        for core_id, session in list(self.sessions.items()):
            is_known = is_complete or session.entry.replica_id in reported
            if is_known and core_id not in reachable:
                del self.sessions[core_id]
                self._close_later(session)
        for core_id, entry in reachable.items():
            if core_id not in self.sessions:
                session = EngineSession(entry, self.router, self._identity, self._note_change)
                self.sessions[core_id] = session
                session.open()
            self.sessions[core_id].update(entry)
        self._note_change()

    def retire(self) -> None:
        """The name stands for something else now. What runs goes on, nothing new starts, and what
        waits is sent away to ask for the model anew."""
        self._is_retired = True
        self._note_change()

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
        end_s = time.monotonic() + self._identity.settings.ingress.hold_s
        while self._preprocessor is None or (info := self._known_info()) is None:
            await self._hold(end_s)
        times = RequestTimes()
        domain = request.cache_domain
        root = key_root(self._identity.secret, info.fingerprint, domain, info.block_size)
        prepared = await self._preprocessor.prepare(request_id, request, ModelLimits.of(info), root)
        sampling = prepared.choices[0].sampling
        route = RouteRequest(
            request_id, prepared.block_keys, prepared.num_prompt_tokens, sampling.max_tokens
        )
        times.prepared_s = time.perf_counter()
        decision, streams = await self._place(route, prepared, times, end_s)
        times.accepted_s = time.perf_counter()
        generation = Generation(prepared, streams, self._preprocessor.tokenizer, times, on_close)
        return Started(generation, self._preprocessor.tokenizer, decision, info.fingerprint)

    async def _place(
        self, route: RouteRequest, prepared: PreparedRequest, times: RequestTimes, end_s: float
    ) -> tuple[Decision, list[EngineStream]]:
        """Chooses an engine and returns once it has accepted; another one is asked if it does not,
        and one that is on its way is waited for until `end_s`."""
        tried: set[str] = set()
        num_attempts = 0
        refusal: Exception | None = None
        while num_attempts < self._identity.settings.router.max_attempts:
            try:
                if self._is_retired:
                    raise ModelReplaced("the model was replaced")
                decision = self.router.route(route, exclude=tried)
            except NoReplica:
                if isinstance(refusal, RequestRejected):
                    raise refusal from None
                await self._hold(end_s)
                tried.clear()
                continue
            tried.add(decision.replica_id)
            times.routed_s = time.perf_counter()
            try:
                session = self.sessions[decision.replica_id]
                return decision, await session.start(prepared.choices, decision)
            except EngineLost as error:
                num_attempts, refusal = num_attempts + 1, error
            except RequestRejected as error:
                if error.code is RejectCode.OVERLOADED:
                    num_attempts, refusal = num_attempts + 1, error
                elif error.code is not RejectCode.DRAINING:
                    raise
        assert refusal is not None
        raise refusal

    # ------------------------------------------------------------ waiting for an engine

    async def _hold(self, end_s: float) -> None:
        """Until something has changed that may help. Raises `ModelNotReady` when nothing will, or
        at `end_s`, and `ModelReplaced`."""
        if self._is_retired:
            raise ModelReplaced("the model was replaced")
        name = self.entry.name
        settings = self._identity.settings.ingress
        if self.failure or self._has_failed:
            raise ModelNotReady(self.failure or f"every engine of model {name} has failed")
        patience_s = end_s - time.monotonic()
        if patience_s <= 0:
            text = "is still loading" if self._preprocessor is None else "has no engine ready"
            raise ModelNotReady(f"model {name} {text} after {settings.hold_s:g} s")
        if self.num_held >= settings.max_held:
            raise ModelNotReady(f"{self.num_held} requests wait for an engine of model {name}")
        self.num_held += 1
        try:
            async with asyncio.timeout(patience_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self.num_held -= 1

    @property
    def _has_failed(self) -> bool:
        """Whether there are engines, and all of them cannot start."""
        states = {entry.state for entry in self._engines}
        return states == {EngineState.FAILED}

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ tokenizer

    async def _load(self) -> None:
        while self._preprocessor is None:
            if self.failure:
                await asyncio.sleep(_RETRY_S)
            try:
                tokenizer = await asyncio.to_thread(self._load_tokenizer, self.entry.source)
            except Exception as error:
                self.failure = f"the tokenizer of model {self.entry.name} cannot be loaded"
                logger.warning("%s: %s", self.failure, error)
            else:
                self._preprocessor = Preprocessor(tokenizer)
                self.failure = ""
            self._note_change()


def _load_tokenizer(source: str) -> Tokenizer:
    return Tokenizer.load(resolve_tokenizer(source))
