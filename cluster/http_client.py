"""The little HTTP that commands need to talk to a running Shoal."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from engine.errors import ShoalError

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_TIMEOUT_S = 10.0


class ServerError(ShoalError):
    """The server cannot be reached, or has refused; the text is its own reason."""


def get_json(url: str, path: str) -> Any:
    """The answer's JSON, whatever its status. Raises `ServerError` if there is none."""
    return json.loads(_request(url, "GET", path).read())


def stream_events(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Posts `body` and yields each server-sent event's JSON, as it comes, up to `[DONE]`."""
    response = _request(url, "POST", path, json.dumps(body))
    if response.status != http.HTTPStatus.OK:
        raise ServerError(_reason(json.loads(response.read())))
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(_reason(event))
        yield event


def _request(url: str, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_CONNECT_TIMEOUT_S)
    try:
        connection.connect()
        # Connected, it may think as long as it likes.
        connection.sock.settimeout(None)
        connection.request(method, parts.path.rstrip("/") + path, body, _HEADERS)
        return connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"no answer from {url}: {error}") from error


_HEADERS = {"Content-Type": "application/json"}


def _reason(body: dict[str, Any]) -> str:
    return str(body.get("error", {}).get("message", body))
