"""Shadow mode without a framework: comparing, the budget, the switch, what is written and reported."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.migration import shadow
from ojs_bridge.migration.shadowing import Switch
from ojs_bridge.migration.shadowing.comparing import (
    BRIDGED,
    MEANINGS,
    UNCOMPARED,
    Ended,
    Native,
    Retried,
    compare,
    reports,
)
from ojs_bridge.migration.shadowing.recording import Budget, FailedRun, Pending, Recorder, Writer, harmless
from ojs_bridge.spec.failures import Failure, Interrupted, Outcome, Snoozed
from ojs_bridge.spec.job import Job
from ojs_bridge.spec.policy import RetryPolicy
from ojs_bridge.store import Store, Tally

NOW = datetime(2026, 11, 22, tzinfo=timezone.utc)
DOWN = Failure("external.down", "down")
#: Retry 1 after 5 to 15 s, retry 2 after 10 to 30 s.
POLICY = {"max_attempts": 3, "initial_interval": "PT10S"}
KEEP = {"on_exhaustion": "dead_letter"}
KEPT, GONE = Ended(kept=True), Ended(kept=False)


def stubborn(n: int, seconds: float, rng: Any) -> float:
    """A jitter that draws until it likes what it has drawn."""
    while (drawn := rng.random()) < 0.25:
        pass
    return seconds * drawn


#: policy, attempt, what came of the run, what the framework did -> kind, the policy's decision in words
COMPARED: dict[str, tuple[dict[str, Any], int, Outcome, Native, str, str]] = {
    "in the range": (POLICY, 1, DOWN, Retried(14.9), "same", ""),
    "the range grows": (POLICY, 2, DOWN, Retried(29.9), "same", ""),
    "the rounding of frameworks": (POLICY, 1, DOWN, Retried(4.999), "same", ""),
    "too late": (POLICY, 1, DOWN, Retried(26.1), "delay", "retry 1 in 5 s to 15 s"),
    "too early": (POLICY, 1, DOWN, Retried(0.0), "delay", "retry 1 in 5 s to 15 s"),
    "without jitter": ({**POLICY, "jitter": False}, 1, DOWN, Retried(11), "delay", "retry 1 in 10 s"),
    "capped": ({**POLICY, "max_interval": "PT12S"}, 1, DOWN, Retried(13), "delay", "retry 1 in 5 s to 12 s"),
    "a hint": (POLICY, 1, Failure("a.b", retry_after=timedelta(seconds=7)), Retried(7), "same", ""),
    "another hint": (POLICY, 1, Failure("a.b", retry_after=timedelta(days=9)), Retried(7), "delay",
                     "retry 1 in 5 min"),
    "a broken strategy": ({**POLICY, "backoff_strategy": lambda n, f: 1 / 0}, 1, DOWN, Retried(5), "delay",
                          "retry 1 in 5 min"),
    "a stubborn jitter": ({**POLICY, "jitter": stubborn}, 1, DOWN, Retried(60), "delay", "retry 1 in "),
    "no attempt left": (POLICY, 3, DOWN, Retried(5), "ends_earlier", "discarded (exhausted)"),
    "an attempt left": (POLICY, 2, DOWN, KEPT, "retries_longer", "retry 2 in 10 s to 30 s"),
    "both discard": (POLICY, 3, DOWN, GONE, "same", ""),
    "both keep": ({**POLICY, **KEEP}, 3, DOWN, KEPT, "same", ""),
    "only one keeps": (POLICY, 3, DOWN, KEPT, "end", "discarded (exhausted)"),
    "only the other keeps": ({**POLICY, **KEEP}, 3, DOWN, GONE, "end", "dead letter (exhausted)"),
    "ruled out": ({**POLICY, "non_retryable_errors": ["external.*"]}, 1, DOWN, Retried(5), "non_retryable",
                  "discarded (non_retryable)"),
    "ruled out by the task": (POLICY, 1, Failure("a.b", final="says it"), GONE, "same", ""),
    "the handler's word": (POLICY, 1, Failure("a.b", code="DEAD_LETTER"), Retried(9), "handler",
                           "dead letter (handler)"),
    "a pause": (POLICY, 1, Snoozed(timedelta(seconds=90)), Retried(9), "snoozes", "pause of 1 min 30 s"),
    "a shutdown": (POLICY, 1, Interrupted(), Retried(9), "gives_back", "attempt given back"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "attempt", "outcome", "native", "kind", "words"), COMPARED.values(), ids=COMPARED
)
def test_comparing(
    policy: dict[str, Any], attempt: int, outcome: Outcome, native: Native, kind: str, words: str
) -> None:
    """Each kind of outcome has its words."""
    job = Job("j-1", "billing.charge", "default", attempt)
    verdict = compare(RetryPolicy.merge(policy), job, outcome, native, now=NOW)
    assert verdict.kind == kind
    assert kind in MEANINGS
    assert verdict.ojs.startswith(words)
    assert verdict.explanation.startswith(f"{verdict.native}; the policy: {words}" if words else "")


def test_a_job_that_expires_first() -> None:
    """The policy's retry would come too late."""
    job = Job("j-1", "billing.charge", "default", expires=NOW + timedelta(seconds=1))
    assert compare(RetryPolicy.merge(POLICY), job, DOWN, Retried(10), now=NOW).kind == "expires"


