"""The budgets of retries: each process counts first attempts, and all share one credit in the store."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from ..errors import StoreError
from ..rules.budget import Budget, Credit
from ..rules.decision import SnoozeUntil, until_turn
from ..rules.dependencies import Dependencies
from ..rules.job import Job
from ..store import Document, Filter, Parked, ParkedJobs, Unreadable, next_of, reading
from .breakers import WITHOUT_STORE, InProcess
from .context import Context
from .holds import RELEASE_SECONDS, HoldDocuments
from .scheduler import once_a_period
from .storage_retry import at_once
from .threads import BetweenForks

logger = logging.getLogger("ojs_bridge")

#: The kind of the documents of budgets.
BUDGET = "budget"
#: How often a process writes how many first attempts have begun, in seconds.
WRITE_SECONDS = 1.0
#: So many held jobs are looked at, at the most, so many at a time.
LOOKS_AT, LOOKS = 1000, 100


class Budgets:
    """The budgets of a fleet's dependencies; without a store, of this process."""

    def __init__(
        self, context: Context, dependencies: Dependencies, publish: Callable[[Parked], object]
    ) -> None:
        self._store, self._clock, self._dependencies = context.store, context.clock, dependencies
        self._budgets = dependencies.budgets
        self._documents: HoldDocuments = self._store.documents if self._store else InProcess()
        #: Has a held job published now.
        self._publish = publish
        #: The first attempts of this process that are not written yet, by dependency.
        self._firsts = Counter[str]()
        self._due = 0.0
        self._between = BetweenForks()

    def hold(self, job: Job) -> SnoozeUntil | None:
        """Return until when a retry waits for its turn; None if the job may begin. Raises StoreError."""
        waits_for = job.turn
        if waits_for and not waits_for.startswith(f"{BUDGET}:"):
            return None  # a rate or a slot has held it, and it has had its turns up to there
        for name in self._dependencies.names_of(job.type):
            budget, id_ = self._budgets.get(name), f"{BUDGET}:{name}"
            if budget is None or waits_for not in ("", id_):
                continue
            if job.attempt == 1:
                self._count(name)
            elif turn := self._turn(name, budget, has_turn=bool(waits_for)):
                why = (
                    f"the retry budget of {name}: retries are at most {budget.share * 100:.3g} % of first "
                    f"attempts; its turn is at {turn:%H:%M:%S} UTC"
                )
                return until_turn(job, self._clock(), turn, id_, why)
            waits_for = ""
        return None

    def wake(self) -> None:
        """Let held retries go on before their turns, where first attempts have earned more.

        One worker of the fleet does it. Raises StoreError.
        """
        period = timedelta(seconds=RELEASE_SECONDS)
        for name, budget in self._budgets.items():
            known = self._documents.get(BUDGET, name)
            with suppress(Unreadable):
                if self._store and known and _credit_in(known).planned > self._clock():
                    call = partial(self._call, name, budget, self._store.parked)
                    once_a_period(self._store.reservations, f"{BUDGET}:{name}", period, self._clock, call)

    def _count(self, name: str) -> None:
        """Count a first attempt; about once a second this process writes what it has counted."""
        with self._between.lock:
            self._firsts[name] += 1
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + WRITE_SECONDS
            names = [*self._firsts]
        try:
            with at_once():
                for counted in names:
                    self._change(counted, lambda credit, _now: (credit, None))
        except StoreError as error:
            logger.debug("the first attempts are not written: %r", error)

    def _turn(self, name: str, budget: Budget, *, has_turn: bool) -> datetime | None:
        def step(credit: Credit, now: datetime) -> tuple[Credit, datetime | None]:
            credit, turn = credit.next(budget, now, has_turn=has_turn)
            if turn and self._store is None:
                # The broker keeps no order: who asks again first, goes first.
                return credit._replace(planned=now), min(turn, now + WITHOUT_STORE)
            return credit, turn

        return self._change(name, step)

    def _change(
        self, name: str, step: Callable[[Credit, datetime], tuple[Credit, datetime | None]]
    ) -> datetime | None:
        """Take a step that no other process takes at the same time, and write what was counted."""
        budget = self._budgets[name]
        with self._between.lock:
            firsts = self._firsts.pop(name, 0)
        try:
            while True:
                known, now = self._documents.get(BUDGET, name), self._clock()
                credit = _credit_in(known) if known else Credit.new(budget, now)
                credit, turn = step(credit.plus(budget, now, firsts), now)
                body = {"saved": credit.saved, "at": credit.at.isoformat()}
                body["planned"] = credit.planned.isoformat()
                if self._documents.write(next_of(known, BUDGET, name, credit.at, body)):
                    return turn
        except BaseException:
            with self._between.lock:
                self._firsts[name] += firsts
            raise

    def _call(self, name: str, budget: Budget, parked_jobs: ParkedJobs) -> None:
        """Make so many held retries due as may begin, those first whose turns come first."""
        line = sorted(self._line(name, parked_jobs), key=lambda parked: parked.next_retry_at)
        if not line:
            self._change(name, lambda credit, now: (credit._replace(planned=now), None))
            return
        known, now = self._documents.get(BUDGET, name), self._clock()
        count = int(_credit_in(known).plus(budget, now, 0).saved) if known else 0
        for parked in line[:count]:
            if parked.next_retry_at > now and parked_jobs.reschedule(parked, now):
                self._publish(parked)

    def _line(self, name: str, parked_jobs: ParkedJobs) -> Iterator[Parked]:
        """Yield held jobs that wait for their turn in a budget, of each type in the order of their turns."""
        for pattern in self._dependencies.jobs_of(name):
            where, cursor = Filter(type=pattern, kind="held"), None
            for _ in range(LOOKS_AT // LOOKS):
                page = parked_jobs.list(where, limit=LOOKS, cursor=cursor)
                for job in page.jobs:
                    if job.state.get("turn") == f"{BUDGET}:{name}":
                        yield job
                cursor = page.next_cursor
                if cursor is None:
                    break


@reading(BUDGET)
def _credit_in(known: Document) -> Credit:
    at, planned = (datetime.fromisoformat(known.body[name]) for name in ("at", "planned"))
    return Credit(float(known.body["saved"]), at, planned)
