"""The jobs of a test, as the events of the Open Job Spec tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..engine.events import Event

#: How a job has ended; None for a job that goes on.
Outcome: TypeAlias = Literal["completed", "discarded", "dead_letter", "cancelled"]


@dataclass(frozen=True)
class Job:
    """A job of a test. After a replay, all fields but `events` describe the replay only."""

    id: str
    type: str
    events: tuple[Event, ...]

    @property
    def outcome(self) -> Outcome | None:
        """How the job has ended; None if it waits for its next attempt, or for a worker."""
        last = next((event for event in reversed(self._latest) if event.type in _ENDS), None)
        if last is None:
            return None
        return "dead_letter" if last.data.get("dead_lettered") else _ENDS[last.type]

    @property
    def attempts(self) -> int:
        """How many attempts have begun, those whose worker has died included."""
        return max((event.data.get("attempt", 0) for event in self._latest), default=0)

    @property
    def waits(self) -> list[float]:
        """The seconds before each retry; a snooze is none."""
        return [event.data["delay_ms"] / 1000 for event in self._of("job.retrying")]

    @property
    def errors(self) -> list[str]:
        """The error type of each attempt that has failed."""
        return [event.data["error"]["type"] for event in self._of("job.failed")]

    @property
    def reason(self) -> str:
        """Why the job ended, or goes on, in the words of the log; "" for a success."""
        return next((event.data["reason"] for event in reversed(self._latest) if "reason" in event.data), "")

    @property
    def _latest(self) -> tuple[Event, ...]:
        replays = [place for place, event in enumerate(self.events) if event.type == "dead_letter.retried"]
        return self.events[replays[-1] + 1 :] if replays else self.events

    def _of(self, type_: str) -> list[Event]:
        return [event for event in self._latest if event.type == type_]


_ENDS: dict[str, Outcome] = {
    "job.completed": "completed",
    "job.discarded": "discarded",
    "job.cancelled": "cancelled",
}


def jobs_of(events: Iterable[Event]) -> list[Job]:
    """Return the jobs that events tell of, in the order of their first events."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if event.subject:
            found.setdefault(event.subject, []).append(event)
    return [Job(id_, str(told[0].data["job_type"]), tuple(told)) for id_, told in found.items()]
