"""What a night counts: pages that are false, alerts that are missing, and the row of a fault."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tests.night.faults import FAULTS
from tests.night.fleet import RULES
from tests.night.report import HEAD, Lived
from tests.night.watching import Watch, story_of

STORE, WORKERS = ("OjsStoreAway", "page"), ("OjsNoWorker", "page")


def alert(name: str, severity: str) -> Mapping[str, Any]:
    """Return an alert as Prometheus tells it."""
    labels = {"alertname": name, "severity": severity}
    return {"state": "firing", "labels": labels, "annotations": {"page": "http://page/"}}


def watched(seconds: Mapping[int, tuple[str, Iterable[tuple[str, str]]]]) -> Watch:
    """Return what a watch saw of a verdict's levels, and of alerts, by the second."""
    now = 0
    watch = Watch(
        lambda: [alert(*one) for one in seconds[now][1]],
        lambda: {"verdict": {"level": seconds[now][0], "sentence": f"It is {seconds[now][0]}."}},
    )
    for now in seconds:
        watch.look(now)
    return watch


def test_a_fault_that_pages_once() -> None:
    """The store is away from second 10 to 70; what follows from it is not told."""
    watch = watched({0: ("well", []), 15: ("away", []), 40: ("away", [STORE]), 75: ("well", [])})
    lived = Lived(FAULTS["store"], story_of(watch, 10, 70, 90), 1, None)
    assert lived.is_well
    title, alerts, false, verdict, to_cause, to_mend = lived.cells()
    assert (title, alerts, false) == ("The store is away", "OjsStoreAway 30", "0")
    assert (verdict, to_cause, to_mend) == ("*It is away.* 5", "1", "start the store")
    assert len(HEAD) == 6


def test_a_page_is_false_that_the_fault_does_not_call_for_or_that_comes_after_its_end() -> None:
    """An alert that fired before the fault is not its own."""
    watch = watched(
        {0: ("well", [WORKERS]), 20: ("away", []), 30: ("away", [WORKERS]), 80: ("well", [STORE])}
    )
    lived = Lived(FAULTS["store"], story_of(watch, 10, 70, 90), 1, None)
    assert [fired.name for fired in lived.story.false_pages(lived.fault.expected)] == [
        "OjsNoWorker",
        "OjsStoreAway",
    ]
    assert not lived.is_well
    silent = Lived(FAULTS["store"], story_of(watched({0: ("well", [])}), 0, 70, 90), None, None)
    assert silent.missing == [("OjsStoreAway",)]
    assert [*silent.cells()][1] == "none"


def test_the_faults_name_alerts_that_exist() -> None:
    """And each has a way to its cause, or none because the page is away."""
    names = {*re.findall(r"alert: (\w+)", RULES.read_text())}
    for fault in FAULTS.values():
        assert {*fault.expected, fault.by} <= names
        assert fault.by in fault.expected
        assert fault.steps or fault.elsewhere
