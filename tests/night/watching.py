"""What an on-call engineer is told in a night: the alerts that fire, and the verdict's sentences."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What is said where nobody answers.
GONE = "(no answer)"


@dataclass
class Fired:
    """An alert that fired: its labels, its links, and from when until when."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float
    until: float | None = None

    @property
    def name(self) -> str:
        """The alert's name."""
        return self.labels["alertname"]

    @property
    def is_page(self) -> bool:
        """Whether it wakes somebody."""
        return self.labels.get("severity") == "page"


@dataclass(frozen=True)
class Said:
    """The verdict as it was from a time on."""

    at: float
    level: str
    sentence: str


@dataclass
class Watch:
    """Notes each alert that fires and each verdict, in a thread of its own."""

    alerts: Callable[[], Iterable[Mapping[str, Any]]]
    moment: Callable[[], Mapping[str, Any] | None]
    fired: list[Fired] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    #: What it met that it did not expect.
    wrong: list[str] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End."""
        self._ends.set()

    def firing(self) -> list[Fired]:
        """Return the alerts that fire now."""
        return [fired for fired in self.fired if fired.until is None]

    def _run(self) -> None:
        while not self._ends.wait(1):
            try:
                self.look(time.time())
            except Exception as error:
                self.wrong.append(repr(error))

    def look(self, now: float) -> None:
        """Note what fires and what is said at a time."""
        firing = {_key(alert): alert for alert in self.alerts() if alert["state"] == "firing"}
        for fired in self.firing():
            if _key({"labels": fired.labels}) not in firing:
                fired.until = now
        known = {_key({"labels": fired.labels}) for fired in self.firing()}
        self.fired += [
            Fired(alert["labels"], alert["annotations"], now)
            for key, alert in firing.items()
            if key not in known
        ]
        moment = self.moment()
        verdict = moment["verdict"] if moment else {"level": "gone", "sentence": GONE}
        said = Said(now, verdict["level"], verdict["sentence"])
        if not self.said or (self.said[-1].level, self.said[-1].sentence) != (said.level, said.sentence):
            self.said.append(said)


def _key(alert: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(alert["labels"].items()))


@dataclass(frozen=True)
class Story:
    """What was told of a fault, from its begin until it was mended, and until all was quiet again."""

    begun: float
    mended: float
    quiet: float
    fired: Sequence[Fired]
    said: Sequence[Said]

    def false_pages(self, expected: Iterable[str]) -> list[Fired]:
        """Return the pages that the fault does not call for, or that began after it was mended."""
        names = {*expected}
        pages = [fired for fired in self.fired if fired.is_page]
        return [fired for fired in pages if fired.name not in names or fired.since > self.mended]

    def first(self) -> dict[str, float]:
        """Return the alerts by name, with the seconds from the fault's begin until they fired."""
        seconds: dict[str, float] = {}
        for fired in self.fired:
            seconds.setdefault(fired.name, fired.since - self.begun)
        return seconds

    def told(self) -> dict[str, float]:
        """Return the sentences that are not well, with the seconds after the fault's begin."""
        told: dict[str, float] = {}
        for said in self.said:
            if said.level != "well":
                told.setdefault(said.sentence, said.at - self.begun)
        return told


def story_of(watch: Watch, begun: float, mended: float, quiet: float) -> Story:
    """Return the story of a time: alerts that began in it, and what was said in it."""
    fired = [fired for fired in watch.fired if begun <= fired.since <= quiet]
    said = [said for said in watch.said if begun <= said.at <= quiet]
    return Story(begun, mended, quiet, fired, said)
