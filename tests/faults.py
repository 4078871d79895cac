"""Faults in the bridge's own steps: a step raises, for as long as a file says so."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ojs_bridge import StoreError
from ojs_bridge.adapters.private_names import PrivateName, _in_code_of
from tests.servers import eventually

VARIABLE = "OJS_TEST_FAULTS"


class OddStoreError(StoreError):
    """An error of a store that the bridge does not expect."""


class NoDescriptor(OSError):
    """The process can open nothing more."""


#: What a process lacks for a while: no job is to blame.
LACKS = (MemoryError, RecursionError, NoDescriptor)
KINDS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (RuntimeError, OddStoreError, *LACKS)
}
#: The steps of a job of each framework, from its receipt to its handler.
_SHARED = [
    "engine.engine:Engine.begin",
    "engine.engine:Engine.admit",
    "engine.engine:Engine.early",
    "engine.engine:_sender",
    "engine.runs:TaskPolicy.of_job",
    "engine.reservations:Reservations.reserve",
    "engine.heartbeat:Heartbeat.asks_as_of",
    "engine.heartbeat:Heartbeat.start",
]
STEPS_OF = {
    "celery": [
        *_SHARED,
        "engine.events:started",
        "engine.events:Dispatcher.emit",
        "celery.request:carried",
        "celery.receiving:_check",
        "celery.task:_body",
        "celery.delivery:Delivery.__init__",
        "celery.delivery:installation",
        "celery.run:task_policy",
        "celery.delivery:Delivery.read",
        "celery.wire:read",
        "celery.wire:decoded",
        "celery.wire:queue_of",
        "celery.wire:time_in",
    ],
    "dramatiq": [
        *_SHARED,
        "dramatiq.run:ActorRun.enter",
        "dramatiq.run:ActorRun._begin",
        "dramatiq.run:ActorRun.__init__",
        "dramatiq.actors:Actors.of_message",
        "dramatiq.run:ActorRun._admission",
        "dramatiq.run:ActorRun._ask",
        "dramatiq.run:bare_job",
        "dramatiq.run:max_age",
        "dramatiq.run:job_of",
        "dramatiq.run:publication",
        "dramatiq.translate:decoded",
        "dramatiq.receiving:flaw_of",
        "dramatiq.on_redis:Hands.take",
    ],
}
#: What fails for a held job if neither store nor broker answers, and if the store does not.
HELD = [
    "engine.carrying:Carrying._carry",
    "engine.reservations:Reservations.settle",
    "engine.storing:Storing.park",
]
#: The steps of Celery after a crash, and after a job has ended.
AFTERWARDS = ["celery.delivery:Delivery.resume", "celery.keeping:RequestKeeping.forget"]


class Faults:
    """Names the step that is to raise, and its error, to the processes that have armed themselves."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fault"
        self._file.touch()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a worker that is to be armed."""
        return {VARIABLE: str(self._file)}

    @contextmanager
    def at(self, step: str, kind: str) -> Iterator[None]:
        """Have a step, or several, raise until the block has ended, and until a process has passed one."""
        self._raised.unlink(missing_ok=True)
        self._file.write_text(f"{step} {kind}")
        try:
            yield
            eventually(self._raised.exists, seconds=30, what=f"a fault at {step}")
        finally:
            self._file.write_text("")

    @property
    def _raised(self) -> Path:
        return self._file.with_name("raised")


def arm(steps: list[str]) -> None:
    """Have every step of this process ask whether it is to raise, if the process was started for that."""
    if VARIABLE in os.environ:
        for step in steps:
            _arm(step, Path(os.environ[VARIABLE]))


def place_of(step: str) -> tuple[Any, str]:
    """Return the module or class that has a step, and the step's name there."""
    module, _, name = step.partition(":")
    *owners, last = name.split(".")
    return functools.reduce(getattr, owners, import_module(f"ojs_bridge.{module}")), last


def _arm(step: str, file: Path) -> None:
    owner, last = place_of(step)
    original = getattr(owner, last)

    @functools.wraps(original, updated=())
    def faulty(*args: Any, **kwargs: Any) -> Any:
        *steps, kind = file.read_text().split() or [""]
        if step in steps:
            file.with_name("raised").touch()
            raise KINDS[kind]("a fault of the test's")
        return original(*args, **kwargs)

    setattr(owner, last, faulty)


@contextmanager
def wrapped(name: PrivateName) -> Iterator[None]:
    """Have each function at a name's place wrapped, as instrumentation does it, until the block ends."""
    module, _, path = name.place.partition(":")
    *above, last = path.split(".") if path else [""]
    owner = functools.reduce(getattr, above, import_module(module))
    inner = getattr(owner, last) if last else owner
    if not inspect.isfunction(inner):
        owner, before = inner, {k: f for k, f in vars(inner).items() if inspect.isfunction(f)}
    else:
        before = {last: inner}
    try:
        for key, function in before.items():
            setattr(
                owner, key, functools.wraps(function)(lambda *args, f=function, **given: f(*args, **given))
            )
        _in_code_of.cache_clear()
        yield
    finally:
        for key, function in before.items():
            setattr(owner, key, function)
        _in_code_of.cache_clear()
