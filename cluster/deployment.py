"""The ingress as a Ray Serve application.

Invariant: what Serve pickles is paths and settings, never a secret, an open socket or a tokenizer:
every replica builds its own application when it starts. All else it is told by Serve's
`reconfigure`, the whole configuration, which it then tells the Registry.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from ray import serve

from cluster.haproxy import LONGEST_STREAM_S
from cluster.identity import IngressIdentity
from cluster.ingress import Ingress, build_app
from configs.secret import read_secret
from configs.section import Section
from configs.shoal import RegistryConfig, ShoalConfig
from replicas.directory import DirectoryView, ModelEntry
from replicas.registry import ensure_registry
from replicas.supervisor import model_entry

logger = logging.getLogger(__name__)

DEPLOYMENT = "Ingress"
_MAX_ONGOING_REQUESTS = 4096
"""The engines' own queues are the limit that clients meet; this one only bounds memory."""
_WATCH_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 1.0
_RETRY_S = 1.0


class RegistryDirectory:
    """Views of the directory from the Registry actor, which is told which models there are to be:
    by every ingress, whenever that or the Registry is new."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._registry: Any = None
        self._models: tuple[ModelEntry, ...] = ()
        self._told_boot_id = ""

    async def announce(self, models: tuple[ModelEntry, ...]) -> None:
        """These are the models from now on."""
        self._models, self._told_boot_id = models, ""
        try:
            await self._tell()
        except Exception as error:
            logger.warning("the Registry does not answer (%s); it will be told later", error)

    async def next_view(self, known: DirectoryView | None) -> DirectoryView:
        if self._models and known is not None and self._told_boot_id != known.boot_id:
            await self._tell()
            self._told_boot_id = known.boot_id
        boot_id, version = (known.boot_id, known.version) if known is not None else ("", 0)
        registry = await self._find()
        view: DirectoryView = await registry.watch.remote(boot_id, version, _WATCH_TIMEOUT_S)
        return view

    async def ask_others(self, question: str) -> bytes | None:
        registry = await self._find()
        answer: bytes | None = await registry.ask.remote(question, _ANSWER_TIMEOUT_S)
        return answer

    async def answer_others(self, answer: Callable[[str], bytes | None]) -> None:
        last = 0
        while True:
            try:
                registry = await self._find()
                questions = await registry.next_questions.remote(last, _WATCH_TIMEOUT_S)
                for number, text in questions:
                    if (found := answer(text)) is not None:
                        await registry.answer.remote(number, found)
                    last = max(last, number)
            except Exception as error:
                logger.warning("the Registry does not answer (%s); asking again", error)
                await asyncio.sleep(_RETRY_S)

    async def _tell(self) -> None:
        await (await self._find()).set_models.remote(self._models)

    async def _find(self) -> Any:
        if self._registry is None:
            config = self._config
            self._registry = await asyncio.to_thread(ensure_registry, config.lease_s, config.path)
        return self._registry


class IngressReplica:
    """One ingress under Serve, which makes the class an ASGI application."""

    def __init__(self, secret_file: str, registry_json: str) -> None:
        registry = RegistryConfig.model_validate_json(registry_json)
        self._directory = RegistryDirectory(registry)
        identity = IngressIdentity.random(read_secret(Path(secret_file)))
        self._ingress = Ingress(identity, self._directory)

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve's name for it
        return build_app(self._ingress)

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """`config`: the whole tree. What of it needs a restart has come by other ways."""
        config = ShoalConfig.model_validate(live["config"])
        self._ingress.configure(config.ingress, config.router, config.failover)
        await self._directory.announce(tuple(map(model_entry, config.models)))


class IngressArguments(Section):
    """What identifies the ingress; a change restarts it."""

    cluster_secret_file: str = Field(description="As in `ShoalConfig`.")
    registry: RegistryConfig = Field(default_factory=RegistryConfig)


def ingress_application(
    arguments: IngressArguments, options: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """An application for Serve; `options` are those of `live_options`."""
    fixed = {
        "name": DEPLOYMENT,
        "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
        # Serve counts a stream as a request, and waits so long for the last one to end.
        "graceful_shutdown_timeout_s": LONGEST_STREAM_S,
        "ray_actor_options": {"num_cpus": 0},
    }
    deployment: Any = serve.deployment(**{**fixed, **options})(serve.ingress()(IngressReplica))
    registry_json = arguments.registry.model_dump_json()
    return deployment.bind(arguments.cluster_secret_file, registry_json)


def live_options(config: ShoalConfig) -> dict[str, Any]:
    """Options of the deployment that may change while it runs, as JSON."""
    tree = config.model_dump(mode="json")
    return {"num_replicas": config.ingress.replicas, "user_config": {"config": tree}}