def test_the_budget() -> None:
    """The budget allows ten runs at once, and afterwards ten for each second of CPU time."""
    budget = Budget(10, at_once=10)
    assert sum(budget.take("a", 0.0, 1.0) for _ in range(50)) == 10
    busy = sum(budget.take("a", 0.0 + n / 1000, 1 + n / 50) for n in range(250))
    assert 49 <= busy <= 50
    assert sum(budget.take("a", 0.5, 999.0) for _ in range(50)) == 10


def test_rare_tasks_are_seen() -> None:
    """Each task has one run a second, even when another task has used up the budget."""
    budget = Budget(10, at_once=10)
    assert sum(budget.take("often", 0.0, 1.0) for _ in range(50)) == 10
    asked = [("rare", 0.1), ("rare", 0.2), ("other", 0.3), ("often", 0.9), ("often", 1.0), ("rare", 1.1)]
    found = [budget.take(task, now, 1.0) for task, now in asked]
    assert found == [True, False, True, False, True, True]


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        (None, {"billing.charge", "mail.send"}),
        ("on", {"billing.charge", "mail.send"}),
        ("", {"billing.charge", "mail.send"}),
        ("OFF", set()),
        ("0", set()),
        ("false", set()),
        ("billing.*", {"billing.charge"}),
        (" mail.send , other", {"mail.send"}),
    ],
)
def test_the_switch(text: str | None, covered: set[str]) -> None:
    """The switch turns shadow mode on, off, or on for some tasks."""
    switch = Switch({} if text is None else {"OJS_BRIDGE_SHADOW": text})
    assert {name for name in ("billing.charge", "mail.send") if switch.covers(name)} == covered
    assert bool(switch) == bool(covered)


def bridge_on(folder: Path, **options: Any) -> tuple[Bridge, Store]:
    """A bridge and its store."""
    bridge = Bridge(f"sqlite:///{folder}/ojs.db", POLICY, **options)
    assert bridge.store is not None
    return bridge, bridge.store


def failed(bridge: Bridge, native: Native, *, n: int = 1, **job: Any) -> FailedRun:
    """A failed run of a task, its message longer than an example shows."""
    failure = Failure("external.down", "x" * 500)
    return FailedRun(
        Job(f"j-{n}", "billing.charge", "default", **job), bridge.engine.task(), failure, native, NOW
    )


def test_what_is_written(tmp_path: Path) -> None:
    """Counts by kind, and the newest three examples of each difference, their messages cut."""
    bridge, store = bridge_on(tmp_path)
    writer = Writer("celery", bridge)
    writer.write(
        [failed(bridge, Retried(10)), failed(bridge, Retried(99), n=0)], Counter({("t", BRIDGED): 2})
    )
    writer.write([failed(bridge, Retried(99), n=n) for n in range(1, 5)], Counter({("t", UNCOMPARED): 7}))
    found = {(tally.task, tally.kind): tally for tally in store.shadows()}
    assert {key: tally.count for key, tally in found.items()} == {
        ("billing.charge", "same"): 1,
        ("billing.charge", "delay"): 5,
        ("t", BRIDGED): 2,
        ("t", UNCOMPARED): 7,
    }
    delay = found["billing.charge", "delay"]
    assert delay.explanation == "retry 1 in 1 min 39 s; the policy: retry 1 in 5 s to 15 s"
    assert [example["job_id"] for example in delay.examples] == ["j-2", "j-3", "j-4"]
    assert all(len(example["message"]) == 200 for example in delay.examples)


def test_a_bridge_that_redacts_shows_no_messages(tmp_path: Path) -> None:
    """Error messages may hold the data that is to be hidden."""
    bridge, store = bridge_on(tmp_path, redact=["card"])
    Writer("celery", bridge).write([failed(bridge, Retried(99))], Counter())
    assert [example["message"] for example in store.shadows()[0].examples] == [""]


