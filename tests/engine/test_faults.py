"""Failures are counted by their fingerprints in every store, before their jobs die."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine import faults
from ojs_bridge.engine.faults import KIND, MAX_FAULTS, MAX_NEW, SHARDS, Failures, faults_of
from ojs_bridge.engine.rates import Rates
from ojs_bridge.errors import StoreError
from ojs_bridge.rules.decision import Complete, DeadLettered, Decision, Discarded, RetryAt
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job
from ojs_bridge.store import Document, Store, open_store
from tests.conftest import store_url
from tests.store.test_store import entry, letter

NOW = datetime(2026, 11, 28, 3, 28, 30, tzinfo=timezone.utc)
JOB = Job("j", "billing.charge", "default")
TRACE = ("/srv/shop/bank.py:7 in ask", "celery/app/trace.py:1 in run")


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def store(request: pytest.FixtureRequest) -> Store:
    """A store of each family, and PostgreSQL."""
    return open_store(store_url(request.param, request))


def failure(message: str = "bank answered 503", **fields: Any) -> Failure:
    return Failure("external.timeout", message, backtrace=TRACE, **fields)


def retry(message: str = "bank answered 503", seconds: float = 600) -> RetryAt:
    return RetryAt(NOW + timedelta(seconds=seconds), seconds, failure(message), "")


def died(message: str = "bank answered 503") -> DeadLettered:
    return DeadLettered("exhausted", failure(message), "")


def counter(store: Store, **fields: Any) -> Failures:
    return Failures(store.documents, ("celery",), **{"redacts": False, **fields})


def count(failures: Failures, *decisions: Decision, job: Job = JOB, now: datetime = NOW) -> None:
    """Count runs of a job, and write them."""
    for decision in decisions:
        failures.add(job, decision, now)
    failures.write(now)


def test_failures_are_counted_before_their_jobs_die(store: Store) -> None:
    """By their pattern; a success is none, and neither is a job that its handler drops."""
    failures = counter(store)
    dropped = Discarded("handler", failure(), "")
    count(
        failures,
        retry("user 1 is slow"),
        retry("user 2 is slow"),
        died("user 3 is slow"),
        Complete(),
        dropped,
    )
    count(counter(store), retry("user 4 is slow"), retry("other"), job=JOB._replace(queue="q2"))
    slow, other = sorted(
        faults_of(store.documents).values(), key=lambda fault: len(fault.queues), reverse=True
    )
    assert (slow.type, slow.error_type, slow.message) == (
        "billing.charge",
        "external.timeout",
        "user 4 is slow",
    )
    assert (slow.frame, slow.queues) == ("shop/bank.py in ask", ("q2", "default"))
    assert (slow.first_at, slow.last_at, slow.died_at) == (NOW, NOW, NOW)
    assert (slow.retrying(NOW), slow.deaths(NOW)[-1], [*slow.minutes.values()]) == (3, 1, [(4, 1)])
    assert (other.retrying(NOW), other.died_at) == (1, None)
    assert slow.retrying(NOW + timedelta(hours=1)) == 0


def test_processes_count_together(store: Store) -> None:
    """None is lost, though all write the same fault at the same moment."""

    def work(number: int) -> None:
        failures = counter(store)
        for _ in range(3):
            count(failures, retry(f"user {number} is slow"))
        while failures._batches or failures._new:
            failures.write(NOW)

    with ThreadPoolExecutor(6) as pool:
        [*pool.map(work, range(6))]
    [fault] = faults_of(store.documents).values()
    assert fault.retrying(NOW) == 18
    assert store.documents.count([KIND]) == {KIND: 1}


def test_a_clock_that_is_ahead_forgets_nothing(store: Store) -> None:
    """What one process counts does not delete what others have, whose time is right."""
    now = store.clock()
    count(counter(store), RetryAt(now + timedelta(minutes=9), 540, failure(), ""), died(), now=now)
    ahead = lambda: store.clock() + timedelta(hours=2)  # noqa: E731
    rates = Rates(store.documents, ahead, store.clock, timedelta(minutes=1))
    rates.count(JOB, DeadLettered("exhausted", failure(), ""), 0)
    rates.close(30)
    [fault] = faults_of(store.documents).values()
    assert (sum(fault.deaths(now)), fault.retrying(now), len(fault.minutes)) == (1, 1, 2)


@pytest.mark.parametrize("text", ["\ud83d", "a\0b", "x" * 9999, "", "\U0001f600"])
def test_no_text_of_an_error_is_in_the_way(store: Store, text: str) -> None:
    """Such as half a surrogate, in any of its parts."""
    job = Job("j", f"t.{text}", f"q{text}")
    odd = Failure(f"e{text}", text, backtrace=(f"/srv/a{text}/b.py:1 in {text}f",))
    for _ in range(2):
        count(counter(store), RetryAt(NOW + timedelta(hours=1), 3600, odd, ""), retry(), job=job)
    assert [fault.retrying(NOW) for fault in faults_of(store.documents).values()] == [2, 2]


def test_a_flood_of_faults_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones stay. Without time for its fingerprint a failure counts for another of its place."""
    monkeypatch.setattr(faults, "MAX_PRINTED", MAX_NEW + 20)
    failures = counter(store)
    words = ["".join(chr(97 + n // 26**place % 26) for place in range(3)) for n in range(MAX_NEW + 90)]
    count(failures, *(retry(f"flood of {word}") for word in words))
    found = faults_of(store.documents)
    assert len(found) <= SHARDS * MAX_FAULTS
    assert (
        max(
            len(document.body["faults"])
            for document in store.documents.list(KIND, limit=9, cursor=None).documents
        )
        <= MAX_FAULTS
    )
    later = NOW + timedelta(minutes=1)
    count(failures, retry("the last"), now=later)
    assert [fault.message for fault in faults_of(store.documents).values() if fault.last_at == later] == [
        "the last"
    ]


def test_a_lost_answer_and_an_outage_cost_no_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is not written twice; what was not waits, and another error drops it."""
    failures, write, lost = counter(store), store.documents.write, list[Document]()

    def losing(document: Document) -> bool:
        write(document)
        lost.append(document)
        raise StoreError("no answer")

    monkeypatch.setattr(store.documents, "write", losing)
    count(failures, retry())
    count(failures, retry())
    monkeypatch.setattr(store.documents, "write", write)
    count(failures, retry())
    failures.write(NOW)
    [fault] = faults_of(store.documents).values()
    assert (len(lost), fault.retrying(NOW)) == (1, 3)


def test_a_message_is_not_kept_where_arguments_are_redacted(store: Store) -> None:
    """It may quote one; its fingerprint is that of its letter all the same."""
    count(counter(store, redacts=True), retry("no card like 4111"))
    count(counter(store), retry("no card like 4112"))
    [fault] = faults_of(store.documents).values()
    assert fault.retrying(NOW) == 2
    bridge = Bridge(store, redact=["card"])
    now = bridge.engine.now()
    count(counter(store, redacts=True), retry("other"), now=now)
    assert [group.message for group in bridge.groups.list()] == ["[redacted]"]


def test_a_group_without_a_letter_is_listed_until_its_jobs_succeed(store: Store) -> None:
    """With its message and place; a filter finds it, and it can be muted and resolved."""
    bridge = Bridge(store)
    now = bridge.engine.now()
    later = RetryAt(now + timedelta(hours=2), 7200, failure(), "")
    count(counter(store), later, later, now=now)
    [group] = bridge.groups.list(type="billing.*", queue="default", error_type="external.timeout")
    told = group.to_ojs()
    assert (told["state"], told["retrying"], told["count"], told["sample_id"]) == ("new", 2, 0, None)
    assert (told["pattern"], told["message"]) == ("bank answered 503", "bank answered 503")
    assert (told["frame"], told["types"], told["queues"]) == (
        "shop/bank.py in ask",
        ["billing.charge"],
        ["default"],
    )
    name = group.group.fingerprint
    for where in (
        {"type": "x"},
        {"queue": "x"},
        {"error_type": "x"},
        {"group": "0" * 16},
        {"until": now - timedelta(1)},
    ):
        assert bridge.groups.list(**where) == ()  # type: ignore[arg-type]
    assert [one.group.fingerprint for one in bridge.groups.list(state="new", group=name)] == [name]
    bridge.groups.mute(name)
    assert bridge.groups.list() == ()
    bridge.groups.unmute(name)
    bridge.groups.resolve(name)
    assert bridge.groups.get(name).state == "resolved"


def test_pages_have_groups_with_letters_and_without_in_their_order(store: Store) -> None:
    """However the pages are cut, each group stands on one of them."""
    bridge = Bridge(store)
    now = bridge.engine.now()
    for n in range(10):
        at = now - timedelta(minutes=n)
        if n in (0, 3, 4, 8, 9):
            job, long = (
                Job("j", f"retries.{n}", "default"),
                RetryAt(now + timedelta(hours=2), 1, failure(), ""),
            )
            count(counter(store), long, now=at, job=job)
        else:
            store.letters.bury(letter(f"l{n}", type=f"died.{n}", discarded_at=at, errors=(entry(1),)))
    whole = [group.group.types[0] for group in bridge.groups.list()]
    assert [int(name[-1]) for name in whole] == [*range(10)]
    for limit in range(1, 11):
        pages = [bridge.groups.list(limit=limit, offset=offset) for offset in range(0, 10, limit)]
        assert [group.group.types[0] for page in pages for group in page] == whole
    assert bridge.groups.list(offset=10) == ()
    assert {group.group.types[0] for group in bridge.groups.list(order="count")} == {*whole}
