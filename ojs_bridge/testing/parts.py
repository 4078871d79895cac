"""The parts of virtual time: a clock that only tests move, an engine and a scheduler without threads."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from ..bridge import Bridge
from ..engine.context import Context
from ..engine.engine import Engine
from ..engine.events import Dispatcher, Event, log_failure
from ..engine.heartbeat import Heartbeat
from ..engine.runs import Admission, Run
from ..engine.scheduler import Scheduler
from ..rules.decision import Decision
from ..store import MEMORY, open_store

Handler: TypeAlias = Callable[..., Any]


class Clock:
    """A clock that stands still until it is moved; it begins at the time of its making."""

    def __init__(self) -> None:
        now = datetime.now(timezone.utc)
        # The state of a job has its times in milliseconds.
        self.began = self.now = now.replace(microsecond=now.microsecond // 1000 * 1000)

    def __call__(self) -> datetime:
        """Return the time."""
        return self.now

    def move(self, to: datetime) -> None:
        """Move to a later time; an earlier one changes nothing."""
        self.now = max(self.now, to)

    @property
    def elapsed(self) -> timedelta:
        """For how long the clock has run."""
        return self.now - self.began


class Agenda:
    """What is to be done at a time of a clock, in the order of the times."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._entries: list[tuple[datetime, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def at(self, due: datetime, do: Callable[[], object]) -> None:
        """Do something at a time."""
        heapq.heappush(self._entries, (due, next(self._numbers), do))

    def next_due(self) -> datetime | None:
        """Return the time of the first entry."""
        return self._entries[0][0] if self._entries else None

    def do_next(self) -> bool:
        """Do the first of what is due; False if nothing is."""
        if not self._entries or self._entries[0][0] > self.clock():
            return False
        heapq.heappop(self._entries)[2]()
        return True


class WorkerDied(BaseException):
    """Ends an attempt like the death of its worker: the bridge carries nothing out."""


class _StillHeart(Heartbeat):
    """A heartbeat without a thread: while the clock stands still, no reservation runs out."""

    def _keep_beating(self) -> None:
        pass


class _StillScheduler(Scheduler):
    """A scheduler without a thread: parked jobs are published when a test lets time pass."""

    def start(self) -> None:
        """Start nothing."""


class Recorder(Dispatcher):
    """Keeps every event, and calls the listeners at once, in the thread of the test."""

    def __init__(self, listeners: Sequence[Callable[[Event], object]]) -> None:
        self.events: list[Event] = []
        super().__init__((self.events.append, *listeners))
        #: The Ctrl-C, or the end of the test, that a listener has raised last.
        self.raised: BaseException | None = None

    def start(self) -> None:
        """Start nothing."""

    def emit(self, events: Sequence[Event]) -> None:
        """Keep events, and call the listeners with each; raises what is more than an error of a listener."""
        for event in events:
            for listener in self.listeners:
                self._call(listener, event)

    def _call(self, listener: Callable[[Event], object], event: Event) -> None:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - it is logged
            log_failure(listener, event)
        except BaseException as error:
            # A framework may take it for an error of the job. VirtualTime raises it again after the delivery.
            self.raised = error
            raise


class VirtualEngine(Engine):
    """The engine of a bridge under virtual time; it counts runs, and lets workers die."""

    def __init__(self, context: Context, *, recorder: Recorder, jitter: int | None, **settings: Any) -> None:
        super().__init__(context, **settings)
        self.recorder = recorder
        self._beat_anew = partial(
            _StillHeart,
            context.store_for("virtual time").reservations,
            settings["reservation"],
            context.clock,
        )
        self.revive()
        self._has_jitter = jitter is not None
        self._rng = random.Random(jitter)
        #: How many runs have begun.
        self.runs = 0
        #: How many of the next runs die as they begin.
        self.deaths = 0

    def begin(self, *args: Any, **options: Any) -> Admission:
        """Begin a job; raises WorkerDied for a run whose worker is to die."""
        admission = super().begin(*args, **options)
        if isinstance(admission, Run):
            self.runs += 1
            if self.deaths:
                self.deaths -= 1
                self.die()
        return admission

    def judge(self, run: Run, outcome: Any) -> Decision:
        """Judge an outcome, without jitter unless it has a seed; raises WorkerDied for a dead worker."""
        if self.is_dead:
            raise WorkerDied
        if not self._has_jitter:
            run = run._replace(policy=run.policy.model_copy(update={"jitter": False}))
        return super().judge(run, outcome)

    def die(self) -> None:
        """Let the worker of the present run die; raises WorkerDied."""
        self.is_dead = True
        raise WorkerDied

    def revive(self) -> None:
        """Put another worker in the place of the dead one, which holds no reservation."""
        #: Whether the worker of the present run has died.
        self.is_dead = False
        self.reservations.heart = self._beat_anew()


@contextmanager
def engine_of(bridge: Bridge, clock: Clock, jitter: int | None) -> Iterator[VirtualEngine]:
    """Put a virtual engine onto a bridge, with the parts that go with it, until the block ends.

    The store is in memory. All other settings are those of the bridge.
    """
    store = open_store(MEMORY)
    settings = replace(bridge.settings, store=store)
    recorder = Recorder(settings.listeners)
    context = replace(
        bridge.engine.context,
        store=store,
        clock=clock,
        events=recorder,
    )
    with ExitStack() as stack:
        stack.callback(store.close)
        store.prepare()
        stack.callback(setattr, bridge, "__dict__", dict(vars(bridge)))
        engine = partial(VirtualEngine, recorder=recorder, jitter=jitter)
        bridge._assemble(settings, context, engine, _StillScheduler)
        stack.callback(bridge.flush)
        yield cast(VirtualEngine, bridge.engine)


class VirtualWorker(Protocol):
    """The worker of one framework, which takes the messages of an app or broker from memory."""

    framework: str

    def deliver(self) -> bool:
        """Deliver the next message that waits; False if none does. Raises WorkerDied."""

    def replace(self) -> None:
        """Let the broker deliver the message of the dead worker again, unless it was acknowledged."""

    def put_in(self, name: str, make: Callable[[Handler], Handler]) -> None:
        """Put a function in the place of a task's own, made of it; raises LookupError."""


def instance_of(error: BaseException | type[BaseException]) -> BaseException:
    """Return an exception, or one of a class, which may need arguments."""
    if not isinstance(error, type):
        return error
    try:
        return error()
    except TypeError:
        return error.__new__(error)