def test_an_invalid_policy_of_a_job(tmp_path: Path) -> None:
    """An invalid policy is counted as a difference, and the next run is compared."""
    bridge, store = bridge_on(tmp_path)
    bad = failed(bridge, Retried(10), retry={"max_attempts": -1})
    Writer("dramatiq", bridge).write([bad, failed(bridge, Retried(10))], Counter())
    assert {tally.kind: tally.count for tally in store.shadows()} == {"refused": 1, "same": 1}


def test_what_cannot_be_compared_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backoff strategy that exits stops nothing: the other runs are compared."""
    bridge, store = bridge_on(tmp_path)
    wild = failed(bridge, Retried(10), retry={"backoff_strategy": lambda n, f: sys.exit(3)})
    Writer("dramatiq", bridge).write([wild, failed(bridge, Retried(10))], Counter())
    assert [tally.kind for tally in store.shadows()] == ["same"]
    assert "a failed run cannot be compared: SystemExit" in caplog.text


def test_a_store_that_is_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An outage costs tallies, and one line in the log."""
    bridge, store = bridge_on(tmp_path / "later")
    writer = Writer("celery", bridge)
    for n in range(3):
        writer.write([failed(bridge, Retried(99), n=n)], Counter())
    (tmp_path / "later").mkdir()
    writer.write([failed(bridge, Retried(99), n=7)], Counter())
    assert [tally.count for tally in store.shadows()] == [1]
    assert len([r for r in caplog.records if "tallies are dropped" in r.message]) == 1


def test_a_full_buffer_only_counts(tmp_path: Path) -> None:
    """The thread that hands a run over does not wait for room: the run is only counted."""
    bridge, _ = bridge_on(tmp_path)
    pending = Pending(limit=3)
    taken = [pending.takes("a") for _ in range(3)]
    for n in range(3):
        pending.add(failed(bridge, GONE, n=n))
    assert [*taken, pending.takes("a"), pending.takes("b")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    runs, counted = pending.take()
    assert (len(runs), counted) == (3, {("a", UNCOMPARED): 1, ("b", UNCOMPARED): 1})
    assert pending.take() == ([], {})


def test_a_recorder_writes_by_and_by_and_at_the_end(tmp_path: Path) -> None:
    """Many threads hand runs over. A recorder that was closed starts again."""
    bridge, store = bridge_on(tmp_path)
    recorder = Recorder("celery", bridge, period=0.05)

    def fail() -> None:
        for n in range(100):
            if recorder.pending.takes("billing.charge"):
                recorder.pending.add(failed(bridge, Retried(99), n=n))

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.pending.count("billing.charge", BRIDGED)
    recorder.close(30)
    (report,) = reports(store.shadows())
    assert (report.failed, report.bridged) == (400, 1)
    assert 100 <= report.compared < 400
    recorder.pending.count("billing.charge", BRIDGED)
    recorder.close(30)
    assert reports(store.shadows())[0].bridged == 2


class Hostile(Exception):
    def __repr__(self) -> str:
        sys.exit(3)

    __str__ = __repr__


def test_nothing_gets_out(caplog: pytest.LogCaptureFixture) -> None:
    """No exception gets out, not even one whose text raises; a message is logged once a minute."""
    for what in ("one", "one", "other"):
        with harmless(f"{what} of test_nothing_gets_out"):
            raise Hostile
    assert [record.message.split(" of ")[0] for record in caplog.records] == [
        "shadow mode: one",
        "shadow mode: other",
    ]


@pytest.mark.parametrize("thing", [None, "proj", object()])
def test_only_apps_and_brokers_have_shadows(thing: object) -> None:
    """Anything else is a mistake."""
    with pytest.raises(ConfigurationError, match="neither a Celery app nor a Dramatiq broker"):
        shadow(thing)


def test_reports() -> None:
    """Task by task: the part that was decided alike, and the most frequent difference first."""

    def tally(task: str, kind: str, count: int) -> Tally:
        return Tally("celery", task, kind, count, NOW)

    tallies = [
        tally("a", "delay", 2), tally("a", "end", 1), tally("a", "new_kind", 4), tally("a", "same", 3),
        tally("a", UNCOMPARED, 90), tally("b", BRIDGED, 5),
    ]  # fmt: skip
    a, b = reports(tallies)
    assert (a.failed, a.compared, a.matched, a.shadow_match_rate, a.bridged) == (100, 10, 4, 0.4, 0)
    assert [tally.kind for tally in a.differences] == ["new_kind", "delay", "end"]
    assert (b.failed, b.compared, b.shadow_match_rate, b.bridged) == (0, 0, None, 5)
    assert b.to_json()["shadow_match_rate"] is None
