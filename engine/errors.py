"""Errors that a caller of the engine can act on."""

from engine.wire import RejectCode


class ShoalError(Exception):
    """Base of Shoal's own errors. Its text is fit for the user who caused it."""


class ModelRefused(ShoalError):
    """A model that this engine cannot serve correctly, with the reason."""


class ConfigurationError(ShoalError):
    """A configuration that cannot work on this machine, with both figures."""


class RequestRejected(ShoalError):
    """One request that cannot be taken."""

    def __init__(self, code: RejectCode, message: str, retry_after_s: float = 0.0) -> None:
        """`retry_after_s`: when it may be worth trying again; 0: not known."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class EngineLost(ShoalError):
    """The engine died, restarted, or no longer knows this ingress: the attempt is over, the request
    can be added elsewhere with its output so far."""


class EngineDied(EngineLost):
    """Its process has ended, or it hangs: something that it computed may be the cause."""


class EngineSilent(EngineDied):
    """Nothing has been heard of it for longer than its lease. It may have been gone for all that
    time: what it had not accepted is not the cause."""


class RankLost(ShoalError):
    """A rank of a tensor-parallel engine has failed, ended, or gone astray; the engine is lost with
    it."""
