"""What one process has compared since it last wrote it to the store."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ...spec.failures import Failure, Outcome, cut
from ...spec.job import Job, format_time
from ...store import Tally
from .comparing import Verdict

#: Kinds that are counted, and not compared.
UNCOMPARED, BRIDGED = "uncompared", "bridged"
#: How many examples there are of each kind of difference.
EXAMPLES = 3
MAX_MESSAGE = 200
MAX_ID = 255


@dataclass
class _Kind:
    explanation: str = ""
    examples: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=EXAMPLES))


class Tallies:
    """Counts by task and kind, and the newest examples of each kind of difference."""

    def __init__(self, framework: str, *, tell_messages: bool) -> None:
        self._framework = framework
        self._tell_messages = tell_messages
        self._counts: Counter[tuple[str, str]] = Counter()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def count(self, task: str, kind: str, times: int = 1) -> None:
        """Count failed runs of a task."""
        self._counts[task, kind] += times

    def add(self, job: Job, outcome: Outcome, verdict: Verdict, at: datetime) -> None:
        """Count a comparison, and keep it as an example when it shows a difference."""
        self.count(job.type, verdict.kind)
        if verdict.kind == "same":
            return
        kind = self._kinds.setdefault((job.type, verdict.kind), _Kind())
        kind.explanation = verdict.explanation
        kind.examples.append(self._example(job, outcome, verdict, at))

    def taken(self, now: datetime) -> list[Tally]:
        """Return what is to be written, and begin to count anew."""
        tallies = [self._tally(task, kind, count, now) for (task, kind), count in self._counts.items()]
        self._counts.clear()
        return tallies

    def _tally(self, task: str, name: str, count: int, now: datetime) -> Tally:
        kind = self._kinds.get((task, name))
        if kind is None:
            return Tally(self._framework, task, name, count, now)
        return Tally(self._framework, task, name, count, now, kind.explanation, tuple(kind.examples))

    def _example(self, job: Job, outcome: Outcome, verdict: Verdict, at: datetime) -> dict[str, Any]:
        failure = outcome if isinstance(outcome, Failure) else None
        message = failure.message if failure and self._tell_messages else ""
        return {
            "job_id": cut(job.id, MAX_ID),
            "attempt": job.attempt,
            "at": format_time(at),
            "error_type": failure.type if failure else type(outcome).__name__.lower(),
            "message": cut(message, MAX_MESSAGE),
            "native": verdict.native,
            "ojs": verdict.ojs,
        }
