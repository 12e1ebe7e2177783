"""One model in one ingress: its tokenizer, its router, and a session with each of its engines.

Invariant: models share nothing but the process. One that cannot be loaded, or has no engine, says
so to its own clients; the others never notice. A request waits for an engine that is on its way
(`ingress.hold_s`), and fails at once when none is. What runs on an engine that dies or drains goes
on elsewhere (`cluster/failover.py`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache.keys import key_root
from cluster.failover import Origin, ResumableStream
from cluster.generation import Generation, RequestTimes
from cluster.identity import IngressIdentity
from cluster.limits import OpenRequests
from cluster.placing import NowhereToGo, Placer, Wish
from cluster.preprocess import GenerationRequest, ModelLimits, Preprocessor
from cluster.routing.decision import Decision, RouteRequest
from cluster.routing.router import Router
from cluster.session import EngineSession
from cluster.suspects import Case
from cluster.tokenizer import Tokenizer
from engine.errors import EngineDied, EngineLost
from engine.models.resolve import resolve_tokenizer
from engine.wire import HelloReply
from replicas.directory import EngineEntry, EngineState, ModelEntry, ejected

logger = logging.getLogger(__name__)

_RETRY_S = 5.0


class ModelNotReady(NowhereToGo):
    """The model is known, but no engine can take a request for it now."""


class ModelReplaced(NowhereToGo):
    """The model's name stands for something else now: ask the fleet again."""


@dataclass(frozen=True, slots=True)
class Started:
    """A request on its way, and how it got there."""

    generation: Generation
    tokenizer: Tokenizer
    decision: Decision
    fingerprint: str
    streams: Sequence[ResumableStream] = ()
    """Of each choice."""


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
        self.open_requests = OpenRequests()
        self.num_held = 0
        """Requests that wait for an engine."""
        self.placer = Placer(self.router, self.sessions, identity.settings, self._hold)
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
        reported = {entry.replica_id: entry for entry in engines}
        gone = ejected(engines)
        reachable = {entry.core_id: entry for entry in engines if entry.is_reachable}
        for core_id, session in list(self.sessions.items()):
            is_known = is_complete or session.entry.replica_id in reported
            if is_known and core_id not in reachable:
                del self.sessions[core_id]
                self.router.remove_replica(core_id)
                self._close_later(session, _end_of(session, reported))
        for core_id, entry in reachable.items():
            if core_id not in self.sessions:
                session = EngineSession(entry, self.router, self._identity, self._note_change)
                self.sessions[core_id] = session
                session.open()
            self.sessions[core_id].update(entry, entry.replica_id in gone)
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

    def _close_later(self, session: EngineSession, error: EngineLost) -> None:
        task = asyncio.create_task(session.close(error))
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
        on_close: Callable[[Generation, Decision], None] = lambda generation, decision: None,
    ) -> Started:
        """Prepares a request, chooses an engine, and returns once that has accepted it.

        Raises what `Preprocessor.prepare` does, `TooManyOpen`, `RequestRejected`, or
        `ModelNotReady`."""
        end_s = time.monotonic() + self._identity.settings.ingress.hold_s
        while self._preprocessor is None or (info := self._known_info()) is None:
            await self._hold(end_s, is_new=True)
        times = RequestTimes()
        domain = request.cache_domain
        root = key_root(self._identity.secret, info.fingerprint, domain, info.block_size)
        prepared = await self._preprocessor.prepare(request_id, request, ModelLimits.of(info), root)
        max_tokens = prepared.choices[0].sampling.max_tokens
        keys = prepared.block_keys
        num_tokens, session = prepared.num_prompt_tokens, request.session
        route = RouteRequest(request_id, keys, num_tokens, max_tokens, session)
        times.prepared_s = time.perf_counter()
        wish = Wish(route, prepared.choices, Case(), end_s, is_new=True)
        num_tokens += len(prepared.choices) * max_tokens
        self.open_requests.enter(num_tokens, self._identity.settings.ingress)

        def leave() -> None:
            self.open_requests.leave(num_tokens, time.perf_counter() - times.arrived_s)

        try:
            placed = await self.placer.place(wish)
        except BaseException:
            leave()
            raise
        times.routed_s, times.accepted_s = placed.routed_s, time.perf_counter()
        origin = Origin(self.placer, root, keys, wish.case, session)
        streams = [
            ResumableStream(origin, choice, placed, index)
            for index, choice in enumerate(prepared.choices)
        ]
        tokenizer = self._preprocessor.tokenizer

        def close(generation: Generation) -> None:
            leave()
            on_close(generation, placed.decision)

        generation = Generation(prepared, streams, tokenizer, times, close)
        return Started(generation, tokenizer, placed.decision, info.fingerprint, streams)

    # ------------------------------------------------------------ waiting for an engine

    async def _hold(self, end_s: float, is_new: bool) -> None:
        """Until something has changed that may help. Raises `ModelNotReady` when nothing will, or
        at `end_s`, and `ModelReplaced`. What runs already is held however many are."""
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
        if is_new and self.num_held >= settings.max_held:
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
        self.placer.note_change()
        for session in self.sessions.values():
            if session.is_draining:
                # There may be an engine now that takes what runs there.
                session.ask_to_move()

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


def _end_of(session: EngineSession, reported: Mapping[str, EngineEntry]) -> EngineLost:
    """Why a session ends that the directory no longer has: a core that failed is still on it, by
    its replica, one that was taken out in order is not."""
    if session.is_draining or session.entry.replica_id not in reported:
        return EngineLost(f"engine {session.core_id} was taken out")
    return EngineDied(f"engine {session.core_id} has ended")


def _load_tokenizer(source: str) -> Tokenizer:
    return Tokenizer.load(resolve_tokenizer(source))
