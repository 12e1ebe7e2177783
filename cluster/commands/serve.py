"""`shoal serve`: models behind one HTTP port, on a Ray cluster of its own.

Invariant: whatever ends the command (Ctrl-C at any time, once or twice, or a failed start),
everything it started ends with it, and its exit code says which of them it was. An engine that dies
does not end it: its supervisor starts another.
"""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from pydantic import ValidationError

from cluster import haproxy
from cluster.commands.options import engine_config, engine_options
from cluster.commands.phases import Phases
from configs.load import load
from configs.secret import write_secret
from configs.shoal import ModelConfig, ShoalConfig
from engine.errors import ShoalError

if TYPE_CHECKING:
    from cluster.launch import Cluster
    from cluster.local_ray import LocalRay

_POLL_S = 0.2


class ServeFailed(ShoalError):
    """The server could not start, or cannot go on."""


class _Interrupted(BaseException):
    """Raised by `Interrupts.check`, never in the middle of anything."""


class Interrupts:
    """Ctrl-C, SIGTERM and a closed terminal as a flag that is looked at between steps.

    An exception in the middle of Ray's own start would leave half of it behind. The second signal
    does not wait: it kills what was started, by process id."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.ray: LocalRay | None = None

    def install(self) -> None:
        """Again after Ray's start, which brings a handler of its own."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        if self.signal is not None:
            raise _Interrupted

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            if self.ray is not None:
                self.ray.kill()
            os._exit(128 + number)
        self.signal = number
        click.echo("\nstopping (again: at once)", err=True)


@click.command()
@click.argument("config_name", metavar="[CONFIG]", required=False)
@engine_options
@click.option("--kv-host", metavar="SIZE", help="Host memory for copies of cached KV, as 4GiB.")
@click.option(
    "--kv-disk", metavar="DIR", help="Folder that keeps cached KV, so that it survives a restart."
)
@click.option("--replicas", type=click.IntRange(1, 64), help="Engines of the model.  [default: 1]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of HTTP.  [default: 8000]")
@click.option("--name", help="The model's name in the API.  [default: as in --model]")
def serve(
    config_name: str | None,
    replicas: int | None,
    port: int | None,
    name: str | None,
    **options: Any,
) -> None:
    """Serve models over HTTP, with an OpenAI-compatible API.

    CONFIG is a YAML file or the name of a preset (`shoal config`); without it one model is served,
    as the options say. It runs on a Ray cluster of its own, until Ctrl-C. Exit codes: 0 served
    and was stopped, 1 failed, 2 wrong usage, 130 or more stopped by a signal before it served.

    \b
    Examples:
      shoal serve
      shoal serve --model ./my-model --replicas 2 --port 9000
      shoal serve --kv-disk ~/.cache/shoal/kv
      shoal serve cluster.yaml --port 9000
    """
    config = _configuration(config_name, replicas, port, name, options)
    _check_port(config.ingress.host, config.ingress.port)
    interrupts = Interrupts()
    interrupts.install()
    phases = Phases()
    try:
        _serve(config, phases, interrupts)
    except _Interrupted:
        assert interrupts.signal is not None
        sys.exit(128 + interrupts.signal)
    finally:
        phases.end()


def _configuration(
    config_name: str | None,
    replicas: int | None,
    port: int | None,
    name: str | None,
    options: dict[str, Any],
) -> ShoalConfig:
    """The tree to serve. Raises `click.ClickException` for one that cannot be."""
    given = [
        "--" + key.replace("_", "-")
        for key in (*options, "replicas", "name")
        if click.get_current_context().get_parameter_source(key) is ParameterSource.COMMANDLINE
    ]
    try:
        if config_name is not None:
            if given:
                raise click.UsageError(f"with CONFIG, {given[0]} belongs in it")
            config = load(config_name)
        else:
            engine = engine_config(**options)
            model = ModelConfig(
                name=name or _served_name(engine.model), replicas=replicas or 1, engine=engine
            )
            config = ShoalConfig(models=[model])
    except ValidationError as error:
        first = error.errors()[0]
        raise click.UsageError(f"--name: {first['msg']}, got {first['input']!r}") from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if port is None:
        return config
    return config.model_copy(update={"ingress": config.ingress.model_copy(update={"port": port})})


def _serve(config: ShoalConfig, phases: Phases, interrupts: Interrupts) -> None:
    """Returns when a signal has ended a server that served."""
    phases.begin("model")
    config = _with_folders(config, phases)
    interrupts.check()
    phases.begin("Ray")
    from cluster.local_ray import LocalRay

    proxy = config.ingress.proxy
    use_haproxy = proxy == "haproxy" or (proxy == "auto" and haproxy.is_available())
    local_ray = interrupts.ray = LocalRay(use_haproxy)
    try:
        with local_ray.started(num_cpus=_logical_cpus(config)):
            interrupts.install()
            interrupts.check()
            from cluster.launch import Cluster

            if config.cluster_secret_file is None:
                secret_file = str(_secret_file(config, local_ray.folder))
                config = config.model_copy(update={"cluster_secret_file": secret_file})
            cluster = Cluster(config, local_ray.socket_folder)
            cluster.start_engines()
            # While the engines load; the ingress answers 503 until they have.
            phases.begin("HTTP")
            cluster.start_ingress()
            phases.end()
            _await_ready(cluster, phases, interrupts)
            phases.end()
            _announce(config, cluster, time.monotonic() - phases.began_s)
            _watch(cluster, interrupts)
    except ShoalError as error:
        if local_ray.log_folder.is_dir():
            raise ServeFailed(f"{error}\nLogs: {local_ray.log_folder}") from error
        raise


