"""The instruments of a bridge: they hear of runs and of sent jobs in the thread that runs or sends.

Listeners hear of the same later, on a thread of their own; only an instrument can be active around a handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from ..rules.decision import Decision
from ..rules.job import Job
from .events import Event, log_error
from .runs import Refuse, Run
from .threads import is_aimed

_Context: TypeAlias = AbstractContextManager[Any]


class Instrument:
    """An exporter that needs more than events; each method may stay as it is here."""

    def started(self) -> None:
        """Begin to watch this process: it begins to work."""

    def stopped(self) -> None:
        """End the watch of this process: it ends its work."""

    def sending(
        self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]
    ) -> _Context | None:
        """Return the context in which a job is sent; `carrier` has the headers or options of its message."""
        return None

    def running(self, framework: str, run: Run, carrier: Mapping[str, Any]) -> _Context | None:
        """Return the context of a run: its handler, and what becomes of a failure."""
        return None

    def step(self, name: str, job: Job) -> _Context | None:
        """Return the context of a step of the bridge after a handler has ended."""
        return None

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Measure a decision that was carried out; that of a success perhaps after its run."""

    def heard(self, event: Event) -> None:
        """Measure what an operator or retention did with jobs, or that a breaker has opened."""

    def traceparent(self) -> str | None:
        """Return the trace context of the run of this thread, for the history of its job."""
        return None


class Entered:
    """The contexts of several instruments as one; an error of theirs goes to the log, and touches no job.

    An exception that is aimed at the thread is raised when all that was entered is left.
    """

    __slots__ = ("_contexts",)

    def __init__(self, contexts: Iterable[_Context | None]) -> None:
        self._contexts = [context for context in contexts if context is not None]

    def __enter__(self) -> None:
        """Enter each context; one that fails is left out."""
        contexts, self._contexts = self._contexts, []
        for context in contexts:
            try:
                context.__enter__()
            except BaseException as error:
                if _strikes(error):
                    self.__exit__(type(error), error, error.__traceback__)
                    raise
            else:
                self._contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        """Leave each context once, the last one first."""
        struck: BaseException | None = None
        while self._contexts:
            try:
                self._contexts.pop().__exit__(*error)
            except BaseException as failure:  # noqa: BLE001 - it is raised again below
                struck = failure if _strikes(failure) else struck
        if struck is not None:
            raise struck


class Instruments:
    """The instruments of one bridge."""

    def __init__(self) -> None:
        #: Empty where nobody has added one: ask this first, for then there is nothing to tell.
        self.all: tuple[Instrument, ...] = ()

    def add(self, instrument: Instrument) -> None:
        """Add an instrument."""
        self.all += (instrument,)

    def started(self) -> None:
        """Tell that this process begins to work."""
        for each in self.all:
            _safely(each.started)

    def stopped(self) -> None:
        """Tell that this process ends its work."""
        for each in self.all:
            _safely(each.stopped)

    def sending(self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]) -> Entered:
        """Return the context in which a job is sent."""
        return Entered(_safely(each.sending, framework, type_, queue, carrier) for each in self.all)

    def running(self, framework: str, run: Run, carrier: Mapping[str, Any]) -> Entered:
        """Return the context of a run."""
        return Entered(_safely(each.running, framework, run, carrier) for each in self.all)

    def step(self, name: str, job: Job) -> Entered:
        """Return the context of a step of the bridge."""
        return Entered(_safely(each.step, name, job) for each in self.all)

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Tell of a decision that was carried out, so long after the run began."""
        for each in self.all:
            _safely(each.concluded, run, decision, seconds)

    def heard(self, event: Event) -> None:
        """Tell of what an operator or retention did with jobs."""
        for each in self.all:
            _safely(each.heard, event)

    def traceparent(self) -> str | None:
        """Return the trace context of the run of this thread; None if no instrument has any."""
        contexts = (_safely(each.traceparent) for each in self.all)
        return next((context for context in contexts if context), None)


def _safely(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except BaseException as error:
        if _strikes(error):
            raise


def _strikes(error: BaseException) -> bool:
    """Return whether an exception is aimed at the thread; an instrument's own error goes to the log."""
    if is_aimed(error):
        return True
    log_error(error, "an instrument has failed")
    return False
