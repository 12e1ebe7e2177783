"""One ingress on the simulated clock: the real router, fed as `cluster.session` feeds it.

Invariant: the router hears of an engine by its stream (cache events into a `StreamFollower` over
the router's own key set, then load reports) and by the request numbers in its answers; it books
what it sends.
"""

from dataclasses import dataclass

from bench.cluster.engine import Delivery, SimulatedEngine
from bench.cluster.shape import BLOCK_SIZE
from cluster.routing.decision import Decision, RouteRequest
from cluster.routing.router import Router
from configs.shoal import RouterConfig
from engine.stream import StreamFollower
from engine.wire import LoadReport


@dataclass(slots=True)
class _Session:
    follower: StreamFollower
    last_number: int = 0


class SimulatedIngress:
    def __init__(self, name: str, config: RouterConfig) -> None:
        self.name = name
        self.router = Router(config, name)
        self._sessions: dict[str, _Session] = {}

    def open(self, engine: SimulatedEngine) -> None:
        """Begins with a snapshot, as a session does."""
        view = self.router.add_replica(engine.name, BLOCK_SIZE)
        follower = StreamFollower(engine.stream.incarnation, keys=view)
        for chunk in engine.stream.snapshot(4096):
            follower.on_snapshot(chunk)
        self._sessions[engine.name] = _Session(follower)

    def place(self, request: RouteRequest) -> tuple[Decision, int]:
        """The engine, and the request's number there."""
        decision = self.router.route(request)
        session = self._sessions[decision.replica_id]
        session.last_number += 1
        self.router.book(decision, session.last_number)
        return decision, session.last_number

    def hear(self, engine_name: str, delivery: Delivery) -> None:
        follower = self._sessions[engine_name].follower
        for frame in delivery.frames:
            follower.on_frame(frame)
            assert follower.in_sync
            if isinstance(frame.body, LoadReport):
                self.router.on_load(engine_name, frame.body)
        if self.name in delivery.items:
            self.router.on_seen(engine_name, delivery.seen[self.name])
