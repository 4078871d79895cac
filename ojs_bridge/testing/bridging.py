"""A bridge under virtual time: it has a clock that only tests move, and a store in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from ..bridge import Bridge
from ..engine.context import Context
from ..engine.engine import Engine
from ..engine.events import Dispatcher, Event, log_failure
from ..engine.heartbeat import Heartbeat
from ..engine.history import History
from ..engine.ports import Onward
from ..engine.reservations import Reservations
from ..engine.runs import Begun, Run
from ..rules.decision import Decision
from ..store import MEMORY, Store, open_store

#: The parts of a bridge that other objects may know: an adapter, or a user's module.
_PARTS = ("engine", "dead_letters", "broker_letters", "retries", "operations")


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


class WorkerDied(BaseException):
    """Ends an attempt like the death of its worker: the bridge carries nothing out."""


class _StillHeart(Heartbeat):
    """A heartbeat without a thread: while the clock stands still, no reservation runs out."""

    def _keep_beating(self) -> None:
        pass


class VirtualEngine(Engine):
    """The engine of a bridge under virtual time; it counts runs, and lets workers die."""

    def __init__(self, context: Context, *, jitter: int | None, **settings: Any) -> None:
        super().__init__(context, **settings)
        self._hold_anew = partial(
            Reservations,
            context.store,
            context.storage_retry,
            settings["reservation"],
            context.clock,
            fail_open=settings["fail_open"],
            heart=_StillHeart,
        )
        self.revive()
        self._has_jitter = jitter is not None
        self._rng = random.Random(jitter)
        #: How many runs have begun.
        self.runs = 0
        #: How many of the next runs die as they begin.
        self.deaths = 0
        #: Called with the time at which each retry is due that was parked.
        self.parked_until: Callable[[datetime], object] = id

    def begin(self, *args: Any, **options: Any) -> Begun:
        """Begin a job; raises WorkerDied for a run whose worker is to die."""
        begun = super().begin(*args, **options)
        if isinstance(begun, Run):
            self.runs += 1
            if self.deaths:
                self.deaths -= 1
                self.die()
        return begun

    def judge(self, run: Run, outcome: Any) -> Decision:
        """Judge an outcome, without jitter unless it has a seed; raises WorkerDied for a dead worker."""
        if self.is_dead:
            raise WorkerDied
        if not self._has_jitter:
            run = run._replace(policy=run.policy.model_copy(update={"jitter": False}))
        return super().judge(run, outcome)

    def park(self, begun: Any, onward: Onward, *rest: Any) -> None:
        """Park a retry, and tell when it is due."""
        super().park(begun, onward, *rest)
        self.parked_until(onward.at)

    def die(self) -> None:
        """Let the worker of the present run die; raises WorkerDied."""
        self.is_dead = True
        raise WorkerDied

    def revive(self) -> None:
        """Put another worker in the place of the dead one, which holds no reservation."""
        #: Whether the worker of the present run has died.
        self.is_dead = False
        self._reservations = self._hold_anew()


class Recorder(Dispatcher):
    """Keeps every event, and calls the listeners at once, in the thread of the test."""

    def __init__(self, listeners: Sequence[Callable[[Event], object]]) -> None:
        super().__init__(listeners)
        self.events: list[Event] = []
        #: The Ctrl-C, or the end of the test, that a listener has raised last.
        self.raised: BaseException | None = None

    def __bool__(self) -> bool:
        return True

    def emit(self, events: Sequence[Event]) -> None:
        """Keep events, and call the listeners with each; raises what is more than an error of a listener."""
        for event in events:
            self.events.append(event)
            for listener in self._listeners:
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


class VirtualBridge(Bridge):
    """A bridge with the settings of another one, a clock of its own and a store in memory."""

    engine: VirtualEngine
    store: Store

    def __init__(self, like: Bridge, clock: Clock, jitter: int | None) -> None:
        settings = replace(like.settings, store=open_store(MEMORY))
        self.recorder = Recorder(settings.listeners)
        context = replace(
            like.engine.context,
            store=settings.store,
            clock=clock,
            history=History(settings.store, settings.history, settings.header_budget),
            events=self.recorder,
        )
        self._assemble(settings, context, like._rules, partial(VirtualEngine, jitter=jitter))

    def start(self, framework: str = "", queues: Callable[[], Iterable[str]] = tuple) -> None:  # noqa: ARG002
        """Start no thread: parked retries are published when a test lets time pass."""
        self.engine.instruments.started()

    def stop(self) -> None:
        """End what `start` began."""
        self.engine.instruments.stopped()


def turn(one: Any, cls: type, state: dict[str, Any]) -> None:
    """Give an object a class and a state."""
    try:
        one.__class__ = cls
    except TypeError:
        # The object's own class has another layout, as with ABC or Generic first among its bases. A class on
        # top of it has its layout, and looks for its methods in `cls` alone.
        own = type(one)
        meta = type(cls.__name__, (type(own),), {"mro": lambda made: [made, *cls.__mro__]})
        one.__class__ = meta(cls.__name__, (own,), {"__module__": cls.__module__})
    one.__dict__ = state


@contextmanager
def turned_into(bridge: Bridge, other: VirtualBridge) -> Iterator[None]:
    """Give a bridge and its parts the classes and the state of another bridge, until the block ends.

    Objects that hold them then use the other bridge.
    """
    pairs = [(bridge, other), *((getattr(bridge, part), getattr(other, part)) for part in _PARTS)]
    before = [(one, type(one), vars(one)) for one, _ in pairs]
    for one, another in pairs:
        turn(one, type(another), vars(another))
    try:
        yield
    finally:
        for one, cls, state in before:
            turn(one, cls, state)
