"""Every failure of a request as an HTTP status and an OpenAI-shaped body.

Invariant: a client's mistake is a 4xx that names the field, the limit and the value; a busy or lost
engine is a 503 with `Retry-After`; nothing of the server's insides (paths, addresses, tracebacks)
is in any text.
"""

import logging
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cluster.fan_out import PromptTooLong
from cluster.fleet import ModelNotFound
from cluster.generation import GenerationFailed
from cluster.limits import TooManyOpen
from cluster.openai import ErrorBody, ErrorDetail
from cluster.placing import RequestCondemned
from cluster.preprocess import InvalidRequest
from cluster.served_model import ModelNotReady
from engine.errors import EngineLost, RequestRejected, ShoalError
from engine.wire import FinishReason, RejectCode

logger = logging.getLogger(__name__)

_MAX_VALUE_CHARS = 80
_MAX_FIELD_CHARS = 200
_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1, 60
_ALTERNATIVES = ("function-after[", "list[")
"""How pydantic names the members of a union."""

_GIVEN_UP = {
    FinishReason.ABORT: (503, "engine_unavailable"),
    FinishReason.QUEUE_TIMEOUT: (503, "queue_timeout"),
}
"""Status and code of what an engine accepted and gave up, where that was no error."""
_INVALID = "invalid_request_error"
_SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request, as its client is told."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 0.0
    """0: not known."""

    @property
    def body(self) -> bytes:
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump_json().encode()

    def as_response(self) -> Response:
        headers = None
        if self.status in (429, 503):
            after_s = math.ceil(min(self.retry_after_s, _MAX_RETRY_AFTER_S))
            headers = {"Retry-After": str(max(after_s, _MIN_RETRY_AFTER_S))}
        return Response(self.body, self.status, headers, media_type="application/json")


def failure_of(error: Exception) -> Failure:
    """The failure that a client is told of; what is none of Shoal's errors is logged and blank."""
    match error:
        case ModelNotFound():
            return Failure(404, str(error), _INVALID, "model", "model_not_found")
        case ModelNotReady():
            return Failure(503, str(error), _SERVER, code="model_not_ready")
        case TooManyOpen(retry_after_s=after_s):
            return Failure(
                429, str(error), _SERVER, code="too_many_requests", retry_after_s=after_s
            )
        case InvalidRequest(field=field):
            return Failure(400, str(error), _INVALID, field, "invalid_value")
        case PromptTooLong(field=field):
            return Failure(400, str(error), _INVALID, field, "context_length_exceeded")
        case RequestRejected():
            return _rejected(error)
        case EngineLost():
            logger.warning("engine lost: %s", error)
            text = "the engine of this model is not available; try again"
            return Failure(503, text, _SERVER, code="engine_unavailable")
        case RequestCondemned():
            return Failure(500, str(error), _SERVER, code="request_kills_engines")
        case GenerationFailed(reason=reason):
            status, code = _GIVEN_UP.get(reason, (500, "generation_failed"))
            return Failure(status, str(error), _SERVER, code=code)
        case _:
            logger.error("request failed", exc_info=error)
            return Failure(500, "internal error", _SERVER, code="internal_error")


def not_traced(request_id: str, most: int) -> Failure:
    """No ingress knows the request (any more)."""
    text = f"no request {request_id[:80]!r} among the latest {most} of any ingress"
    return Failure(404, text, _INVALID, "request_id", "not_found")


def _rejected(error: RequestRejected) -> Failure:
    match error.code:
        case RejectCode.INVALID:
            return Failure(400, error.message, _INVALID, code="invalid_value")
        case RejectCode.CONTEXT_LENGTH:
            return Failure(400, error.message, _INVALID, "messages", "context_length_exceeded")
        case _:
            after_s = error.retry_after_s
            return Failure(
                503, error.message, _SERVER, code=error.code.value, retry_after_s=after_s
            )


def install(app: FastAPI) -> None:
    """Makes every failure of `app` answer in this form."""

    async def on_error(_: Request, error: Exception) -> Response:
        return failure_of(error).as_response()

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid_body(error.errors()).as_response()

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Failure(error.status_code, str(error.detail), _INVALID).as_response()

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ShoalError, on_error)
    app.add_exception_handler(Exception, on_error)


def _invalid_body(problems: Sequence[Any]) -> Failure:
    """The first problem, in one sentence: field, limit, value."""
    problem = _most_telling(problems)
    path = [str(part) for part in problem["loc"] if part != "body" and not _is_alternative(part)]
    field = _printable(".".join(path))[:_MAX_FIELD_CHARS] or None
    kind, reason = problem["type"], str(problem["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        reason = problem.get("ctx", {}).get("error", "it cannot be parsed")
        return Failure(400, f"the body is not valid JSON: {_printable(reason)}", _INVALID)
    if kind == "extra_forbidden":
        message, code = f"{field}: this field is unknown or not supported", "unknown_parameter"
    elif kind == "missing":
        message, code = f"{field or 'body'}: this field is required", "missing_required_parameter"
    else:
        got = "" if field is None else f", got {_shown(problem['input'])}"
        message, code = f"{field or 'body'}: {_printable(reason)}{got}", "invalid_value"
    return Failure(400, message, _INVALID, field, code)


def _is_alternative(part: object) -> bool:
    return isinstance(part, str) and part.startswith(_ALTERNATIVES)


def _most_telling(problems: Sequence[Any]) -> Any:
    """The first problem. If a field can be one of several types, each has its own: then one that
    is about more than the type, as far inside the value as there is one."""
    loc = problems[0]["loc"]
    depth = next((i for i, part in enumerate(loc) if _is_alternative(part)), len(loc))
    same_field = [problem for problem in problems if problem["loc"][:depth] == loc[:depth]]
    return max(same_field, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))


def _shown(value: object) -> str:
    """A value can be as large as a body: no more of it is rendered than is shown."""
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxlong = _MAX_VALUE_CHARS
    text = _printable(shorten.repr(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def _printable(text: str) -> str:
    """JSON may hold lone surrogates, which no answer can carry."""
    return text.encode("utf-8", "backslashreplace").decode()
