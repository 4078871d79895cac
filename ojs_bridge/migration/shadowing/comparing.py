"""Compares two decisions on a failed run, the framework's and the policy's, and reports on many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, TypeAlias

from typing_extensions import assert_never

from ...spec.decision import Complete, DeadLetter, Decision, Discard, GiveBack, RetryAt, Snooze, decide
from ...spec.duration import spoken
from ...spec.failures import Outcome, cut
from ...spec.job import Job, format_time
from ...spec.policy import RetryPolicy
from ...store import Tally
from ..plan.waits import Drawn, extremes

#: Delays may differ by so many seconds, because frameworks round to the millisecond.
TOLERANCE = 0.002
MAX_REASON = 300

#: The meaning of each kind of comparison.
MEANINGS: Mapping[str, str] = {
    "same": "Both decide alike.",
    "end": "Both end the job, and what is kept of it differs.",
    "delay": "Both retry, but the policy would not choose the framework's delay.",
    "ends_earlier": "The framework retries, and the policy has no attempt left.",
    "retries_longer": "The framework ends the job, and the policy still has attempts.",
    "non_retryable": "The framework retries an error that the policy or the task does not retry.",
    "handler": "The framework retries, although the handler asks for no retry.",
    "expires": "The framework retries, and the job would expire before the policy's retry.",
    "snoozes": "The handler asks for a pause, and the framework takes that for a failure.",
    "gives_back": "The worker shut down: the framework uses an attempt, the policy does not.",
    "refused": "The job's own policy is invalid: the bridge would not run it, but keep it as a dead letter.",
}
MATCHING = frozenset({"same", "end"})
#: The kinds of runs that are counted, but not compared.
UNCOMPARED, BRIDGED = "uncompared", "bridged"

_CAUSES = {
    "exhausted": "ends_earlier",
    "non_retryable": "non_retryable",
    "handler": "handler",
    "expired": "expires",
    "invalid": "refused",
}


@dataclass(frozen=True, slots=True)
class Retried:
    """The framework retries after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The framework ends the job; `kept` says whether it keeps the message."""

    kept: bool


#: The framework's decision about a failed run.
Native: TypeAlias = Retried | Ended


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison: its kind, both decisions in words, and an explanation."""

    kind: str
    native: str
    ojs: str
    explanation: str


#: The verdict on equal decisions, which need no words.
SAME = Verdict("same", "", "", "")


def compare(
    policy: RetryPolicy, job: Job, outcome: Outcome, native: Native, *, now: datetime, capped: bool = True
) -> Verdict:
    """Compare the framework's decision about a failed run to that of the policy."""
    decision = decide(policy, job, outcome, now=now, rng=Drawn(0.0), capped=capped)
    match decision:
        case RetryAt():
            return _retries(policy, job.attempt, decision, native)
        case Snooze():
            return _differs("snoozes", native, job, f"pause of {spoken(decision.delay)}", decision)
        case GiveBack():
            return _differs("gives_back", native, job, "attempt given back", decision)
        case DeadLetter() | Discard():
            return _ends(decision, native, job)
        case Complete():
            return SAME
        case _:
            assert_never(decision)


def _span(policy: RetryPolicy, n: int, decision: RetryAt) -> tuple[float, float]:
    """Return the least and the most seconds that the policy may wait before retry n."""
    found = [decision.delay]
    if policy.jitter is not False and decision.failure.retry_after is None:
        # With a custom strategy that raises, the policy waits for its max_interval.
        with suppress(Exception):
            found = extremes(policy, n, decision.failure)
    return min(found), max(found)


def _retries(policy: RetryPolicy, n: int, decision: RetryAt, native: Native) -> Verdict:
    least, most = _span(policy, n, decision)
    if isinstance(native, Retried) and least - TOLERANCE <= native.delay <= most + TOLERANCE:
        return SAME
    span = " to ".join(dict.fromkeys((spoken(least), spoken(most))))
    own, ojs = told(native, n), f"retry {n} in {span}"
    kind = "delay" if isinstance(native, Retried) else "retries_longer"
    return Verdict(kind, own, ojs, f"{own}; the policy: {ojs}")


def _ends(decision: DeadLetter | Discard, native: Native, job: Job) -> Verdict:
    kept = isinstance(decision, DeadLetter)
    if isinstance(native, Ended) and native.kept == kept:
        return SAME
    kind = "end" if isinstance(native, Ended) else _CAUSES[decision.cause]
    ojs = f"{'dead letter' if kept else 'discarded'} ({decision.cause})"
    return _differs(kind, native, job, ojs, decision)


def _differs(kind: str, native: Native, job: Job, ojs: str, decision: Decision) -> Verdict:
    own = told(native, job.attempt)
    return Verdict(kind, own, ojs, f"{own}; the policy: {ojs}, because {cut(decision.reason, MAX_REASON)}")


def told(native: Native, n: int) -> str:
    """Return the framework's decision after attempt n, in words."""
    if isinstance(native, Retried):
        return f"retry {n} in {spoken(native.delay)}"
    return f"ended, {'kept' if native.kept else 'not kept'}"


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The tallies of a task, with the most frequent difference first.

    `failed` counts the runs that the framework decided, `bridged` those that were already under the bridge,
    `matched` the compared runs with equal decisions about a retry and its time.
    """

    framework: str
    task: str
    failed: int
    compared: int
    matched: int
    bridged: int
    last_seen: datetime
    differences: tuple[Tally, ...]

    @property
    def shadow_match_rate(self) -> float | None:
        """The share of the matched runs among the compared runs; None without any."""
        return self.matched / self.compared if self.compared else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as the command line shows it."""
        rate = self.shadow_match_rate
        names = ("framework", "task", "failed", "compared", "matched")
        return {
            **{name: getattr(self, name) for name in names},
            "shadow_match_rate": None if rate is None else round(rate, 4),
            "bridged": self.bridged,
            "last_seen": format_time(self.last_seen),
            "differences": [{**t.to_json(), "meaning": meaning(t)} for t in self.differences],
        }


def meaning(tally: Tally) -> str:
    """Return the meaning of a kind; nothing for a kind of a newer version."""
    return MEANINGS.get(tally.kind, "")


def reports(tallies: Iterable[Tally]) -> list[TaskReport]:
    """Return the report of each task, from tallies in the order of the store."""
    return [
        _report(framework, task, [*found])
        for (framework, task), found in groupby(tallies, key=lambda t: (t.framework, t.task))
    ]


def _report(framework: str, task: str, tallies: list[Tally]) -> TaskReport:
    counts = {tally.kind: tally.count for tally in tallies}
    bridged, uncompared = counts.pop(BRIDGED, 0), counts.pop(UNCOMPARED, 0)
    compared = sum(counts.values())
    kinds = (tally for tally in tallies if tally.kind in counts and tally.kind != "same")
    return TaskReport(
        framework,
        task,
        failed=compared + uncompared,
        compared=compared,
        matched=sum(count for kind, count in counts.items() if kind in MATCHING),
        bridged=bridged,
        last_seen=max(tally.last_seen for tally in tallies),
        differences=tuple(sorted(kinds, key=lambda tally: -tally.count)),
    )
