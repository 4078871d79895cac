"""The settings of a storm and its fleets, which one environment variable carries to all processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ojs_bridge import Breaker, Bridge, Dependency, Event, standard_errors
from ojs_bridge.rules.backoff import Rng
from tests.chaos.ledger import Ledger

VARIABLE = "OJS_STORM"
#: The one job, on both frameworks; its queue is that of its framework.
TASK = "storm.call"
SIDES = ("native", "policies", "holds")
#: The share of the calls that the dependency answers in the brown-out.
ANSWERED = 0.3
PHASES = ("before", "outage", "between", "brown-out", "after")


@dataclass(frozen=True)
class Settings:
    """A storm: the lengths of its phases in seconds, what the dependency bears, and how its callers retry.

    `begun` is when the first phase begins, in seconds since 1970; the last phase has no end.
    """

    side: str
    broker: str
    store: str | None
    ledger: str
    port: int
    begun: float = 0.0
    before: float = 10.0
    outage: float = 60.0
    between: float = 20.0
    brown_out: float = 120.0
    #: Calls a second; how long one takes, and a slow one; what a refused one is told to wait, in seconds.
    capacity: int = 20
    takes: float = 0.02
    slow: float = 0.5
    retry_after: int = 2
    #: Jobs a second, as a share of the capacity.
    load: float = 0.8
    attempts: int = 8
    longest: int = 60
    share: float = 0.5
    least: int = 20
    window: str = "PT1M"
    cool_down: str = "PT20S"
    probes: int = 3
    ramp: str = "20/s"
    #: Of the dependency; none if empty.
    rate: str = "20/s"

    @property
    def ends(self) -> list[float]:
        """When each phase but the last ends, in seconds after the begin."""
        lengths = (self.before, self.outage, self.between, self.brown_out)
        return [sum(lengths[: n + 1]) for n in range(len(lengths))]

    def phase(self, at: float) -> str:
        """Return the phase at a time, in seconds since 1970."""
        return PHASES[sum(at - self.begun >= end for end in self.ends)]

    @property
    def url(self) -> str:
        """Where the dependency is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def jobs(self) -> int:
        """The number of jobs, which arrive at a steady pace until the brown-out ends."""
        return round(self.ends[-1] * self.capacity * self.load)

    @property
    def plain_ideal(self) -> float:
        """The seconds that all jobs need at the capacity, with the outage."""
        return self.outage + self.jobs / self.capacity

    @property
    def ideal(self) -> int:
        """The seconds in which a client could have done all jobs that knows what is to come.

        In each second it does what the dependency bears: its capacity, nothing in the outage, and in the
        brown-out as many calls as have an answer. It does no job before the job comes.
        """
        bears = {"outage": 0.0, "brown-out": self.capacity * ANSWERED}
        second, done = 0, 0.0
        while done < self.jobs:
            come = min((second + 1) * self.capacity * self.load, self.jobs)
            done = min(done + bears.get(self.phase(self.begun + second), self.capacity), come)
            second += 1
        return second

    def to_env(self) -> dict[str, str]:
        """Return the variable that carries them."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Settings:
        """Read them."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def bridge(self, jitter: Callable[[int, float, Rng], float]) -> Bridge:
        """Make the bridge of the fleet, which notes the jobs that die, with the jitter of the framework."""
        policy = {
            "max_attempts": self.attempts,
            "max_interval": f"PT{self.longest}S",
            "jitter": jitter,
            "on_exhaustion": "dead_letter",
        }
        ledger = Ledger(self.ledger)

        def note(event: Event) -> None:
            if event.type in ("job.dead_lettered", "job.discarded"):
                ledger.note("dead", event.subject, 0)

        dependencies = []
        if self.side == "holds":
            breaker = Breaker(self.share, self.least, self.window, self.cool_down, self.probes, self.ramp)
            rate = self.rate or None
            dependencies = [Dependency("it", ["external.*"], [TASK], breaker=breaker, rate=rate)]
        return Bridge(
            self.store,
            retry=policy,
            errors=standard_errors(),
            listeners=[note],
            dependencies=dependencies,
        )
