"""How much of one model an ingress takes on at a time, and how often it tries again. Pure.

Invariant: what is open never exceeds a limit, one request that is larger by itself apart; and when
engines refuse what they are sent, trying others adds no more than a share to that traffic.
"""

from dataclasses import dataclass

from configs.shoal import IngressConfig
from engine.errors import ShoalError

_WEIGHT = 0.1
"""Of the newest request in how long one takes."""
_MIN_RETRIES = 10.0
"""That may be saved up: a few requests must not go without."""


class TooManyOpen(ShoalError):
    """The limit of one ingress for one model is reached."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class OpenRequests:
    """Those of one model that this ingress has begun and not ended."""

    count: int = 0
    tokens: int = 0
    """Of prompts, and the most that their outputs may have."""
    usual_s: float = 0.0
    """How long one is open, of late."""

    def enter(self, tokens: int, config: IngressConfig) -> None:
        """Raises `TooManyOpen`. What has entered must `leave`."""
        if self.count >= config.max_open_requests:
            text = f"{self.count} requests of this model are open, the most allowed"
        elif self.count and self.tokens + tokens > config.max_open_tokens:
            text = (
                f"{self.tokens + tokens} tokens of this model would be open, prompts and "
                f"max_tokens together; {config.max_open_tokens} may"
            )
        else:
            self.count += 1
            self.tokens += tokens
            return
        # One of them ends after this long, on average.
        raise TooManyOpen(text, self.usual_s / self.count)

    def leave(self, tokens: int, seconds: float) -> None:
        """One that entered with `tokens` has ended after `seconds`."""
        self.count -= 1
        self.tokens -= tokens
        self.usual_s += (seconds - self.usual_s) * (_WEIGHT if self.usual_s else 1.0)


@dataclass(slots=True)
class RetryBudget:
    """Each request earns a share of a retry; a retry spends a whole one."""

    saved: float = _MIN_RETRIES

    def earn(self, share: float) -> None:
        self.saved = min(self.saved + share, max(_MIN_RETRIES, 100 * share))

    def spend(self) -> bool:
        """Whether one more try may be made."""
        if self.saved < 1:
            return False
        self.saved -= 1
        return True
