"""The limits of dependencies: what is under way, and what an operator sets in their place for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..engine import holds
from ..engine.context import Context
from ..engine.limits import LOOKS_AT, RATE, SLOTS, parts_of, use_of
from ..errors import DependencyNotFound
from ..rules.dependencies import Dependencies
from ..rules.holds import Hold
from ..rules.job import format_time
from ..rules.notations import per_period, rate_at
from ..store import Filter
from .audit import Actor, acting, uninterrupted
from .holds import Holds
from .waiting import due_from


@dataclass(frozen=True, slots=True)
class LimitState:
    """A limit as it is now: its `rate` in jobs a second, and how many runs have a slot, of `concurrency`.

    So many jobs that need the dependency wait, for whatever reason. Turns are given out until `planned`. With
    an `argument` each value of it has a limit of its own, and the numbers are those of all together. The
    `operator` has set a limit in the place of the dependency's own.
    """

    key: str
    rate: float | None
    concurrency: int | None
    active: int
    waiting: int
    planned: datetime | None = None
    argument: str | None = None
    operator: Hold | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return the state in the specification's form (rl 10.1)."""
        slots, rate, override = None, None, None
        if self.concurrency is not None:
            free = None if self.argument else max(self.concurrency - self.active, 0)
            slots = {"limit": self.concurrency, "active": self.active, "available": free}
        if self.rate is not None:
            limit, period = per_period(self.rate)
            planned = self.planned and format_time(self.planned)
            rate = {"limit": limit, "period": period, "next_allowed_at": planned}
        if hold := self.operator:
            ends, since = hold.until and format_time(hold.until), format_time(hold.since)
            override = {"id": hold.id, "by": hold.by, "why": hold.why, "since": since, "expires_at": ends}
        return {
            "key": self.key,
            "concurrency": slots,
            "rate": rate,
            "argument": self.argument,
            "waiting_count": self.waiting,
            "override": override,
        }


class Limits:
    """The limits of a fleet. Every method raises StoreError, and ConfigurationError without a store."""

    def __init__(self, context: Context, dependencies: Dependencies, its_holds: Holds) -> None:
        self._context, self._dependencies, self._holds = context, dependencies, its_holds

    def list(self) -> Sequence[LimitState]:
        """Return the limits that dependencies have, or that operators have given them."""
        on = self._on()
        names = dict.fromkeys((*(one.name for one in self._dependencies.limited), *on))
        return [self._state(name, name, on) for name in names]

    def get(self, key: str) -> LimitState:
        """Return the limit of a dependency, or by `name:value` that of a value of its argument.

        Raises DependencyNotFound.
        """
        on, known = self._on(), self._dependencies.by_name
        if key in known or key in on:
            return self._state(key, key, on)
        # A name may have colons, and so may a value.
        keyed = (one.name for one in known.values() if one.key and key.startswith(f"{one.name}:"))
        if name := max(keyed, key=len, default=""):
            return self._state(key, name, on)
        raise self._unknown(key)

    @uninterrupted()
    def set(
        self,
        dependency: str,
        *,
        rate: str | float | None = None,
        concurrency: int | None = None,
        until: datetime | None = None,
        reason: str = "",
    ) -> Hold:
        """Limit the jobs of a dependency in the place of its own limit, until a time, or until it is resumed.

        What is not named stays as it is. Every worker knows it within two seconds. Runs that are under way go
        on; a `concurrency` of 0 holds all other jobs. With a key each value of it has this limit. Without a
        `reason` it is that of the audit's actor. `bridge.resume(id=...)` takes it back, by the id of what
        this returns. Raises DependencyNotFound, ValueError for another wrong argument, and ConfigurationError
        for a rate that is none.
        """
        now, documents = self._context.clock(), self._context.store_for("limits").documents
        # Where none is declared, the workers know it.
        if self._dependencies and dependency not in self._dependencies.by_name:
            raise self._unknown(dependency)
        if rate is None and concurrency is None:
            raise ValueError("concurrency: a limit needs a rate, a concurrency, or both")
        if rate is not None:
            rate_at("rate", rate)
        if concurrency is not None and (type(concurrency) is not int or concurrency < 0):
            raise ValueError(f"concurrency: {concurrency!r:.100} must be an integer of at least 0")
        ends = None if until is None else due_from(until, "until")
        if ends and ends <= now:
            raise ValueError(f"until: {until} is in the past")
        actor = Actor.current()
        by, why = actor.name, reason or actor.reason
        of = f"the limit of {by} since {format_time(now)}{f' ({why})' if why else ''}"
        hold = Hold(f"{holds.LIMIT}{dependency}", of, now, by, why, until=ends, dependency=dependency)
        if dependency in self._dependencies.by_name:
            hold = replace(hold, jobs=self._dependencies.jobs_of(dependency))
        hold = replace(hold, limit_rate=rate, limit_concurrency=concurrency)
        told: dict[str, Any] = {"rate": rate, "concurrency": concurrency, "until": ends and format_time(ends)}
        audit = self._holds.audit
        with acting(replace(actor, reason=why)), audit.recording("hold.limit", hold=hold.id, **told):
            self._holds.write(documents, hold)
        return hold

    def _unknown(self, name: str) -> DependencyNotFound:
        there = ", ".join(self._dependencies.by_name) or "none"
        return DependencyNotFound(f"{name!r:.100} is not the name of a dependency; there are: {there}")

    def _on(self) -> dict[str, Hold]:
        """Return the limits of operators that are on, by the name of their dependency."""
        documents, now = self._context.store_for("limits").documents, self._context.clock()
        on = (hold for hold in holds.read(documents) if hold.id.startswith(holds.LIMIT) and hold.is_on(now))
        return {hold.dependency or "": hold for hold in on}

    def _state(self, key: str, name: str, on: dict[str, Hold]) -> LimitState:
        store, hold = self._context.store_for("limits"), on.get(name)
        one = self._dependencies.by_name.get(name)
        argument = one.key if one and key == name else None
        parts = parts_of(name, key.removeprefix(f"{name}:")) if key != name else (name,)
        active, planned = use_of(store, parts, self._context.clock(), with_values=argument is not None)
        rate, concurrency = (one.rate, one.concurrency) if one else (None, None)
        if hold:
            rate = rate if hold.limit_rate is None else hold.limit_rate
            concurrency = concurrency if hold.limit_concurrency is None else hold.limit_concurrency
        waiting = self._waiting(name, parts if key != name else None)
        per_second = None if rate is None else rate_at("rate", rate)
        return LimitState(key, per_second, concurrency, active, waiting, planned, argument, hold)

    def _waiting(self, name: str, parts: Sequence[str] | None) -> int:
        """Count the held jobs that need a dependency, or look for those that wait for parts of its limit."""
        parked = self._context.store_for("limits").parked
        patterns = self._dependencies.jobs_of(name) if name in self._dependencies.by_name else ()
        wheres = [Filter(type=pattern, kind="held") for pattern in patterns]
        if parts is None:
            return sum(map(parked.count, wheres))
        turns = {f"{kind}:{part}" for kind in (RATE, SLOTS) for part in parts}
        found = (job for where in wheres for job in parked.list(where, limit=LOOKS_AT, cursor=None).jobs)
        return sum(job.state.get("turn") in turns for job in found)
