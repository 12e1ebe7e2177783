"""A bound on what one request can make the ingress hold in memory.

Invariant: no more than the limit of a request's body is ever read, announced or not. (Starlette's
own middleware of this kind answers in plain text, without the limit, and recent versions only.)
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import Failure


class BodyLimit:
    """ASGI middleware: a 413 that states the limit."""

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._max_bytes()
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        # Twenty digits are more than any size; a longer number is one nobody should parse.
        if not announced.isdigit() or len(announced) > 20 or int(announced) > limit:
            await _refuse(limit, scope, receive, send)
            return
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > limit:
                raise _BodyTooLarge
            return message

        try:
            await self._app(scope, counted, send)
        except _BodyTooLarge:
            await _refuse(limit, scope, receive, send)


async def _refuse(limit: int, scope: Scope, receive: Receive, send: Send) -> None:
    message = f"the request body may have at most {limit} bytes"
    failure = Failure(413, message, "invalid_request_error", code="request_too_large")
    await failure.as_response()(scope, receive, send)


class _BodyTooLarge(BaseException):
    """Not an `Exception`, so that it passes through the framework's own handlers."""
