"""EngineCore: sockets, scheduler, cache and errors, around a device that computes.

Invariant: only the control thread (the one in `run`) touches scheduler, cache and sockets; only the
compute thread touches the executor. They exchange a StepPlan for a StepResult and nothing else.
"""

import logging
import secrets
import time
from collections import deque

from cache.keys import KEY_SCHEMA, key_root
from cache.prefix import PrefixCache
from configs.engine import EngineConfig, SchedulerConfig
from configs.secret import read_secret
from engine import wire
from engine.admission import check, context_limit
from engine.compute import ComputeThread, Step
from engine.curve import CurveKeys
from engine.device_metrics import DeviceSampler
from engine.disk_io import DiskIO
from engine.errors import RequestRejected
from engine.executors.largest_step import within_measured
from engine.load import LoadMeter
from engine.load_reporter import LoadReporter
from engine.plan import Executor, StepPlan
from engine.request import Output, RequestKey, RequestState
from engine.scheduler import Scheduler
from engine.stream import StreamLog, to_delta
from engine.tier_driver import TierDriver, open_disk
from engine.transport import Closed, EngineTransport, Inbound, Session
from engine.wire import FinishReason, RefuseCode, RejectCode, TokenItem

logger = logging.getLogger(__name__)

_UNSENT_RETRY_S = 0.005
_STOP_TIMEOUT_S = 5.0
_PLAN_EARLY = 0.2
_PLAN_LEAD_S = 0.003
"""A step is planned this share of the running one, and this long, before that one's usual end."""


