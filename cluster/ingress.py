"""The HTTP front: routes, limits and the life of what they share.

Invariant: nothing here needs Ray or torch. One `build_app` makes the application for Ray Serve and,
with uvicorn alone, for tests. A status line goes out only after an engine has accepted.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cluster import errors
from cluster.answer import Dialect, Output, respond
from cluster.body_limit import BodyLimit
from cluster.chat import ChatCompletionRequest, ChatDialect
from cluster.completions import CompletionDialect, CompletionRequest
from cluster.explain import PROXY_HEADER, Trace, Traces, proxy_s
from cluster.fan_out import merged, start_each
from cluster.fleet import DirectorySource, Fleet
from cluster.generation import Generation
from cluster.identity import IngressIdentity
from cluster.metrics import IngressMetrics
from cluster.openai import (
    MAX_SESSION_CHARS,
    AnswerHead,
    ModelCard,
    ModelList,
    SamplingRequest,
    now_s,
)
from cluster.preprocess import GenerationRequest, InvalidRequest
from cluster.routing.decision import Decision
from cluster.routing.index import PrefixIndex
from cluster.served_model import ModelReplaced, ServedModel, Started
from configs.shoal import FailoverConfig, IngressConfig, RouterConfig
from engine.observer import Followed
from engine.wire import LoadReport
from replicas.directory import EngineState, model_state


class Ingress:
    """The parts of one ingress, and the handlers that use them."""

    def __init__(self, identity: IngressIdentity, source: DirectorySource) -> None:
        self._identity = identity
        self._created = now_s()
        self._fleet = Fleet(source, identity)
        self._source = source
        self._traces = Traces(identity.ingress_id)
        self._metrics = IngressMetrics(self._loads, self._held, self._moves, self._caches)

    @property
    def config(self) -> IngressConfig:
        return self._identity.settings.ingress

    def configure(
        self,
        ingress: IngressConfig,
        router: RouterConfig,
        failover: FailoverConfig | None = None,
    ) -> None:
        """Takes over live settings; they count from the next request on."""
        settings = self._identity.settings
        settings.ingress, settings.router = ingress, router
        settings.failover = failover or FailoverConfig()
        for model in self._fleet.models.values():
            model.router.configure(router)

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        following = [
            asyncio.create_task(self._fleet.run()),
            asyncio.create_task(self._source.answer_others(self._explanation)),
        ]
        try:
            yield
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await self._fleet.close()

    # ------------------------------------------------------------ generation

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        request_id = f"chatcmpl-{secrets.token_hex(12)}"
        proxied_s = _proxy_s(request)
        (generation,) = self._with_session(request, [body.as_generation()])
        started = await self._start(body.model, proxied_s, request_id, generation)
        head = AnswerHead(request_id, now_s(), body.model, f"fp_{started.fingerprint[:12]}")
        dialect = ChatDialect(head, started.tokenizer, body.include_usage)
        response = await self._respond(started.generation, dialect, body, request)
        response.headers.update(_tracing(request_id, started))
        return response

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        request_id = f"cmpl-{secrets.token_hex(12)}"
        start = partial(self._start, body.model, _proxy_s(request))
        generations = self._with_session(request, body.as_generations())
        started = await start_each(start, request_id, generations)
        first = started[0]
        head = AnswerHead(request_id, now_s(), body.model, f"fp_{first.fingerprint[:12]}")
        echoed = body.echoed(first.tokenizer)
        dialect = CompletionDialect(head, first.tokenizer, body.include_usage, echoed)
        output = merged([one.generation for one in started], body.num_choices)
        response = await self._respond(output, dialect, body, request)
        response.headers.update(_tracing(request_id, first))
        return response

    async def _respond(
        self, output: Output, dialect: Dialect, body: SamplingRequest, request: Request
    ) -> Response:
        keep_alive_s = self.config.keep_alive_s
        return await respond(output, dialect, request, bool(body.stream), keep_alive_s)

    def _with_session(
        self, request: Request, generations: Sequence[GenerationRequest]
    ) -> Sequence[GenerationRequest]:
        """The session that a header names goes before what the body says."""
        name = self.config.session_header
        value = request.headers.get(name)
        if value is None:
            return generations
        if len(value) > MAX_SESSION_CHARS:
            text = f"at most {MAX_SESSION_CHARS} characters, got {len(value)}"
            raise InvalidRequest(name, f"the header {name} may have {text}")
        return [replace(each, session=value.encode()) for each in generations]

    async def _start(
        self, model_name: str, proxied_s: float, request_id: str, request: GenerationRequest
    ) -> Started:
        """Starts a request on the model of this name or alias, counts it, and keeps its trace. A
        proxy had it for `proxied_s`."""
        while True:
            model = self._fleet.model(model_name)
            name = model.entry.name
            try:
                ended = partial(self._ended, name, request_id)
                started = await model.start(request_id, request, ended)
            except ModelReplaced:
                continue
            except Exception as error:
                self._metrics.answered(name, errors.failure_of(error).status)
                raise
            self._metrics.answered(name, 200)
            self._metrics.routed(name, started.decision)
            decisions = started.streams[0].decisions
            trace = Trace(request_id, name, decisions, started.generation, proxied_s)
            self._traces.add(trace, self.config.explained_requests)
            return started

    def _ended(
        self, model: str, request_id: str, generation: Generation, decision: Decision
    ) -> None:
        self._metrics.ended(model, generation, decision)
        self._traces.close(request_id)

    # ------------------------------------------------------------ explanations

    async def explain(self, request_id: str) -> Response:
        """Why a request of any ingress went where it went, and where its time went."""
        body = self._explanation(request_id)
        if body is None:
            with contextlib.suppress(Exception):
                body = await self._source.ask_others(request_id)
        if body is None:
            return errors.not_traced(request_id, self.config.explained_requests).as_response()
        return Response(body, media_type="application/json")

    def _explanation(self, request_id: str) -> bytes | None:
        # Of several prompts in one request, the first.
        found = self._traces.explain(request_id) or self._traces.explain(f"{request_id}-0")
        return None if found is None else msgspec.json.encode(found)

    # ------------------------------------------------------------ models and state

    async def models(self) -> ModelList:
        """Every model with its aliases, ready or not."""
        names = [
            name
            for model in self._fleet.models.values()
            for name in (model.entry.name, *model.entry.aliases)
        ]
        return ModelList(data=[self._card(name) for name in names])

    async def model(self, name: str) -> ModelCard:
        return self._card(name)

    def _card(self, name: str) -> ModelCard:
        length = self._fleet.model(name).max_model_len
        return ModelCard(id=name, created=self._created, max_model_len=length)

    async def health(self) -> JSONResponse:
        """200 while this ingress lives: what engines do is for `/ready` to tell."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """Each model and its engines; 200 when at least one model can be served."""
        models = {name: self._state(model) for name, model in self._fleet.models.items()}
        is_ready = any(state["state"] == EngineState.READY for state in models.values())
        body = {"status": "ready" if is_ready else "not ready", "models": models}
        return JSONResponse(body, 200 if is_ready else 503)

    def _state(self, model: ServedModel) -> dict[str, Any]:
        view = self._fleet.view
        assert view is not None
        name = model.entry.name
        state = model_state(view, name)
        if state is EngineState.READY and not model.is_ready:
            state = EngineState.LOADING
        engines = [
            {
                "id": entry.replica_id,
                "state": entry.state,
                "detail": entry.detail,
                "pid": entry.pid,
                "restarts": entry.restarts,
                "last_error": entry.last_error,
                **self._load_fields(model, entry.core_id),
            }
            for entry in view.engines
            if entry.model == name
        ]
        return {"state": state, "detail": model.failure, "engines": engines}

    @staticmethod
    def _load_fields(model: ServedModel, core_id: str) -> dict[str, int]:
        session = model.sessions.get(core_id)
        if session is None or session.load is None:
            return {}
        names = ("running", "waiting", "max_num_seqs", "used_blocks", "num_blocks")
        return {name: getattr(session.load, name) for name in names}

    def _loads(self) -> Iterator[tuple[str, str, LoadReport]]:
        for name, model in self._fleet.models.items():
            for core_id, session in model.sessions.items():
                if session.load is not None:
                    yield name, core_id, session.load

    def _held(self) -> Iterator[tuple[str, int]]:
        for name, model in self._fleet.models.items():
            yield name, model.num_held

    def _caches(self) -> Iterator[tuple[str, PrefixIndex, Mapping[str, Followed]]]:
        for name, model in self._fleet.models.items():
            followed = {
                core_id: followed
                for core_id, session in model.sessions.items()
                if (followed := session.followed) is not None
            }
            yield name, model.router.index, followed

    def _moves(self) -> Iterator[tuple[str, str, int]]:
        for name, model in self._fleet.models.items():
            for kind in ("resumed", "moved", "condemned"):
                yield name, kind, model.placer.counts[kind]

    async def metrics(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


def _proxy_s(request: Request) -> float:
    return proxy_s(request.headers.get(PROXY_HEADER), time.time())


def _tracing(request_id: str, started: Started) -> dict[str, str]:
    """Headers that say which request this was, and which engine took it."""
    return {"X-Request-Id": request_id, "X-Shoal-Engine": started.decision.replica_id}


def build_app(ingress: Ingress) -> FastAPI:
    """The application of one ingress; its sessions with engines open and close with it."""
    app = FastAPI(title="Shoal", lifespan=ingress.running, docs_url=None, redoc_url=None)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=lambda: ingress.config.max_body_bytes)
    app.post("/v1/chat/completions", response_model=None)(ingress.chat_completions)
    app.post("/v1/completions", response_model=None)(ingress.completions)
    app.get("/v1/models")(ingress.models)
    app.get("/v1/models/{name:path}")(ingress.model)
    app.get("/health", response_model=None)(ingress.health)
    app.get("/ready", response_model=None)(ingress.ready)
    app.get("/metrics", response_model=None)(ingress.metrics)
    app.get("/explain/{request_id}", response_model=None)(ingress.explain)
    return app
