"""Where copies between a device and its host run: streams, and events between them.

Invariant: what is given to one stream happens in that order; between two streams nothing is ordered
but by an event. A stream takes work and returns at once; only `CopyEvent.synchronize` keeps the
caller waiting.
"""

from typing import Any, Protocol

import torch

# Its classes are not typed.
_cuda: Any = torch.cuda


class CopyEvent(Protocol):
    """A moment in a stream's work. Use from any thread."""

    def query(self) -> bool:
        """It has come."""
        ...

    def synchronize(self) -> None:
        """Waits for it."""
        ...


class CopyStream(Protocol):
    """Work that a device does in order."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `source` to `target`, of one shape and dtype. Both stay as they are, and where
        they are, until the copy is done."""
        ...

    def record_event(self) -> CopyEvent:
        """The moment when all that the stream has been given so far is done."""
        ...

    def wait_event(self, event: Any) -> None:
        """What the stream is given from now on begins after `event`, of any stream."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class ImmediateStream:
    """On a CPU: all that it is given is done when the call returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record_event(self) -> CopyEvent:
        return _Done()

    def wait_event(self, event: CopyEvent) -> None:
        """Everything has happened already."""


class CudaStream:
    """A stream of a GPU: the current one of whoever calls, or one of its own."""

    def __init__(self, device: torch.device, is_own: bool) -> None:
        self._device = device
        self._own: Any = _cuda.Stream(device) if is_own else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # What torch needs in between, where a side is not contiguous, it takes from this stream.
        with _cuda.stream(self._stream()):
            target.copy_(source, non_blocking=True)

    def record_event(self) -> CopyEvent:
        # Whoever waits for it sleeps, and burns no core.
        event: CopyEvent = self._stream().record_event(_cuda.Event(blocking=True))
        return event

    def wait_event(self, event: Any) -> None:
        self._stream().wait_event(event)

    def _stream(self) -> Any:
        return _cuda.current_stream(self._device) if self._own is None else self._own


def copy_streams(device: torch.device) -> tuple[CopyStream, CopyStream]:
    """The stream that steps run on, and one for copies."""
    if device.type != "cuda":
        return ImmediateStream(), ImmediateStream()
    return CudaStream(device, is_own=False), CudaStream(device, is_own=True)
