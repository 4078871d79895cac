"""Virtual time for the jobs of a test: each delay is jumped over, and each attempt is run for real."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeAlias

from typing_extensions import Unpack

from ..adapters import Framework, frameworks
from ..bridge import Bridge
from ..engine import holds
from ..engine.events import Event
from ..engine.scheduler import CLAIM, Scheduler
from ..engine.storing import job_of_parked
from ..errors import ConfigurationError
from ..operations.letters import MAX_PAGE, every_page
from ..rules.notations import read_duration
from ..store import Fields, Letter, Parked
from .parts import Agenda, Clock, Handler, VirtualEngine, VirtualWorker, WorkerDied, engine_of, instance_of

#: After so many deliveries in one run its jobs count as endless.
MOST = 10_000

#: How a job has ended; None for a job that goes on.
End: TypeAlias = Literal["completed", "discarded", "dead_letter", "cancelled"]

_ENDS: dict[str, End] = {
    "job.completed": "completed",
    "job.discarded": "discarded",
    "job.cancelled": "cancelled",
}
_GIVE = "give it to virtual_time(...), or return it from a fixture `ojs_app`"


@contextmanager
def virtual_time(target: Any = None, *, jitter: int | None = None) -> Iterator[VirtualTime]:
    """Run the jobs of a Celery app or a Dramatiq broker in a test, in memory, and without waiting.

    The target is by default the current Celery app or the global Dramatiq broker, if it has a bridge. Within
    the block its bridge has a store in memory and a clock that only the test moves. The messages and the
    results are in memory, too. After the block everything is as it was. Without a seed `jitter`, delays have
    no jitter. Raises ConfigurationError.
    """
    framework, target = _found(target)
    bridge, clock = framework.bridge_of(target), Clock()
    if isinstance(bridge.engine, VirtualEngine):
        raise ConfigurationError(f"virtual time: {target!r} is under virtual time already")
    agenda = Agenda(clock)
    with (
        engine_of(bridge, clock, jitter) as engine,
        worker_room(framework).worker_of(target, agenda) as worker,
    ):
        yield VirtualTime(bridge, engine, clock, agenda, worker)


@dataclass(frozen=True)
class Job:
    """A job of a test. After a replay, all fields but `events` describe the replay only."""

    id: str
    type: str
    events: tuple[Event, ...]

    @property
    def outcome(self) -> End | None:
        """How the job has ended; None if it waits for its next attempt, or for a worker."""
        last = next((event for event in reversed(self._latest) if event.type in _ENDS), None)
        if last is None:
            return None
        return "dead_letter" if last.data.get("dead_lettered") else _ENDS[last.type]

    @property
    def attempts(self) -> int:
        """How many attempts have begun, those whose worker has died included."""
        begun = (event for event in self._latest if event.type != "job.held")
        return max((event.data.get("attempt", 0) for event in begun), default=0)

    @property
    def waits(self) -> list[float]:
        """The seconds before each retry; a snooze is none."""
        return [event.data["delay_ms"] / 1000 for event in self._of("job.retrying")]

    @property
    def errors(self) -> list[str]:
        """The error type of each attempt that has failed."""
        return [event.data["error"]["type"] for event in self._of("job.failed")]

    @property
    def reason(self) -> str:
        """Why the job ended, or goes on, in the words of the log; "" for a success."""
        return next((event.data["reason"] for event in reversed(self._latest) if "reason" in event.data), "")

    @property
    def _latest(self) -> tuple[Event, ...]:
        replays = [place for place, event in enumerate(self.events) if event.type == "dead_letter.retried"]
        return self.events[replays[-1] + 1 :] if replays else self.events

    def _of(self, type_: str) -> list[Event]:
        return [event for event in self._latest if event.type == type_]


class NothingRan(AssertionError):
    """A test let jobs run, and there was none."""


class VirtualTime:
    """The jobs of an app or broker in a test, in memory, and under a clock that the test moves.

    `bridge` is the bridge of the app or broker; its store is in memory.
    """

    def __init__(
        self, bridge: Bridge, engine: VirtualEngine, clock: Clock, agenda: Agenda, worker: VirtualWorker
    ) -> None:
        self.bridge = bridge
        self._engine, self._recorder = engine, engine.recorder
        self._clock, self._agenda, self._worker = clock, agenda, worker
        publishers, store = engine.context.publishers, engine.context.store_for("virtual time")
        self._publisher = publishers[worker.framework]
        self._documents, self._releaser = store.documents, holds.Releaser(store, clock, engine.dependencies)
        self._scheduler = Scheduler(store.parked, store.reservations, publishers, clock, engine.give_up)
        self._failures: defaultdict[str, deque[BaseException | type[BaseException]]] = defaultdict(deque)
        self._delivering = False
        self._tries_again = clock.began

    @property
    def now(self) -> datetime:
        """The time of the clock, in UTC; it begins at the real time."""
        return self._clock()

    @property
    def elapsed(self) -> timedelta:
        """For how long the clock has run."""
        return self._clock.elapsed

    @property
    def events(self) -> list[Event]:
        """All events of the jobs, in order."""
        return list(self._recorder.events)

    @property
    def jobs(self) -> list[Job]:
        """All jobs that have begun, in order."""
        return _jobs_of(self._recorder.events)

    @property
    def dead_letters(self) -> tuple[Letter, ...]:
        """The dead letters, newest first."""
        read = self.bridge.dead_letters.list
        pages = every_page(lambda cursor: read(limit=MAX_PAGE, cursor=cursor))
        return tuple(letter for page in pages for letter in page.letters)

    @property
    def parked(self) -> tuple[Parked, ...]:
        """The jobs that wait in the store, the next one due first."""
        return self._waiting()

    def run(self) -> Job:
        """Run all that there is to run, and jump over every delay; return the job that began first.

        A job that a pause holds stays as it is. A pause with an end is a delay.

        Raises NothingRan, and RuntimeError for jobs that do not end.
        """
        return self._run_by(self._go)

    def step(self) -> Job:
        """Run one attempt, and jump over the delay before it; return its job. Raises NothingRan."""
        return self._run_by(self._go_once)

    def advance(self, time: str | timedelta) -> None:
        """Let time pass, such as `"PT1H"`; what is due meanwhile is run at its time."""
        until = self._clock() + read_duration(time)
        self._go(until)
        self._clock.move(until)

    def crash(self) -> None:
        """Kill the worker of the next attempt as the attempt begins.

        Called in a task, kill the worker of this attempt at once. The attempt is lost: when its reservation
        has run out, its policy decides.
        """
        if self._delivering:
            self._engine.die()
        self._engine.deaths += 1

    def fail(self, task: Any, error: BaseException | type[BaseException], times: int = 1) -> None:
        """Let a task or actor, or the one of this name, raise an error instead of its next runs."""
        name: str = getattr(task, "actor_name", None) or getattr(task, "name", task)
        if name not in self._failures:
            self._worker.put_in(name, lambda own: _failing(own, self._failures[name]))
        self._failures[name].extend([error] * times)

    def _run_by(self, go: Callable[[], object]) -> Job:
        before = len(self._recorder.events)
        go()
        new = _jobs_of(self._recorder.events[before:])
        if not new:
            raise NothingRan(
                "no job under the bridge has run: send one first, in the test and to the app or broker of "
                "this fixture; neither a broadcast nor a task that the policies of `install` do not name is "
                "under the bridge, and what a pause holds runs when it is over"
            )
        return next(job for job in self.jobs if job.id == new[0].id)

    def _go_once(self) -> None:
        before = self._engine.runs
        for _ in range(MOST):
            if self._engine.runs > before or not self._deliver_next(None):
                return

    def _go(self, until: datetime | None = None) -> None:
        for _ in range(MOST):
            if not self._deliver_next(until):
                return
        last = self._recorder.events[-1:]
        raise RuntimeError(
            f"{MOST} messages were delivered, and there are more: do jobs send each other, or snooze, for "
            f"ever? The last event is {last}; `step` runs one attempt at a time"
        )

    def _deliver_next(self, until: datetime | None) -> bool:
        """Deliver a message, or jump to the time at which the next is due; False if there is none."""
        if self._hand_out():
            return True
        # When the scheduler next has a job to publish.
        first = self._next_parked()
        parked = max(first, self._tries_again) if first else None
        due = min((due for due in (self._agenda.next_due(), parked) if due), default=None)
        if due is None or (until is not None and due > until):
            return False
        self._clock.move(due)
        if due == parked and not self._scheduler.publish_due(self._worker.framework, self._publisher):
            # It could not be published. The scheduler tries again when its claim has ended.
            self._tries_again = self._clock() + CLAIM
        return True

    def _next_parked(self) -> datetime | None:
        """Return when the next job of the store is to run; a held job, when its holds end, if they do."""
        now, known = self._clock(), holds.read(self._documents)
        self._releaser.send_probes(known, now)
        deque(self._releaser.look(known, now), maxlen=0)
        free = self.bridge.retries.list(limit=1), self.bridge.scheduled.list(limit=1)
        times = [parked.next_retry_at for page in free for parked in page.jobs]
        for parked in self._waiting(kind="held"):
            its = holds.that_hold(known, job_of_parked(parked), self.bridge.engine.dependencies)
            ends = [hold.until or hold.probe_at for hold in its if hold.is_on(now)]
            if None not in ends:
                times.append(max((end for end in ends if end), default=parked.next_retry_at))
        return min(times, default=None)

    def _waiting(self, **fields: Unpack[Fields]) -> tuple[Parked, ...]:
        read = self.bridge.waiting.list
        pages = every_page(lambda cursor: read(limit=MAX_PAGE, cursor=cursor, **fields))
        return tuple(parked for page in pages for parked in page.jobs)

    def _hand_out(self) -> bool:
        if self._delivering:
            raise RuntimeError("a task cannot have other jobs run while it runs itself")
        self._delivering, self._recorder.raised = True, None
        try:
            delivered = self._worker.deliver()
        except WorkerDied:
            self._engine.revive()
            self._worker.replace()
            delivered = True
        finally:
            self._delivering = False
        if self._recorder.raised:
            raise self._recorder.raised
        return delivered


def _jobs_of(events: Iterable[Event]) -> list[Job]:
    """Return the jobs that events tell of, in the order of their first events."""
    of_jobs: dict[str, list[Event]] = {}
    for event in events:
        if "job_type" in event.data:
            of_jobs.setdefault(event.subject, []).append(event)
    return [Job(id_, str(of_job[0].data["job_type"]), tuple(of_job)) for id_, of_job in of_jobs.items()]


def _failing(own: Handler, failures: deque[BaseException | type[BaseException]]) -> Handler:
    def run(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise instance_of(failures.popleft())
        return own(*args, **kwargs)

    return run


def _found(target: Any) -> tuple[Framework, Any]:
    """Return an app or broker, the current one without a target, and its framework."""
    there = [(f, one) for f in frameworks() if (one := target or worker_room(f).current()) is not None]
    fitting = [(framework, one) for framework, one in there if isinstance(one, framework.kind)]
    if len(fitting) == 1:
        return fitting[0]
    if target is not None:
        raise ConfigurationError(f"virtual time: {target!r} is neither a Celery app nor a Dramatiq broker")
    if fitting:
        raise ConfigurationError(f"virtual time: there are a Celery app and a Dramatiq broker: {_GIVE}")
    raise ConfigurationError(
        "virtual time: neither the current Celery app nor the global Dramatiq broker has a bridge: import "
        f"the module of your app or broker, or {_GIVE}"
    )


def worker_room(framework: Framework) -> ModuleType:
    """Return the module that has the worker of a framework under virtual time."""
    return import_module(f".on_{framework.name}", __package__)
