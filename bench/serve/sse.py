"""Server-sent events, byte for byte as the WHATWG specification reads them.

Invariant: what comes out does not depend on how the bytes were cut on their way. Pure: bytes in,
payloads out. Only `data` matters here; `event`, `id`, `retry` and comments are read past.
"""

_BOM = b"\xef\xbb\xbf"
_MAX_EVENT_BYTES = 16 << 20


class EventTooLarge(Exception):
    """An event without an end: no server of ours to read."""


class SseParser:
    """Feeds on the body of one response. An event without its blank line at the end of the stream
    is no event, as the specification has it."""

    def __init__(self) -> None:
        self._pending = b""
        self._at_start = True
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The `data` of each event that these bytes complete.

        Raises `EventTooLarge` beyond 16 MiB without a blank line."""
        if not data:
            return []
        text = self._pending + self._with_plain_line_ends(data)
        if self._at_start:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                self._pending = text
                return []
            text = text.removeprefix(_BOM)
            self._at_start = False
        *blocks, self._pending = text.split(b"\n\n")
        if len(self._pending) > _MAX_EVENT_BYTES:
            raise EventTooLarge(f"{len(self._pending)} bytes without the end of an event")
        return [payload for block in blocks if (payload := _payload(block)) is not None]

    def _with_plain_line_ends(self, data: bytes) -> bytes:
        """CR LF and CR as LF; a CR at the end of one read may have its LF in the next."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
            if not data:
                return data
        self._after_cr = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data


def _payload(block: bytes) -> bytes | None:
    """The data lines of an event, joined; None without any."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