class EngineCore:
    """One engine: build it, tell the world its `endpoint`, then call `run` in its own thread."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.incarnation = secrets.randbits(61)
        info = executor.info
        self._info = info
        self._executor = executor
        path = config.cluster_secret_file
        self._secret = read_secret(path) if path else secrets.token_bytes(32)
        self._max_model_len = context_limit(info, config.max_model_len)
        disk_folder = open_disk(config.cache, info, self._secret if path else None)
        # Made up here, a secret is nobody else's: it keys the cache, and no connection.
        keys = CurveKeys.derive(self._secret) if path else None
        self._transport = EngineTransport(config.transport, keys)
        self._device = DeviceSampler.of(info.device)
        self._lower: TierDriver | None = None
        if info.num_slots:
            disk = None
            if disk_folder is not None:
                disk = DiskIO(disk_folder, executor.slot_memory, self._transport.wake)
            self._lower = TierDriver.build(config.cache, info, disk)
        self._scheduler = Scheduler(
            config.scheduler,
            PrefixCache(
                info.num_blocks,
                config.cache.wheel_slots,
                config.cache.wheel_slot_width,
                info.block_size if config.cache.reuse_partial_blocks else 0,
            ),
            info.block_size,
            reuse=config.cache.enable_prefix_caching,
            tiers=self._lower.tiers if self._lower is not None else None,
        )
        self._stream = StreamLog(self.incarnation, config.transport.replay_frames)
        self._compute = ComputeThread(executor, self._transport.wake)
        executor.watch(self._compute.lose)
        self._meter = LoadMeter()
        self._reporter = LoadReporter(
            self._scheduler, self._meter, config.transport.load_report_interval_s
        )
        self._plans: deque[StepPlan] = deque()
        """Submitted and not committed: the one that runs, and perhaps the next."""
        self._ahead_s = 0.0
        """When to plan the next one."""
        self._plan_s = 0.0
        """Spent on making plans and taking over results."""
        self._is_stopping = False
        self._is_draining = False
        self._wants_drain = False
        self._scheduler_config = config.scheduler
        self._hello = wire.HelloReply(
            wire_version=wire.WIRE_VERSION,
            engine_id=f"engine-{secrets.token_hex(4)}",
            incarnation=self.incarnation,
            model=info.model,
            fingerprint=info.fingerprint,
            block_size=info.block_size,
            key_schema=KEY_SCHEMA,
            vocab_size=info.vocab_size,
            max_model_len=self._max_model_len,
            num_blocks=info.num_blocks,
            eos_token_ids=info.eos_token_ids,
            lease_s=config.transport.lease_s,
            max_message_bytes=config.transport.max_message_bytes,
            stream_endpoint=self._transport.stream_endpoint,
        )

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._transport.endpoint

    @property
    def is_idle(self) -> bool:
        return not self._compute.is_busy and not self._scheduler.requests

    def stats(self) -> dict[str, float]:
        """Counters and gauges, readable from any thread."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "waiting_tokens": scheduler.num_uncomputed_tokens,
            "max_num_seqs": scheduler.config.max_num_seqs,
            "max_num_batched_tokens": scheduler.config.max_num_batched_tokens,
            "is_draining": self._is_draining,
            "sessions": len(self._transport.sessions),
            "held_blocks": cache.pool.num_held,
            "num_blocks": cache.pool.num_blocks,
            "cached_blocks": len(cache),
            "evicted_blocks": cache.num_evicted,
            "holes": cache.num_holes,
            **scheduler.counts.as_stats(),
            "plan_s": self._plan_s,
            "wait_s": self._meter.wait_s,
            "steps": self._meter.num_steps,
            "computed_tokens": self._meter.num_tokens,
            "busy_s": self._meter.busy_s,
            "prefill_tokens_per_s": self._meter.prefill_tokens_per_s,
            "step_s": self._meter.last_step_s,
            "step_age_s": self._compute.step_age_s(time.monotonic()),
            "prefill_tokens": self._meter.num_prefill_tokens,
            "output_tokens": self._meter.num_decode_tokens,
            **(self._lower.stats() if self._lower is not None else {}),
            **(self._device.latest if self._device is not None else {}),
        }

    def run(self) -> None:
        """Serves until `stop`. Raises what the executor raised, after telling every client."""
        self._compute.start()
        if self._device is not None:
            self._device.start()
        try:
            while not self._is_stopping:
                self._turn()
        finally:
            for session in list(self._transport.sessions.values()):
                text = "the engine is stopping"
                self._transport.send(session, wire.Refused(RefuseCode.NO_SESSION, text))
            self._compute.stop(_STOP_TIMEOUT_S)
            if self._device is not None:
                self._device.stop()
            if self._lower is not None:
                self._lower.close(_STOP_TIMEOUT_S)
            self._executor.close()
            self._transport.close()

    def configure(self, scheduler: SchedulerConfig) -> None:
        """Takes effect with the next step, as far as the device has memory for it. May be called
        from any thread."""
        self._scheduler_config = within_measured(scheduler, self._info)
        self._transport.wake()

    def drain(self) -> None:
        """Takes nothing new from now on; `stats` says so (`is_draining`) once that holds. May be
        called from any thread."""
        self._wants_drain = True
        self._transport.wake()

    def stop(self) -> None:
        """Ends `run` soon. May be called from any thread, and more than once."""
        self._is_stopping = True
        self._transport.wake()

    # ------------------------------------------------------------ the control loop

    def _turn(self) -> None:
        self._transport.wait(self._patience_s())
        self._is_draining = self._wants_drain
        self._scheduler.config = self._scheduler_config
        now = time.monotonic()
        for item in self._transport.receive(now, self._hello):
            self._handle(item)
        outputs: list[Output] = []
        while (step := self._compute.take()) is not None:
            outputs += self._commit(step)
        if self._lower is not None:
            self._lower.turn(now)
        self._plan(now)
        if now >= self._report_due_s():
            outputs += self._scheduler.expire(now)
        # Sent while the next step computes.
        if outputs:
            self._emit(outputs)
        self._publish(now)
        self._transport.flush()

    def _patience_s(self) -> float:
        """How long nothing needs to be done unless something arrives."""
        if self._transport.has_unsent:
            return _UNSENT_RETRY_S
        due_s, now = self._report_due_s(), time.monotonic()
        if self._compute.num_open == 1 and now < self._ahead_s:
            due_s = min(due_s, self._ahead_s)
        return max(0.0, due_s - now)

    def _plan(self, now: float) -> None:
        """Gives the device the next step, and the one after it when the time has come."""
        while self._compute.num_open == 0 or self._may_plan_ahead(now):
            began_s = time.perf_counter()
            plan = self._scheduler.schedule(time.monotonic(), self._meter.prefill_tokens_per_s)
            self._plan_s += time.perf_counter() - began_s
            if plan is None:
                return
            self._plans.append(plan)
            self._compute.submit(plan)
            if len(self._plans) == 1:
                self._await(plan, now)

    def _may_plan_ahead(self, now: float) -> bool:
        is_wanted = self._scheduler_config.overlap and self._compute.num_open == 1
        return is_wanted and now >= self._ahead_s

    def _await(self, plan: StepPlan, began_s: float) -> None:
        """The plan runs from `began_s` on. The next one is made shortly before its end, so that
        it has all requests that come until then."""
        usual_s = self._meter.usual_s(plan)
        self._ahead_s = began_s + max(0.0, usual_s * (1 - _PLAN_EARLY) - _PLAN_LEAD_S)

    def _commit(self, step: Step) -> list[Output]:
        assert self._plans.popleft() is step.plan
        self._meter.add(step.plan, step.result, step.began_s, step.ended_s)
        if self._plans:
            self._await(self._plans[0], step.ended_s)
        began_s = time.perf_counter()
        outputs = self._scheduler.commit(step.result, time.monotonic())
        self._plan_s += time.perf_counter() - began_s
        if not self._scheduler.requests:
            self._meter.rest()
        return outputs

    def _emit(self, outputs: list[Output]) -> None:
        """One TokenBatch for each ingress that has output."""
        batches: dict[str, list[TokenItem]] = {}
        for request, item in outputs:
            if item.finish is not None and item.finish.reason is FinishReason.ERROR:
                logger.error("request %s failed: %s", item.request_id, item.finish.message)
            batches.setdefault(request.key[0], []).append(item)
        step = self._meter.num_steps
        for ingress_id, items in batches.items():
            session = self._transport.sessions.get(ingress_id)
            if session is not None:
                self._transport.send(session, wire.TokenBatch(step, session.seen, tuple(items)))

    def _publish(self, now: float) -> None:
        cache_events = self._scheduler.cache.drain_events()
        if self._lower is not None:
            cache_events += self._lower.drain_events()
        if cache_events:
            self._transport.publish(self._stream.append(to_delta(cache_events)))
        if now >= self._report_due_s():
            seen = {s.ingress_id: s.seen for s in self._transport.sessions.values()}
            age_s = self._compute.step_age_s(now)
            report = self._reporter.report(now, self.is_idle, age_s, seen)
            self._transport.publish(self._stream.append(report))

    def _report_due_s(self) -> float:
        return self._reporter.due_s(self.is_idle)

    # ------------------------------------------------------------ messages

    def _handle(self, item: Inbound) -> None:
        if isinstance(item, Closed):
            self._on_closed(item)
            return
        session, message = item.session, item.message
        match message:
            case wire.AddRequest():
                self._on_add(session, message)
            case wire.Abort(requests=requests):
                for request_id, attempt in requests:
                    self._abort((session.ingress_id, request_id), attempt)
            case wire.ReplayRequest(first=first):
                frames = self._stream.since(first)
                if frames is None:
                    self._send_snapshot(session)
                else:
                    self._transport.send(session, wire.Replay(frames))
            case wire.SnapshotRequest():
                self._send_snapshot(session)

    def _on_closed(self, item: Closed) -> None:
        name = item.session.ingress_id
        keys = [key for key in self._scheduler.requests if key[0] == name]
        for key in keys:
            self._abort(key)
        logger.info("ingress %s: %s; %d requests aborted", name, item.reason, len(keys))

    def _on_add(self, session: Session, message: wire.AddRequest) -> None:
        identity = message.request_id, message.attempt
        try:
            outputs = self._add(session, message)
        except RequestRejected as error:
            after_s = self._backlog_s() if error.code is RejectCode.OVERLOADED else 0.0
            self._transport.send(
                session, wire.Rejected(*identity, error.code, error.message, after_s)
            )
        except Exception:
            logger.exception("request %s could not be added", message.request_id)
            text = "internal error"
            self._transport.send(session, wire.Rejected(*identity, RejectCode.INTERNAL, text))
        else:
            self._transport.send(session, wire.Accepted(*identity))
            self._emit(outputs)

    def _backlog_s(self) -> float:
        """Until what waits has been computed, at the rate of late."""
        rate = self._meter.prefill_tokens_per_s
        return self._scheduler.num_uncomputed_tokens / rate if rate else 0.0

    def _add(self, session: Session, message: wire.AddRequest) -> list[Output]:
        if message.incarnation != self.incarnation:
            text = f"this engine is incarnation {self.incarnation}, not {message.incarnation}"
            raise RequestRejected(RejectCode.STALE_INCARNATION, text)
        if self._is_draining:
            raise RequestRejected(RejectCode.DRAINING, "this engine takes no new requests")
        check(message, self._info, self._max_model_len)
        key = (session.ingress_id, message.request_id)
        former = self._scheduler.requests.get(key)
        if former is not None and former.attempt < message.attempt:
            self._abort(key)
        sampling = message.sampling
        ends = () if sampling.ignore_eos else self._info.eos_token_ids
        request = RequestState(
            key=key,
            attempt=message.attempt,
            token_ids=[*message.prompt_ids, *message.output_ids],
            num_prompt_tokens=len(message.prompt_ids),
            sampling=sampling,
            root=key_root(
                self._secret, self._info.fingerprint, message.cache_domain, self._info.block_size
            ),
            end_token_ids=frozenset((*ends, *sampling.stop_token_ids)),
            priority=message.priority,
            service_class=message.service_class,
            retention=message.retention,
            pin_steps=self.config.cache.pin_steps,
        )
        return self._scheduler.add(request, time.monotonic())

    def _abort(self, key: RequestKey, attempt: int | None = None) -> None:
        """Ends a request, unless it is a later attempt than the one meant. Idempotent."""
        request = self._scheduler.requests.get(key)
        if request is not None and (attempt is None or request.attempt <= attempt):
            self._scheduler.abort(key)

    def _send_snapshot(self, session: Session) -> None:
        # One at a time for each ingress: a repeated wish does not start it anew.
        if session.snapshot is None:
            session.snapshot = self._stream.snapshot(self.config.transport.snapshot_chunk_keys)
