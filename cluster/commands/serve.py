"""`shoal serve`: one model behind one HTTP port, on a Ray cluster of its own.

Invariant: whatever ends the command (Ctrl-C at any time, once or twice, a failed start, a dead
engine), everything it started ends with it, and its exit code says which of them it was.
"""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from cluster.commands.options import engine_config, engine_options
from configs.engine import EngineConfig
from engine.errors import ShoalError

if TYPE_CHECKING:
    from cluster.ingress import IngressSettings
    from cluster.local_ray import LocalRay

_HOST = "127.0.0.1"
_POLL_S = 0.2
_SESSION_TIMEOUT_S = 15.0
_LAST_ANSWERS_S = 1.0
"""For open requests to get their error before the HTTP port closes."""


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


class Phases:
    """One line on stderr for each phase, with the seconds it took."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._phase_s = self.began_s
        self._open = False

    def begin(self, name: str, ago_s: float = 0.0) -> None:
        """Starts a phase that began `ago_s` seconds ago, and ends the one before then."""
        self.end(ago_s)
        click.echo(f"{name[:60]:.<60}", err=True, nl=False)
        self._open, self._phase_s = True, time.monotonic() - ago_s

    def end(self, ago_s: float = 0.0) -> None:
        if self._open:
            seconds = max(0.0, time.monotonic() - ago_s - self._phase_s)
            click.echo(f" {seconds:5.1f} s", err=True)
        self._open = False


@click.command()
@engine_options
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--name", help="The model's name in the API.  [default: as in --model]")
def serve(port: int, name: str | None, **options: Any) -> None:
    """Serve a model over HTTP, with an OpenAI-compatible API.

    It listens on 127.0.0.1 only, on a Ray cluster of its own, until Ctrl-C. Exit codes: 0 served
    and was stopped, 1 failed or lost its engine, 2 wrong usage, 130 or more stopped by a signal
    before it served."""
    config = engine_config(**options)
    _check_port(port)
    interrupts = Interrupts()
    interrupts.install()
    phases = Phases()
    try:
        _serve(config, port, name or _served_name(config.model), phases, interrupts)
    except _Interrupted:
        assert interrupts.signal is not None
        sys.exit(128 + interrupts.signal)
    finally:
        phases.end()


def _serve(
    config: EngineConfig, port: int, name: str, phases: Phases, interrupts: Interrupts
) -> None:
    """Returns when a signal has ended a server that served."""
    from engine.models.resolve import resolve_model

    phases.begin("model")
    folder = resolve_model(config.model, phases.begin)
    interrupts.check()
    phases.begin("Ray")
    from cluster.local_ray import LocalRay

    local_ray = interrupts.ray = LocalRay()
    try:
        with local_ray.started(num_cpus=os.cpu_count() or 1):
            interrupts.install()
            interrupts.check()
            from cluster.ingress import IngressSettings
            from replicas.engine_actor import endpoint_in, start_engine

            config = config.model_copy(update={"model": str(folder)})
            engine = start_engine(config, local_ray.socket_folder)
            # While the engine loads; the ingress answers 503 until it has.
            phases.begin("HTTP")
            endpoint = endpoint_in(local_ray.socket_folder)
            _start_http(engine, IngressSettings(name, folder, endpoint), port)
            phases.end()
            _await_engine(engine, phases, interrupts)
            _await_session(port, interrupts)
            phases.end()
            _announce(name, port, time.monotonic() - phases.began_s)
            _watch(engine, interrupts)
    except ShoalError as error:
        if local_ray.log_folder.is_dir():
            raise ServeFailed(f"{error}\nLogs: {local_ray.log_folder}") from error
        raise


def _await_engine(engine: Any, phases: Phases, interrupts: Interrupts) -> None:
    """Until the engine listens; shows the phases that it tells of."""
    import ray

    num_shown = 0
    while True:
        interrupts.check()
        try:
            progress = ray.get(engine.progress.remote())
        except ray.exceptions.RayError as error:
            raise ServeFailed("the engine's process died while it started") from error
        for phase, began_s in progress.phases[num_shown:]:
            phases.begin(phase, ago_s=progress.now_s - began_s)
        num_shown = len(progress.phases)
        if progress.error is not None:
            raise ServeFailed(progress.error)
        if progress.is_ready:
            return
        time.sleep(_POLL_S)


def _await_session(port: int, interrupts: Interrupts) -> None:
    """Until the ingress has found the engine."""
    end_s = time.monotonic() + _SESSION_TIMEOUT_S
    while True:
        interrupts.check()
        connection = http.client.HTTPConnection(_HOST, port, timeout=_SESSION_TIMEOUT_S)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        if time.monotonic() > end_s:
            raise ServeFailed("the HTTP ingress does not reach the engine")
        time.sleep(_POLL_S)


def _start_http(engine: Any, settings: "IngressSettings", port: int) -> None:
    from ray import serve as ray_serve
    from ray.serve.schema import LoggingConfig

    from cluster.deployment import ingress_application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    logging_config = LoggingConfig(log_level="ERROR", enable_access_log=False)
    try:
        ray_serve.start(
            proxy_location="HeadOnly",
            http_options={"host": _HOST, "port": port},
            logging_config=logging_config,
        )
        ray_serve.run(
            ingress_application(settings, engine),
            name="ingress",
            route_prefix="/",
            logging_config=logging_config,
        )
    except RuntimeError as error:
        raise ServeFailed(f"the HTTP ingress did not start: {error}") from error


def _watch(engine: Any, interrupts: Interrupts) -> None:
    """Until a signal (returns) or the engine's end (raises)."""
    import ray

    ended = engine.wait.remote()
    while interrupts.signal is None:
        done, _ = ray.wait([ended], timeout=_POLL_S)
        if not done:
            continue
        reason = "it stopped"
        try:
            ray.get(ended)
        except ray.exceptions.RayActorError:
            reason = "its process died"
        except ShoalError as error:
            reason = str(error)
        time.sleep(_LAST_ANSWERS_S)
        raise ServeFailed(f"the engine is lost: {reason}")


def _announce(name: str, port: int, seconds: float) -> None:
    url = f"http://{_HOST}:{port}"
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    click.echo(
        f"\nShoal serves {name} at {url} (ready in {seconds:.1f} s; Ctrl-C stops it). Try:\n"
    )
    click.echo(
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'\n"
    )


def _check_port(port: int) -> None:
    """Before anything is started: Ray would report a busy port late and at length."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ServeFailed(
                f"cannot listen on {_HOST}:{port} ({error.strerror}): choose another with --port"
            ) from error


def _served_name(model: str) -> str:
    """A folder is called by its last part, so that no path of this machine is in the API."""
    return Path(model).resolve().name if Path(model).is_dir() else model