def _secret_file(config: ShoalConfig, folder: Path) -> Path:
    """A secret of this server's own; beside what must be readable after a restart it stays."""
    disks = [model.engine.cache.disk_path for model in config.models]
    disk = next((Path(disk) for disk in disks if disk is not None), None)
    if disk is not None:
        folder = disk
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "secret"
    with contextlib.suppress(FileExistsError):
        write_secret(path)
    return path


def _with_folders(config: ShoalConfig, phases: Phases) -> ShoalConfig:
    """Finds, fetches or converts each model, so that engines start from a folder, and shares the
    cores out. With several models one that cannot be found is left to its own engine to refuse."""
    from engine.models.resolve import resolve_model

    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // sum(model.replicas for model in config.models))
    models = []
    for model in config.models:
        engine = model.engine
        changes: dict[str, Any] = {"threads": engine.threads or share}
        if engine.executor == "model":
            try:
                changes["model"] = str(resolve_model(engine.model, phases.begin))
            except ShoalError as error:
                if len(config.models) == 1:
                    raise
                click.echo(f"{model.name}: {error}", err=True)
        models.append(model.model_copy(update={"engine": engine.model_copy(update=changes)}))
    return config.model_copy(update={"models": models})


def _logical_cpus(config: ShoalConfig) -> int:
    """What Ray is told of: on a machine of its own, its shares must never keep an engine out."""
    needed = sum(model.replicas * (model.placement.num_cpus + 1) for model in config.models)
    return max(os.cpu_count() or 1, math.ceil(needed))


def _await_ready(cluster: "Cluster", phases: Phases, interrupts: Interrupts) -> None:
    """Until every model is ready, or has failed; shows what the first loading engine is doing.

    Raises `ServeFailed` when none is ready."""
    shown = ""
    while True:
        interrupts.check()
        models = cluster.ready_report()
        states = {name: report["state"] for name, report in models.items()}
        if states and not any(state == "loading" for state in states.values()):
            break
        engines = [engine for report in models.values() for engine in report["engines"]]
        detail = next((e["detail"] for e in engines if e["state"] == "loading"), "")
        if detail and detail != shown:
            shown = detail
            phases.begin(detail)
        time.sleep(_POLL_S)
    if not any(state == "ready" for state in states.values()):
        raise ServeFailed("; ".join(_failure(name, models[name]) for name in states))


def _failure(name: str, report: dict[str, Any]) -> str:
    texts = [engine["last_error"] or engine["detail"] for engine in report["engines"]]
    details = {text for text in texts if text}
    return f"{name}: {', '.join(sorted(details)) or report['detail'] or report['state']}"


def _watch(cluster: "Cluster", interrupts: Interrupts) -> None:
    """Until a signal; tells of every model that changes its state meanwhile, and why."""
    told = {name: _standing(report) for name, report in cluster.ready_report().items()}
    while interrupts.signal is None:
        time.sleep(_POLL_S)
        for name, report in cluster.ready_report().items():
            if (standing := _standing(report)) != told.get(name):
                told[name] = standing
                click.echo(f"{name} is {standing}", err=True)


def _standing(report: dict[str, Any]) -> str:
    """The state of a model; unless it is ready, with what its engines have died of."""
    state = str(report["state"])
    errors = {engine["last_error"] for engine in report["engines"] if engine["last_error"]}
    return state if state == "ready" or not errors else f"{state} ({', '.join(sorted(errors))})"


def _announce(config: ShoalConfig, cluster: "Cluster", seconds: float) -> None:
    models = cluster.ready_report()
    ready = [name for name, report in models.items() if report["state"] == "ready"]
    body = {
        "model": ready[0],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    for name, report in models.items():
        if name not in ready:
            click.echo(f"not served: {_failure(name, report)}", err=True)
    url = cluster.url
    click.echo(
        f"\nShoal serves {', '.join(ready)} at {url} (ready in {seconds:.1f} s; Ctrl-C stops it)."
        f" Try:\n\ncurl -N {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'\n"
    )


def _check_port(host: str, port: int) -> None:
    """Before anything is started: Ray would report a busy port late and at length."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServeFailed(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another with --port"
            ) from error


def _served_name(model: str) -> str:
    """A folder is called by its last part, so that no path of this machine is in the API."""
    return Path(model).resolve().name if Path(model).is_dir() else model
