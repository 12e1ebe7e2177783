"""What all models of one ingress have in common: who it is, and the settings that may change."""

import secrets
from dataclasses import dataclass, field
from typing import Self

from configs.shoal import FailoverConfig, IngressConfig, RouterConfig
from engine.curve import CurveKeys


@dataclass(slots=True)
class LiveSettings:
    """What may change while an ingress serves; read where it is used."""

    ingress: IngressConfig = field(default_factory=IngressConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)


@dataclass(frozen=True, slots=True)
class IngressIdentity:
    """What all models of an ingress have in common."""

    ingress_id: str
    secret: bytes = field(repr=False)
    """Keys the prefix hash. If the engines have another, no prefix is ever found to be cached, and
    over the network there is no session."""
    settings: LiveSettings = field(default_factory=LiveSettings)
    curve: CurveKeys = field(init=False, repr=False)
    """From the secret, for connections over the network."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "curve", CurveKeys.derive(self.secret))

    @classmethod
    def random(cls, secret: bytes | None = None) -> Self:
        """One that no other ingress has."""
        return cls(f"ingress-{secrets.token_hex(6)}", secret or secrets.token_bytes(32))
