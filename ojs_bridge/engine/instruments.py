"""The instruments of a bridge: they are told of runs and of sent jobs in the thread that runs or sends.

Listeners hear of the same later, on a thread of their own; only an instrument can be active around a handler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from ..spec.decision import Decision
from ..spec.job import Job
from .events import Event
from .runs import Refuse, Run

logger = logging.getLogger("ojs_bridge")


class Instrument:
    """An exporter that needs more than events; each method may stay as it is here."""

    def started(self) -> None:
        """Take note that this process begins to work."""

    def stopped(self) -> None:
        """Take note that this process ends its work."""

    def sending(
        self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]
    ) -> AbstractContextManager[Any]:
        """Return the context in which a job is sent; `carrier` has the headers or options of its message."""
        return nullcontext()

    def running(self, framework: str, run: Run, carrier: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return the context of a run: its handler, and what becomes of a failure."""
        return nullcontext()

    def step(self, name: str, job: Job) -> AbstractContextManager[Any]:
        """Return the context of a step of the bridge after a handler has ended."""
        return nullcontext()

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Take note of a decision that was carried out; a success may be told of after its run."""

    def heard(self, event: Event) -> None:
        """Take note of what an operator or retention did with jobs."""

    def traceparent(self) -> str | None:
        """Return the trace context of the run of this thread, for the history of its job."""
        return None


class Entered:
    """The contexts of several instruments as one; an error of theirs goes to the log, and touches no job."""

    __slots__ = ("_contexts",)

    def __init__(self, contexts: Iterator[AbstractContextManager[Any]]) -> None:
        self._contexts: list[AbstractContextManager[Any]] = []
        try:
            self._contexts.extend(contexts)
        except Exception:
            logger.exception("an instrument has failed")

    def __enter__(self) -> None:
        """Enter each context; one that fails is left out."""
        for context in tuple(self._contexts):
            try:
                context.__enter__()
            except Exception:
                logger.exception("an instrument has failed")
                self._contexts.remove(context)

    def __exit__(self, *error: Any) -> None:
        """Leave each context, the last one first."""
        for context in reversed(self._contexts):
            try:
                context.__exit__(*error)
            except Exception:
                logger.exception("an instrument has failed")


class Instruments:
    """The instruments of one bridge."""

    def __init__(self) -> None:
        self._all: tuple[Instrument, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, instrument: Instrument) -> None:
        """Add an instrument."""
        self._all += (instrument,)

    def started(self) -> None:
        """Tell that this process begins to work."""
        for each in self._all:
            _safely(each.started)

    def stopped(self) -> None:
        """Tell that this process ends its work."""
        for each in self._all:
            _safely(each.stopped)

    def sending(self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]) -> Entered:
        """Return the context in which a job is sent."""
        return Entered(each.sending(framework, type_, queue, carrier) for each in self._all)

    def running(self, framework: str, run: Run, carrier: Mapping[str, Any]) -> Entered:
        """Return the context of a run."""
        return Entered(each.running(framework, run, carrier) for each in self._all)

    def step(self, name: str, job: Job) -> Entered:
        """Return the context of a step of the bridge."""
        return Entered(each.step(name, job) for each in self._all)

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Tell of a decision that was carried out, so long after the run began."""
        for each in self._all:
            _safely(each.concluded, run, decision, seconds)

    def heard(self, event: Event) -> None:
        """Tell of what an operator or retention did with jobs."""
        for each in self._all:
            _safely(each.heard, event)

    def traceparent(self) -> str | None:
        """Return the trace context of the run of this thread; None if no instrument has any."""
        found = (_safely(each.traceparent) for each in self._all)
        return next((context for context in found if context), None)


def _safely(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception:
        with suppress(Exception):
            logger.exception("an instrument has failed")
