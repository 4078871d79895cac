"""Pauses: an operator holds jobs of a type, a queue, an error type or a dependency, and lets them go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..engine import holds
from ..engine.context import Context
from ..engine.events import paused
from ..errors import HoldNotFound
from ..rules.dependencies import Dependencies
from ..rules.holds import Hold
from ..rules.job import format_time
from ..rules.notations import rate_at
from ..store import Documents, Filter
from .audit import Actor, Audit, acting, uninterrupted
from .waiting import due_from


@dataclass(frozen=True, slots=True)
class Shown:
    """A hold that is on, and how many jobs that it is about are held, by it or by another hold."""

    hold: Hold
    held: int

    def to_ojs(self) -> dict[str, Any]:
        """Return the hold in JSON."""
        return {**self.hold.to_ojs(), "held": self.held}


class Holds:
    """The holds of a fleet. Every method raises StoreError, and ConfigurationError without a store."""

    def __init__(self, context: Context, known: holds.KnownHolds | None, dependencies: Dependencies) -> None:
        self._context, self._dependencies = context, dependencies
        self._known = known
        self.audit = Audit(context)

    def list(self) -> Sequence[Shown]:
        """Return the holds that are on, the oldest first."""
        documents, now = self._context.store_for("holds").documents, self._context.clock()
        on = [hold for hold in holds.read(documents) if hold.is_on(now)]
        return [self.shown(hold) for hold in sorted(on, key=lambda hold: hold.since)]

    def get(self, hold_id: str) -> Shown:
        """Return a hold that is on; raises HoldNotFound."""
        found = [shown for shown in self.list() if shown.hold.id == hold_id]
        if not found:
            raise HoldNotFound(f"there is no hold {hold_id!r}")
        return found[0]

    def shown(self, hold: Hold) -> Shown:
        """Return a hold with the number of its jobs."""
        parked = self._context.store_for("holds").parked
        types = hold.jobs if hold.dependency else (hold.type,)
        return Shown(hold, sum(parked.count(Filter(hold.queue, type_, kind="held")) for type_ in types))

    @uninterrupted()
    def pause(
        self,
        type: str | None = None,  # noqa: A002 - the spec's word
        *,
        queue: str | None = None,
        error_type: str | None = None,
        dependency: str | None = None,
        reason: str = "",
        until: datetime | None = None,
    ) -> Hold:
        """Hold the jobs that have a type, a queue, a type of the last error, and a dependency.

        Each counts where it is named; the type `*` is all jobs. Jobs that run, run on. Without a `reason` it
        is that of the audit's actor. Raises ValueError if nothing is named, for an invalid pattern or time,
        and for a dependency that is not among those of the bridge, if it has any.
        """
        now, documents = self._context.clock(), self._context.store_for("holds").documents
        named = {"type": type, "queue": queue, "error_type": error_type, "dependency": dependency}
        said = {name: text for name, text in named.items() if text is not None}
        if not said:
            raise ValueError(f"type: a pause needs one of {', '.join(named)}; the type '*' is every type")
        # Where none is declared, the workers know it.
        if dependency is not None and self._dependencies and dependency not in self._dependencies.by_name:
            known = ", ".join(self._dependencies.by_name)
            raise ValueError(f"dependency: {dependency!r:.100} is not the name of one; there are: {known}")
        ends = None if until is None else due_from(until, "until")
        if ends and ends <= now:
            raise ValueError(f"until: {until} is in the past")
        actor = Actor.current()
        by, why = actor.name, reason or actor.reason
        id_ = f"pause:{','.join(f'{name}={text}' for name, text in said.items())}"
        of = f"the pause of {by} since {format_time(now)}{f' ({why})' if why else ''}"
        hold = Hold(id_, of, now, by, why, type, queue, error_type, ends)
        if dependency in self._dependencies.by_name:
            hold = replace(hold, jobs=self._dependencies.jobs_of(dependency))
        hold = replace(hold, dependency=dependency)
        told = ends and format_time(ends)
        with acting(replace(actor, reason=why)), self.audit.recording("hold.pause", hold=id_, until=told):
            self.write(documents, hold)
        self._tell(hold)
        return hold

    @uninterrupted()
    def resume(
        self,
        type: str | None = None,  # noqa: A002 - the spec's word
        *,
        queue: str | None = None,
        error_type: str | None = None,
        dependency: str | None = None,
        id: str | None = None,  # noqa: A002 - the name of the field
        rate: str | float | None = None,
    ) -> Hold:
        """End the pause of this type, queue, error type and dependency, or the hold of this id; return it.

        What it has held goes on in its order, no faster than `rate`, such as `50/s` or `100/m`. Raises
        HoldNotFound, ValueError if nothing is named, and ConfigurationError for a rate that is none.
        """
        now, documents = self._context.clock(), self._context.store_for("holds").documents
        pace = None if rate is None else rate_at("rate", rate)
        wanted = {"type": type, "queue": queue, "error_type": error_type, "dependency": dependency}
        if (id is None) is not any(value is not None for value in wanted.values()):
            raise ValueError(f"id: name a pause either by its id, or by {', '.join(wanted)}")
        for hold in holds.read(documents):
            is_pause = id is None and hold.id.startswith("pause:")
            ours = hold.id == id or (is_pause and all(getattr(hold, n) == v for n, v in wanted.items()))
            if ours and hold.is_on(now):
                break
        else:
            what = id or ", ".join(f"{name} {text!r}" for name, text in wanted.items() if text)
            on = ", ".join(shown.hold.id for shown in self.list()) or "none"
            raise HoldNotFound(f"there is no pause of {what}; there are: {on}")
        ended = replace(hold, ended_at=now, rate=pace)
        with self.audit.recording("hold.resume", hold=hold.id, rate=rate):
            self.write(documents, ended)
        self._tell(ended)
        return ended

    def write(self, documents: Documents, hold: Hold) -> None:
        """Write a hold in place of an earlier one of its id; raises StoreError."""
        holds.write(documents, hold)
        if self._known:
            self._known.forget()

    def _tell(self, hold: Hold) -> None:
        """Tell of a whole queue, in the specification's words; of any other pause the audit tells."""
        if hold.queue and not (hold.type or hold.error_type or hold.dependency):
            is_over = hold.ended_at is not None
            self._context.emit(paused(hold.queue, hold.ended_at or hold.since, is_over=is_over))
