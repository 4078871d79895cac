"""The board: the state of each job, from its events, in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from jobs import JOBS, KILLED, DemoJob
from rich.box import SIMPLE
from rich.table import Table

STYLES = {
    "completed": "green",
    "discarded": "red",
    "dead-lettered": "magenta",
    "refused": "yellow",
    "running": "cyan",
    "killed": "red",
    "retrying": "blue",
    "snoozed": "blue",
}


@dataclass
class Delay:
    """One retry: its planned delay and, once the next attempt has started, its measured one; in seconds."""

    planned: float
    due: datetime
    late: float | None = None


@dataclass
class Track:
    """One job in one framework."""

    name: str
    job: DemoJob
    state: str = "sent"
    runs: int = 0
    due: datetime | None = None
    delays: list[Delay] = field(default_factory=list)
    #: When its worker was killed, when another worker began it, and what became of the killed run.
    killed: datetime | None = None
    again: datetime | None = None
    lost: str = ""

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in one event of this job."""
        data, at = event["data"], _time(event["time"])
        match event["type"]:
            case "job.started":
                self._started(at)
            case "job.retrying":
                self._waits("retrying", data)
                self.lost = f"attempt {data['attempt']} counts, as {data['error']['type']}"
            case "job.snoozed":
                self._waits("snoozed", data)
            case "job.completed":
                self.state = "completed"
            case "job.discarded":
                self.state = "dead-lettered" if data["dead_lettered"] else "discarded"

    def _started(self, at: datetime) -> None:
        self.runs += 1
        self.state = "running"
        if self.due and self.delays:
            self.delays[-1].late = (at - self.due).total_seconds()
        self.due = None
        if self.killed and not self.again:
            self.again = at

    def _waits(self, state: str, data: Mapping[str, Any]) -> None:
        self.state = state
        self.due = _time(data["next_retry_at"])
        self.delays.append(Delay(data["delay_ms"] / 1000, self.due))

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to the job by itself."""
        return self.state in ("completed", "discarded", "dead-lettered", "refused")

    @property
    def as_planned(self) -> bool:
        """Whether the job ended as its policy says, after as many runs, and never early."""
        early = any(delay.late is None or delay.late < 0 for delay in self.delays)
        return self.state == self.job.ending and self.runs == self.job.runs and not early

    def cells(self) -> tuple[str, str]:
        """Return the runs, and the state with the time to the next one, as the live table shows them."""
        wait = (self.due - datetime.now(timezone.utc)).total_seconds() if self.due else 0
        text = f"next in {wait:.1f} s" if wait > 0 else self.state
        return f"{self.runs}/{self.job.runs}", f"[{STYLES.get(self.state, 'dim')}]{text}[/]"


class Board:
    """All jobs of all frameworks."""

    def __init__(self, frameworks: tuple[str, ...]) -> None:
        self.tracks = {name: {job: Track(job, JOBS[job]) for job in JOBS} for name in frameworks}
        self._by_id: dict[str, Track] = {}

    def sent(self, framework: str, job: str, job_id: str) -> None:
        """Note the id under which a job was sent."""
        self._by_id[job_id] = self.tracks[framework][job]

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in one event; events of jobs that this process did not send are left out."""
        track = self._by_id.get(event["subject"])
        if track is not None:
            track.hear(event)

    @property
    def ended(self) -> bool:
        """Whether every job has ended."""
        return all(track.ended for tracks in self.tracks.values() for track in tracks.values())

    def to_kill(self, has_begun: Callable[[str, str], bool]) -> list[str]:
        """Return the frameworks whose worker is to be killed now, because it runs the job for that."""
        found = []
        for framework, tracks in self.tracks.items():
            track = tracks[KILLED]
            if track.state == "running" and not track.killed and has_begun(framework, KILLED):
                track.state, track.killed = "killed", datetime.now(timezone.utc)
                found.append(framework)
        return found

    def kills(self) -> list[str]:
        """Return a line for each worker that was killed: what became of its job, and how soon."""
        return [
            f"{framework}: the worker was killed with signal 9 while it ran the job: {track.lost}; "
            f"another worker began it again after {(track.again - track.killed).total_seconds():.1f} s"
            for framework, tracks in self.tracks.items()
            if (track := tracks[KILLED]).killed and track.again
        ]

    def unexpected(self) -> list[str]:
        """Return a line for each job that did not end as its policy says."""
        return [
            f"{framework}: {track.name}: {track.state} after {track.runs} runs, "
            f"not {track.job.ending} after {track.job.runs}, on time"
            for framework, tracks in self.tracks.items()
            for track in tracks.values()
            if not track.as_planned
        ]

    def live(self) -> Table:
        """Return the table of the state of every job."""
        table = Table(title="The same jobs on both frameworks", box=SIMPLE)
        table.add_column("job", no_wrap=True)
        for framework in self.tracks:
            table.add_column("runs", justify="right")
            table.add_column(framework, min_width=13)
        for job in JOBS:
            table.add_row(job, *(cell for tracks in self.tracks.values() for cell in tracks[job].cells()))
        return table

    def delays(self) -> Table:
        """Return the table of planned against measured delays, in seconds."""
        table = Table(title="Planned and measured delays, in seconds", box=SIMPLE)
        table.add_column("job", no_wrap=True)
        table.add_column("retry", justify="right")
        for framework in self.tracks:
            table.add_column(framework, justify="right")
            table.add_column("measured", justify="right")
        first, *others = self.tracks.values()
        for name, track in first.items():
            for index, _delay in enumerate(track.delays):
                cells = [_planned_and_measured(tracks[name], index) for tracks in (first, *others)]
                table.add_row(name, str(index + 1), *(cell for pair in cells for cell in pair))
        return table


def _time(text: str) -> datetime:
    """Return the time of an event; Python 3.10 does not read a final Z."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _planned_and_measured(track: Track, index: int) -> tuple[str, str]:
    if index >= len(track.delays):
        return "", ""
    delay = track.delays[index]
    measured = "" if delay.late is None else f"{delay.planned + delay.late:.3f}"
    return f"{delay.planned:.3f}", measured
