"""What routing tests share: keys, reports, and a router whose figures are easy to reckon with."""

from hashlib import blake2b

import msgspec

from cache.events import BlockKey, Tier
from cluster.routing.decision import RouteRequest
from cluster.routing.router import Router
from configs.shoal import RouterConfig
from engine.wire import LoadReport

BLOCK = 16
INGRESS = "ingress-1"

IDLE = LoadReport(
    running=0,
    waiting=0,
    waiting_tokens=0,
    max_num_seqs=256,
    num_blocks=1000,
    used_blocks=0,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=0.0,
    step_s=0.02,
    step_age_s=0.0,
    preemptions=0,
    seen={},
)
"""1 ms a token of prefill."""


def report(**changes: object) -> LoadReport:
    return msgspec.structs.replace(IDLE, **changes)


def key(*parts: object) -> BlockKey:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def chain(name: object, num_blocks: int, prefix: list[BlockKey] | None = None) -> list[BlockKey]:
    """Keys of a prompt: `prefix`, then blocks of its own up to `num_blocks`."""
    keys = list(prefix or [])
    return keys + [key(name, at) for at in range(len(keys), num_blocks)]


def request(name: object, keys: list[BlockKey], extra_tokens: int = 5) -> RouteRequest:
    return RouteRequest(str(name), keys, len(keys) * BLOCK + extra_tokens, max_tokens=64)


def router(num_replicas: int = 2, ingress_id: str = INGRESS, **config: object) -> Router:
    """Replicas `r0`, `r1`, …, all idle."""
    made = Router(RouterConfig.model_validate(config), ingress_id)
    for number in range(num_replicas):
        made.add_replica(f"r{number}", BLOCK)
        made.on_load(f"r{number}", IDLE)
    return made


def hold(router: Router, replica_id: str, keys: list[BlockKey]) -> None:
    for item in keys:
        router.index.view(replica_id).add(item, Tier.DEVICE)
