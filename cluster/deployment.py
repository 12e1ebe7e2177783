"""The ingress as a Ray Serve application.

Invariant: what Serve pickles is settings and a handle, never an open socket or a tokenizer: every
replica builds its own application when it starts.
"""

from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.ingress import IngressSettings, build_app

_MAX_ONGOING_REQUESTS = 4096
"""The engine's own queue is the limit that clients meet; this one only bounds memory."""


def ingress_application(settings: IngressSettings, engine: Any) -> Any:
    """An application to hand to `serve.run`. `engine` is an `EngineActor` handle: its end is known
    at once from the actor, sooner than from its silence."""

    async def until_engine_ends() -> None:
        await engine.wait.remote()

    def build() -> FastAPI:
        return build_app(settings, until_engine_ends)

    class Ingress:
        """Nothing of its own: the application is the FastAPI one."""

    deployment: Any = serve.deployment(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(build)(Ingress))
    return deployment.bind()
