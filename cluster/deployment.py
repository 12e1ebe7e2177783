"""The ingress as a Ray Serve application.

Invariant: what Serve pickles is paths and settings, never a secret, an open socket or a tokenizer:
every replica builds its own application when it starts.
"""

import secrets
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.ingress import IngressSettings, build_app
from configs.secret import read_secret
from configs.shoal import IngressConfig, RouterConfig
from replicas.directory import DirectoryView
from replicas.registry import find_registry

_MAX_ONGOING_REQUESTS = 4096
"""The engines' own queues are the limit that clients meet; this one only bounds memory."""
_WATCH_TIMEOUT_S = 5.0


class RegistryDirectory:
    """Views of the directory from the Registry actor."""

    def __init__(self) -> None:
        self._registry: Any = None

    async def next_view(self, known: DirectoryView | None) -> DirectoryView:
        if self._registry is None:
            self._registry = find_registry()
        boot_id, version = (known.boot_id, known.version) if known is not None else ("", 0)
        view: DirectoryView = await self._registry.watch.remote(boot_id, version, _WATCH_TIMEOUT_S)
        return view


def ingress_application(ingress: IngressConfig, router: RouterConfig, secret_file: str) -> Any:
    """An application to hand to `serve.run`."""

    def build() -> FastAPI:
        settings = IngressSettings(
            secret=read_secret(secret_file),
            router=router,
            max_body_bytes=ingress.max_body_bytes,
            keep_alive_s=ingress.keep_alive_s,
            ingress_id=f"ingress-{secrets.token_hex(6)}",
        )
        return build_app(settings, RegistryDirectory())

    class Ingress:
        """Nothing of its own: the application is the FastAPI one."""

    deployment: Any = serve.deployment(
        name="Ingress",
        num_replicas=ingress.replicas,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(build)(Ingress))
    return deployment.bind()
