"""The HTTP front of one model: routes, limits and the life of what they share.

Invariant: nothing here needs Ray or torch. One `build_app` makes the application for Ray Serve and,
with uvicorn alone, for tests.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cluster import errors
from cluster.body_limit import BodyLimit
from cluster.chat import AnswerHead, ClientGone, EventStream, whole_answer
from cluster.errors import ModelNotFound
from cluster.generation import Generation
from cluster.link import EngineLink
from cluster.openai import ChatCompletionRequest, ModelCard, ModelList, now_s
from cluster.preprocess import ModelLimits, Preprocessor
from cluster.tokenizer import Tokenizer
from engine.errors import EngineLost

_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody receives it, logs show it."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What an ingress is told when it starts."""

    model_name: str
    """As clients call it."""
    model_folder: Path
    """Holds the tokenizer and the chat template."""
    engine_endpoint: str
    max_body_bytes: int = 8 << 20
    created: int = field(default_factory=now_s)


class ModelIngress:
    """The parts of an ingress for one model, and the handlers that use them."""

    def __init__(
        self,
        settings: IngressSettings,
        until_engine_ends: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer.load(settings.model_folder)
        self._preprocessor = Preprocessor(self._tokenizer)
        self._link = EngineLink(settings.engine_endpoint, until_engine_ends)

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        self._link.open()
        try:
            yield
        finally:
            await self._link.close()
            self._preprocessor.close()

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        if body.model != self._settings.model_name:
            raise ModelNotFound(body.model, [self._settings.model_name])
        client = self._link.client
        info = client.info
        assert info is not None
        request_id = f"chatcmpl-{secrets.token_hex(12)}"
        prepared = await self._preprocessor.prepare(
            request_id, body.as_generation(), ModelLimits.of(info)
        )
        head = AnswerHead(request_id, now_s(), body.model, f"fp_{info.fingerprint[:12]}")
        generation = await Generation.start(client, prepared, self._tokenizer)
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(generation, head, self._tokenizer, include_usage)
        try:
            answer = await whole_answer(generation, head, self._tokenizer, request)
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def models(self) -> ModelList:
        return ModelList(data=[await self.model(self._settings.model_name)])

    async def model(self, name: str) -> ModelCard:
        if name != self._settings.model_name:
            raise ModelNotFound(name, [self._settings.model_name])
        with contextlib.suppress(EngineLost):
            info = self._link.client.info
            length = info.max_model_len if info is not None else None
            return ModelCard(id=name, created=self._settings.created, max_model_len=length)
        return ModelCard(id=name, created=self._settings.created)

    async def health(self) -> JSONResponse:
        """200 while there is a session with the engine, with its last load report; 503 else."""
        try:
            follower = self._link.client.follower
        except EngineLost as error:
            return JSONResponse({"status": "unavailable", "reason": str(error)}, 503)
        load = follower.load if follower is not None else None
        engine: dict[str, Any] | None = None
        if load is not None:
            engine = {
                "running": load.running,
                "waiting": load.waiting,
                "used_blocks": load.used_blocks,
                "num_blocks": load.num_blocks,
            }
        return JSONResponse({"status": "ok", "engine": engine})


def build_app(
    settings: IngressSettings, until_engine_ends: Callable[[], Awaitable[None]] | None = None
) -> FastAPI:
    """The application of one ingress; its session with the engine opens and closes with it."""
    ingress = ModelIngress(settings, until_engine_ends)
    app = FastAPI(title="Shoal", lifespan=ingress.running, docs_url=None, redoc_url=None)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.post("/v1/chat/completions", response_model=None)(ingress.chat_completions)
    app.get("/v1/models")(ingress.models)
    app.get("/v1/models/{name:path}")(ingress.model)
    app.get("/health", response_model=None)(ingress.health)
    return app
