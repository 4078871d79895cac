"""The breakers of a fleet: each process counts how runs end, and all of them share one state in the store.

The state of a breaker is a part of the document of its hold: both change in one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from ..errors import StoreError
from ..rules.breaker import Breaker, Counts, State, after, next_probe, probed, ramp
from ..rules.decision import DeadLettered, Decision, Discarded, SnoozeUntil, later
from ..rules.dependencies import Dependencies, Dependency, failure_in, limited, outcomes
from ..rules.failures import Failure
from ..rules.hints import Heard
from ..rules.holds import ASK_AGAIN, Hold
from ..rules.job import Job, format_time
from ..store import Document, DocumentPage, next_of, readable
from . import events
from .context import Context
from .holds import KEPT, KIND, ON, HoldDocuments, KnownHolds, hold_of
from .runs import Refuse, Run
from .storage_retry import at_once
from .threads import BetweenForks

logger = logging.getLogger("ojs_bridge")

#: How often a write is tried when other processes write at the same moment.
_TRIES = 10
#: How fast jobs go on after an answer has asked for fewer calls, where no breaker says it; and the shortest
#: pause that is kept.
RATE, SHORTEST = 10.0, timedelta(seconds=1)
#: For how long a job without a store waits in the broker before it asks again.
WITHOUT_STORE = timedelta(seconds=5)


class InProcess:
    """The documents of a process without a store."""

    def __init__(self) -> None:
        self._kept: dict[str, Document] = {}
        self._between = BetweenForks()

    def get(self, kind: str, document_id: str) -> Document | None:  # noqa: ARG002 - there is one kind
        """Return a document, or None."""
        return self._kept.get(document_id)

    def write(self, document: Document) -> bool:
        """Write a document; False when there is this revision, or a later one."""
        with self._between.lock:
            known = self._kept.get(document.id)
            if known and document.revision <= known.revision:
                return False
            self._kept[document.id] = document
            return True

    def list(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:  # noqa: ARG002 - all at once
        """Return all documents."""
        return DocumentPage(tuple(self._kept.values()), None)


class SharedBreaker:
    """The breaker of a dependency, as this process knows it; `documents` have the state that all share."""

    def __init__(
        self,
        name: str,
        breaker: Breaker,
        context: Context,
        dependencies: Dependencies,
        documents: HoldDocuments,
    ) -> None:
        self.name, self.breaker = name, breaker
        #: The state as it was read last.
        self.state = State()
        self._context, self._dependencies, self._documents = context, dependencies, documents
        self._between = BetweenForks()
        #: What this process has not written yet, and when it wrote last.
        self._counts, self._written = Counts(), float("-inf")

    def count(self, *, has_failed: bool, is_probe: bool) -> bool:
        """Count a run, and write the counts if it is time; return whether it has opened or closed.

        A process writes at once what opens the breaker, and how a probe has ended.
        """
        at, now = self._context.clock().timestamp(), time.monotonic()
        if is_probe:
            one = Counts(probes=1, probes_failed=has_failed)
        else:
            one = Counts(1, 1, streak=1) if has_failed else Counts(1, worked_at=at)
        with self._between.lock:
            counts = self._counts = self._counts.plus(one)
        is_due = is_probe or counts.are_due(now - self._written, self.state)
        if not (is_due or (has_failed and self._opens(counts, at))):
            return False
        self._written = now
        with self._between.lock:
            counts, self._counts = self._counts, Counts()
        before, written = self.state.opened, None
        try:
            with at_once():
                written = self._change(lambda state, at: after(self.breaker, state, counts, at))
        except StoreError as error:
            logger.debug("the counts of the breaker of %s are not written: %r", self.name, error)
        if written is None:
            with self._between.lock:
                self._counts = counts.plus(self._counts)
        return self.state.opened != before or is_probe

    def _opens(self, counts: Counts, now: float) -> bool:
        return self.state.opened is None and after(self.breaker, self.state, counts, now).opened is not None

    def takes_probe(self) -> bool:
        """Return whether one more probe may run; all workers share their number."""
        try:
            with at_once():
                taken = self._change(lambda state, at: probed(self.breaker, state, at))
        except StoreError as error:
            logger.debug("no probe of %s: %r", self.name, error)
            return False
        return taken is not None or self.state.opened is None

    def give_back(self) -> None:
        """Let another probe run in the place of one that says nothing, as one that a limit holds."""
        try:
            with at_once():
                self._change(lambda state, _: replace(state, probes=state.probes[1:]))
        except StoreError as error:
            logger.debug("a probe of %s counts as lost: %r", self.name, error)

    def _change(self, step: Callable[[State, float], State | None]) -> State | None:
        """Take a step that no other process takes at the same time; return the state, or None for no step.

        Raises StoreError.
        """
        for _ in range(_TRIES):
            known, now = self._documents.get(KIND, f"breaker:{self.name}"), self._context.clock()
            found, at = [known] if known else [], now.timestamp()
            before = self.state = next(readable(found, partial(self._state_in, at)), State())
            state = step(before, at)
            if state is None or state == before:
                return state
            hold = self._hold(state, next(readable(found, hold_of), None), now)
            body = {**hold.to_json(), "state": state.to_json()}
            kept_at = ON.replace(tzinfo=timezone.utc)
            if hold.ended_at:
                # It stays as it is for a while: it is a part of an index.
                kept_at = known.at if known and now - KEPT / 2 < known.at <= now else now
            if self._documents.write(next_of(known, KIND, hold.id, kept_at, body)):
                self.state = state
                self._tell(before, state, hold, now)
                return state
        return None

    def _state_in(self, now: float, document: Document) -> State:
        state = State.from_json(document.body.get("state", {}))
        return state.as_of(now, self.breaker.seconds("cool_down"))

    def _hold(self, state: State, before: Hold | None, now: datetime) -> Hold:
        """Return the hold of the breaker in a state; a closed one has ended."""
        name, jobs = self.name, self._dependencies.jobs_of(self.name)
        jobs = tuple(sorted({*jobs, *before.jobs} if before else jobs))
        if state.opened is None:
            if before is None:
                before = Hold(f"breaker:{name}", f"the breaker of {name}", now, ended_at=now, dependency=name)
            elif before.ended_at is None:
                rate = ramp(self.breaker, state, now.timestamp())
                before = replace(before, ended_at=now, rate=rate, probe_at=None, probes=0)
            return replace(before, jobs=jobs)
        opened, (at, probes) = _time(state.opened), next_probe(self.breaker, state)
        probing = "probes run" if state.is_probed(now.timestamp()) else f"next probe at {_time(at):%H:%M:%S}"
        failed = f"{state.failed} of {state.runs} calls failed"
        if state.streak:
            failed = f"all of the last {state.streak} calls failed"
        return Hold(
            f"breaker:{name}",
            f"the breaker of {name} since {opened:%H:%M:%S} UTC, {failed}; {probing}",
            opened,
            dependency=name,
            jobs=jobs,
            probe_at=later(_time(at), 0),
            probes=probes,
        )

    def _tell(self, before: State, state: State, hold: Hold, now: datetime) -> None:
        """Tell the log and the listeners if the breaker has opened or closed, or is probed now."""
        was_probed, is_probed = (one.is_probed(now.timestamp()) for one in (before, state))
        opened = state if before.opened is None else before
        facts: dict[str, Any] = {"runs": opened.runs, "failed": opened.failed}
        if state.opened is None:
            if before.opened is None:
                return
            logger.warning("the breaker of %s has closed: what it held goes on", self.name)
            change, facts["rate"] = "closed", hold.rate
        elif before.opened is None or (was_probed and not is_probed):
            logger.warning("jobs are held by %s", hold.reason)
            change, facts["probe_at"] = "opened", hold.probe_at and format_time(hold.probe_at)
        elif is_probed and not was_probed:
            logger.info("the breaker of %s lets %d probes through", self.name, self.breaker.probes)
            change, facts["probes"] = "half_open", self.breaker.probes
        else:
            return
        self._context.emit(events.breaker(change, self.name, now, **facts))


@dataclass(frozen=True, slots=True)
class Probe:
    """A run that asks whether a dependency works again."""

    of: SharedBreaker
    dependency: Dependency
    hold: Hold
    since: float


class Breakers:
    """The breakers of all dependencies: they hear how runs end, and say which jobs run as probes."""

    def __init__(self, context: Context, dependencies: Dependencies) -> None:
        store, clock = context.store, context.clock
        documents: HoldDocuments = store.documents if store else InProcess()
        self._context, self._dependencies, self._documents = context, dependencies, documents
        self._shared = {
            name: SharedBreaker(name, one.breaker, context, dependencies, documents)
            for name, one in dependencies.by_name.items()
            if one.breaker
        }
        #: The holds of this process, which are read again when it has changed one.
        self.known = KnownHolds(
            *(documents, clock, dependencies, self), ASK_AGAIN if store else WITHOUT_STORE
        )
        #: The probes that run in this process, by the keys of their jobs.
        self._probes: dict[str, Probe] = {}
        #: Until when each dependency has asked to wait, as this process has heard.
        self._asked: dict[str, datetime] = {}

    def heard(self, run: Run | Refuse, decision: Decision) -> None:
        """Count a run that has ended; about once a second the counts are written. Raises StoreError."""
        depends = self._dependencies.of_type(run.job.type)
        probe = self._probes.pop(run.job.key, None) if self._probes else None
        if probe and isinstance(decision, SnoozeUntil) and decision.hold == probe.hold.id:
            ended = [(probe.dependency, True)]
        else:
            ended = [*outcomes(depends, decision)]
        for dependency, has_failed in ended:
            shared = self._shared.get(dependency.name)
            is_probe = probe is not None and probe.of is shared
            if shared and shared.count(has_failed=has_failed, is_probe=is_probe):
                self.known.forget()
        if probe and all(dependency.name != probe.of.name for dependency, _ in ended):
            probe.of.give_back()
            self.known.forget()
        failure = failure_in(decision)
        if failure and failure.retry_after is not None and (its := limited(depends, failure)):
            self._wait_for(its, failure, run)

    def have_read(self, documents: Sequence[Document]) -> None:
        """Take the states of breakers that this process has read with the holds."""

        def take(document: Document) -> None:
            shared = self._shared.get(str(document.body.get("dependency")))
            if shared and "state" in document.body:
                shared.state = State.from_json(document.body["state"])

        for _ in readable(documents, take):
            pass

    def lets_through(self, hold: Hold, job: Job) -> bool:
        """Return whether a job of an open breaker runs, as a probe."""
        shared = self._shared.get(hold.dependency or "")
        if shared is None:
            return False
        # Whatever the answer is, the hold is another one now.
        self.known.forget()
        if not shared.takes_probe():
            return False
        now, longest = time.monotonic(), 10 * shared.breaker.seconds("cool_down")
        for key, probe in [*self._probes.items()]:
            if now - probe.since > longest:
                self._probes.pop(key, None)
        self._probes[job.key] = Probe(shared, self._dependencies.by_name[shared.name], hold, now)
        return True

    def probed_by(self, job: Job) -> str:
        """Return the name of the dependency for which a job runs as a probe, or ""."""
        probe = self._probes.get(job.key)
        return probe.dependency.name if probe else ""

    def spare(self, run: Run, decision: Decision) -> Decision:
        """Return the decision about a run: a probe that has failed for its dependency never ends its job."""
        probe = self._probes.get(run.job.key) if self._probes else None
        if not (probe and isinstance(decision, Discarded | DeadLettered) and decision.cause == "exhausted"):
            return decision
        if (probe.dependency, True) not in outcomes([probe.dependency], decision):
            return decision
        waits = self.known.decision(probe.hold, run.job)
        why = f"a probe failed with {decision.failure.type}, and the job keeps its last attempt"
        return replace(waits, reason=f"{waits.reason}; {why}")

    def _wait_for(self, dependency: Dependency, failure: Failure, run: Run | Refuse) -> None:
        """Hold the jobs of a dependency until its answer has asked to come again; raises StoreError."""
        name, now, hint = dependency.name, self._context.clock(), failure.retry_after
        asked = timedelta(seconds=hint.seconds(now)) if isinstance(hint, Heard) else hint or timedelta()
        until = (
            later(now, min(asked, run.policy.max_interval).total_seconds()) if isinstance(run, Run) else now
        )
        # Many jobs may have heard of the same moment.
        if until - now < SHORTEST or until < self._asked.get(name, now) + SHORTEST:
            return
        self._asked[name] = until
        id_ = f"rate_limited:{name}"
        known = self._documents.get(KIND, id_)
        before = next(readable([known] if known else [], hold_of), None)
        if before and before.is_on(now) and before.until and until < before.until + SHORTEST:
            return
        reason = f"{name}, which asked at {now:%H:%M:%S} for fewer calls, until {until:%H:%M:%S} UTC"
        shared, jobs = self._shared.get(name), self._dependencies.jobs_of(name)
        rate = ramp(shared.breaker, shared.state, now.timestamp()) if shared else RATE
        hold = Hold(id_, reason, now, until=until, rate=rate, dependency=name, jobs=jobs)
        # Where another process has heard the same at this moment, its hold stays.
        if self._documents.write(next_of(known, KIND, id_, until, hold.to_json())):
            logger.warning("jobs are held by %s", reason)
        self.known.forget()


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
