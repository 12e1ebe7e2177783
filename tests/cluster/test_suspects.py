"""The rule that a request kills two cores at most, against random deaths. Pure."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.suspects import Case, Quarantine, Verdict


class World:
    """Cores that run requests; one request kills, some steps after each of its beginnings."""

    def __init__(self, seed: int, num_cores: int, num_requests: int, lag: int) -> None:
        self.random = random.Random(seed)
        self.quarantine = Quarantine()
        self.cores = [f"c{number}" for number in range(num_cores)]
        self.cases = [Case() for _ in range(num_requests)]
        self.lag = lag
        """Tokens that a core computes before the killer's fatal one, at most, and that its client
        may not have when it dies."""
        self.delivered = dict.fromkeys(range(num_requests), 0)
        self.since = dict.fromkeys(range(num_requests), 0)
        """What was delivered before it came to where it is."""
        self.place = {number: self.random.choice(self.cores) for number in range(num_requests)}
        self.trial_left: dict[int, int] = {}
        self.waiting: list[int] = []
        self.fatal_at = self.random.randrange(0, 12)
        self.num_killed = 0
        self.condemned: set[int] = set()
        self.born = num_cores

    def step(self, probation: int) -> None:
        """One token of each request, some of which are lost with a core that dies of number 0."""
        for number, core in list(self.place.items()):
            if self.place.get(number) != core:
                continue  # It died a moment ago.
            if number == 0 and self.delivered[0] >= self.fatal_at - self.random.randint(
                0, self.lag
            ):
                self.die(core, probation)
                continue
            self.delivered[number] += 1
            if number in self.trial_left:
                self.trial_left[number] -= 1
                if not self.trial_left[number]:
                    del self.trial_left[number]
                    self.quarantine.end(self.cases[number])
        self.readmit(probation)

    def die(self, core: str, probation: int) -> None:
        self.num_killed += 1
        self.cores.remove(core)
        self.cores.append(f"c{self.born}")
        self.born += 1
        for number in [each for each, where in self.place.items() if where == core]:
            del self.place[number]
            case, on_trial = self.cases[number], number in self.trial_left
            if on_trial:
                del self.trial_left[number]
                self.quarantine.end(case)
            if self.quarantine.ended(case, core, on_trial, 100) is Verdict.CONDEMNED:
                self.condemned.add(number)
            elif self.delivered[number] - self.since[number] < probation:
                self.waiting.append(number)
            else:
                self.arrive(number, self.random.choice(self.cores))

    def arrive(self, number: int, core: str) -> None:
        self.place[number] = core
        self.since[number] = self.delivered[number]

    def readmit(self, probation: int) -> None:
        for number in list(self.waiting):
            case = self.cases[number]
            closed = self.quarantine.closed_to(case, self.cores)
            open_cores = [core for core in self.cores if core not in closed]
            if open_cores:
                core = self.random.choice(open_cores)
                self.quarantine.begin(case, core)
                self.trial_left[number] = probation
                self.arrive(number, core)
                self.waiting.remove(number)
        self.quarantine.check_integrity()


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1 << 30),
    num_cores=st.integers(1, 6),
    num_requests=st.integers(1, 40),
    lag=st.integers(0, 3),
)
def test_a_killer_kills_few_cores_and_only_it_is_condemned(
    seed: int, num_cores: int, num_requests: int, lag: int
) -> None:
    world = World(seed, num_cores, num_requests, lag)
    for _ in range(40 + 5 * num_requests):
        world.step(probation=4)
    assert world.num_killed in ((2,) if world.fatal_at < 4 else (2, 3))
    assert world.condemned == {0}
    assert not world.waiting
    assert not world.trial_left
    assert len(world.quarantine) == 0
    assert all(count > 40 for number, count in world.delivered.items() if number)


def test_choices_share_one_trial() -> None:
    quarantine, case, other = Quarantine(), Case(), Case()
    quarantine.begin(case, "a")
    assert quarantine.closed_to(case, ["a", "b"]) == {"b"}
    assert quarantine.closed_to(other, ["a", "b"]) == {"a"}
    quarantine.begin(case, "a")
    assert not quarantine.end(case)
    assert quarantine.closed_to(other, ["a", "b"]) == {"a"}
    assert quarantine.end(case)
    assert quarantine.closed_to(other, ["a", "b"]) == set()


def test_ends_are_counted_once_however_many_choices_they_took() -> None:
    quarantine, case = Quarantine(), Case()
    for core in ("a", "b"):
        for _ in range(3):
            assert quarantine.ended(case, core, False, 2) is Verdict.MOVE
    assert quarantine.ended(case, "c", False, 2) is Verdict.WORN_OUT
    assert quarantine.ended(case, "d", True, 2) is Verdict.CONDEMNED
    assert quarantine.ended(case, "e", False, 9) is Verdict.CONDEMNED
