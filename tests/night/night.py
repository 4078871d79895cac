"""Lives a night: one fault after the other, what was told of each, and the way from the alert to the mend."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.ledger import Reader
from tests.delays.tables import rows_into, table
from tests.night.desk import Desk, at_the_desk
from tests.night.faults import Fault
from tests.night.fleet import House, wait
from tests.night.report import HEAD, Lived
from tests.night.watching import Fired, Watch, story_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURES = DOCS / "explanation" / "night.md", DOCS / "pictures"
#: The seconds in which no alert must fire any more when a fault was mended, and then the verdict be well.
AFTER, WELL = 240.0, 150.0
#: A new error is told for an hour.
LONG = ("OjsNewErrors", "OjsErrorCameBack")


def live(faults: Sequence[Fault], folder: Path, *, quiet: float, write: bool) -> bool:
    """Live a night; return whether each fault raised its alerts, no other paged, and no job was lost."""
    with House(folder) as house, at_the_desk() as desk:
        watch = Watch(lambda: house.prometheus("alerts")["alerts"], lambda: house.asked("GET", "admin/now"))
        watch.start()
        say(f"quiet for {quiet:g} s; {house.page}, Prometheus at {house.ports['prometheus']}")
        time.sleep(quiet)
        for said in watch.said:
            say(f"  {said.level}: {said.sentence}")
        pictures = PICTURES if write else folder / "pictures"
        nights = []
        for fault in faults:
            nights.append(Night(fault, house, watch, desk, pictures).live())
            if write:
                rows_into(PAGE, HEAD, [[*nights[-1].cells()]])
        lost = unaccounted(house)
        watch.stop()
    print(table(HEAD, [[*night.cells()] for night in nights]), flush=True)
    say(f"{len(house.shop.sent):,} jobs sent, {house.shop.refused} refused, lost: {lost}; {watch.wrong}")
    return all(night.is_well for night in nights) and not lost


class Night:
    """One fault, lived through."""

    def __init__(self, fault: Fault, house: House, watch: Watch, desk: Desk, pictures: Path) -> None:
        self._fault, self._house, self._watch = fault, house, watch
        self._desk, self._pictures = desk, pictures

    def live(self) -> Lived:
        """Live through it; return what was told of it, and how many clicks led where."""
        fault, house, watch = self._fault, self._house, self._watch
        say(f"--- {fault.name}: {fault.title}")
        begun = time.time()
        fault.begin(house)

        def is_told() -> bool:
            names = {fired.name for fired in watch.fired if fired.since >= begun}
            levels = {said.level for said in watch.said if said.at >= begun}
            return all(names & {*needed} for needed in fault.needs) and bool(levels & {*fault.level})

        was_told = wait(is_told, fault.patience)
        say(f"told: {was_told}, after {time.time() - begun:.0f} s")
        by = next((fired for fired in watch.fired if fired.since >= begun and fired.name == fault.by), None)
        to_cause, to_mend = self._at_the_desk(by) if by else (None, None)
        mended = time.time()
        fault.end(house)
        self._tidy()

        def fires() -> list[Fired]:
            return [one for one in watch.firing() if one.since >= begun and one.name not in LONG]

        was_quiet = wait(lambda: not fires(), AFTER)
        is_well = wait(lambda: watch.said[-1].level == "well", WELL)
        lived = Lived(fault, story_of(watch, begun, mended, time.time()), to_cause, to_mend)
        say(f"quiet: {was_quiet}, well: {is_well}, {lived.story.quiet - mended:.0f} s after the mend")
        for said in lived.story.said:
            say(f"  {said.at - begun:.0f} s {said.level}: {said.sentence}")
        for fired in lived.story.false_pages(fault.expected):
            say(f"  FALSE: {fired.labels} {fired.annotations}")
        say(" | ".join(lived.cells()))
        return lived

    def _at_the_desk(self, by: Fired) -> tuple[int | None, int | None]:
        """Go from an alert's link to the cause and to the mend; return the clicks to each."""
        fault, desk = self._fault, self._desk
        if not fault.cause:
            return None, None
        desk.open(by.annotations["page"])
        to_cause = desk.clicks if desk.shows(fault.cause) else None
        desk.picture(self._pictures / f"night-{fault.name}.png")
        if not fault.steps:
            return to_cause, None
        return to_cause, desk.clicks if desk.walk(fault.steps) else None

    def _tidy(self) -> None:
        """End the pauses, and replay what died of the fault."""
        if not self._fault.type:
            return
        for hold in (self._house.asked("GET", "holds") or {"holds": ()})["holds"]:
            if hold["type"] == self._fault.type:
                self._house.asked("POST", f"holds/{hold['id']}/resume", {})
        body = {"action": "retry", "filter": {"type": self._fault.type}, "confirm": True}
        say(f"replay: {self._house.asked('POST', 'operations', body)}")


def unaccounted(house: House) -> list[str]:
    """Return the jobs that were sent and are neither done nor dead; those that wait have a while for it."""
    house.shop.close()
    reader = Reader(house.settings.ledger)

    def missing() -> set[str]:
        reader.refresh()
        dead = house.shop.dead()
        return {job for job in house.shop.sent if not reader.lines(job, "done") and job not in dead}

    wait(lambda: not missing(), AFTER)
    return sorted(missing())


def say(text: str) -> None:
    """Say what happens."""
    print(text, file=sys.stderr, flush=True)
