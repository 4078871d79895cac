"""Retries that wait in the store: the same in every store."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ojs_bridge import open_store
from ojs_bridge.store import Due, Filter, Grant, Parked, Reservation, Settle, Store
from tests.store.processes import in_processes
from tests.store.test_store import AWKWARD, MATCHES, TYPES

#: Not a fixed time: Redis forgets by its own clock.
NOW = datetime.now(timezone.utc).replace(microsecond=345_000)
EVERYTHING = Filter()
FRAMEWORK = "dramatiq"
MANY = 4_000


def after(seconds: float) -> datetime:
    """A time so long after NOW."""
    return NOW + timedelta(seconds=seconds)


def parked(name: str = "j-1", due: float = 0.0, **fields: Any) -> Parked:
    """A parked retry."""
    known: dict[str, Any] = {
        "id": name,
        "key": name,
        "fence": 1,
        "type": "billing.charge",
        "queue": "default",
        "framework": FRAMEWORK,
        "attempt": 2,
        "max_attempts": 5,
        "next_retry_at": after(due),
        "parked_at": after(-60),
        "reason": "external.timeout",
        "state": {"v": 1, "attempt": 2},
        "message": {"args": [7]},
    }
    return Parked(**{**known, **fields})


def claim(store: Store, *, at: float = 0.0, limit: int = 100, seconds: float = 60) -> Due:
    """Claim what is due, for a minute."""
    return store.parked.claim_due(FRAMEWORK, now=after(at), until=after(at + seconds), limit=limit)


def claimed(store: Store, **how: Any) -> list[str]:
    """The keys of what is claimed."""
    return [retry.key for retry in claim(store, **how).retries]


def keys(store: Store, where: Filter = EVERYTHING) -> list[str]:
    """The keys of the parked retries, as listed."""
    return [retry.key for retry in store.parked.list(where, limit=1000, cursor=None).jobs]


def walk(store: Store, limit: int) -> Iterator[str]:
    """The keys of the parked retries, page by page."""
    cursor = None
    while True:
        page = store.parked.list(EVERYTHING, limit=limit, cursor=cursor)
        assert len(page.jobs) <= limit
        yield from (retry.key for retry in page.jobs)
        cursor = page.next_cursor
        if cursor is None:
            return


def test_everything_of_a_retry_comes_back(store: Store) -> None:
    """Field by field, whichever way it is asked for."""
    whole = parked(
        id="the job",
        key="the chain",
        state={"v": 1, "errors": [{"details": {"n": 2**70}}], "retry": {"max_attempts": 5}},
        message={"args": [1, 2.5, None, True, {"k": "v"}], "headers": {"a": [[]]}},
        parked_at=after(-400 * 86_400),
    )
    store.parked.park(whole)
    assert store.parked.get("the job") == whole
    assert store.parked.list(EVERYTHING, limit=5, cursor=None).jobs == (whole,)
    assert claim(store).retries == (whole,)


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: ascii(text)[:20])
def test_no_text_is_too_awkward(store: Store, text: str) -> None:
    """Any field may have such a text; the record holds what an index cannot."""
    known = {"type": text, "queue": text, "reason": text, "message": {text: text}, "state": {text: text}}
    awkward = parked(f"id {text}", key=f"key {text}", **known)
    store.parked.park(awkward)
    store.parked.park(parked("another"))
    assert store.parked.get(awkward.id) == awkward
    if text:
        for where in (Filter(queue=text), Filter(type=text)):
            assert keys(store, where) == [awkward.key]
    due = claim(store)
    assert awkward in due.retries
    assert store.parked.unpark([awkward], due.claim) == 1
    assert store.parked.get(awkward.id) is None
    assert keys(store) == ["another"]


def test_a_huge_retry(store: Store) -> None:
    """Ten megabytes of arguments."""
    huge = parked(message={"args": ["\N{SNOWMAN}" * 1_500_000]})
    store.parked.park(huge)
    assert claim(store).retries == (huge,)


@pytest.mark.requirement("RET-11")
def test_what_is_due_is_claimed_and_nothing_else(store: Store) -> None:
    """A claim is exact to the millisecond, and takes up to `limit` retries, the longest due first."""
    order = [-5.0, -4.0, -0.001, 0.0, 0.001, 60.0]
    for due in random.Random(7).sample(order, len(order)):
        store.parked.park(parked(str(due), due))
    assert claimed(store, limit=2) == ["-5.0", "-4.0"]
    assert claimed(store) == ["-0.001", "0.0"]
    assert claimed(store) == []
    assert claimed(store, at=0.001) == ["0.001"]


def test_a_framework_claims_its_own(store: Store) -> None:
    """Earlier retries of another framework do not matter, however many there are."""
    for n in range(20):
        store.parked.park(parked(f"other-{n}", -60, framework="celery"))
    store.parked.park(parked("ours"))
    assert claimed(store, limit=1) == ["ours"]
    assert claimed(store) == []
    assert len(store.parked.claim_due("celery", now=NOW, until=after(60), limit=100).retries) == 20


def test_a_claim_has_retries_to_itself_for_its_time(store: Store) -> None:
    """When the claim is over the retries are due again, the longest due first."""
    store.parked.park(parked("a", -5))
    store.parked.park(parked("b", -4))
    assert claimed(store, limit=1) == ["a"]
    assert claimed(store, at=59.999) == ["b"]
    store.parked.park(parked("c", -3))
    assert claimed(store, at=60) == ["a", "c"]
    assert claimed(store, at=119.999) == ["b"]


def test_what_is_published_is_unparked(store: Store) -> None:
    """A retry is unparked once; the others stay claimed."""
    for name in ("a", "b", "c"):
        store.parked.park(parked(name))
    due = claim(store)
    assert store.parked.unpark(due.retries[:2], due.claim) == 2
    assert store.parked.unpark(due.retries[:2], due.claim) == 0
    assert store.parked.unpark([], due.claim) == 0
    assert keys(store) == [due.retries[2].key]
    assert claimed(store) == []


def test_what_cannot_be_published_is_given_back(store: Store) -> None:
    """Due as before, and in the same place."""
    for n, name in enumerate("abc"):
        store.parked.park(parked(name, n - 10))
    due = claim(store)
    store.parked.unclaim(due.retries[1:], due.claim)
    store.parked.unclaim([], due.claim)
    assert claimed(store, at=1) == ["b", "c"]


def test_who_has_lost_a_claim_touches_nothing(store: Store) -> None:
    """The loser neither deletes nor gives back a retry that another has claimed."""
    store.parked.park(parked())
    late = claim(store)
    held = claim(store, at=60)
    assert store.parked.unpark(late.retries, late.claim) == 0
    store.parked.unclaim(late.retries, late.claim)
    assert claimed(store, at=61) == []
    assert store.parked.unpark(held.retries, held.claim) == 1


def test_a_claim_that_nobody_took_over_still_counts(store: Store) -> None:
    """A retry that was published after its claim's end was published, and is unparked."""
    store.parked.park(parked())
    due = claim(store, seconds=0.001)
    assert store.parked.unpark(due.retries, due.claim) == 1
    assert store.parked.count() == 0


#: The fences of a retry and of the next one of its key, and whether the next one takes its place.
FENCES = [(1, 2, True), (2, 2, True), (3, 2, False)]


@pytest.mark.parametrize("is_claimed", [False, True], ids=["free", "claimed"])
@pytest.mark.parametrize(("first", "second", "replaced"), FENCES, ids=["higher", "same", "lower"])
def test_a_key_has_one_retry(store: Store, first: int, second: int, replaced: bool, is_claimed: bool) -> None:
    """The one of the higher fence; it ends a claim on the other."""
    before, then = parked(fence=first, queue="first"), parked(due=5, fence=second, id="x", queue="second")
    store.parked.park(before)
    due = claim(store) if is_claimed else Due("0" * 32, ())
    store.parked.park(then)
    stays = then if replaced else before
    assert keys(store, Filter(queue="first")) == ([] if replaced else ["j-1"])
    assert keys(store, Filter(queue="second")) == (["j-1"] if replaced else [])
    assert (store.parked.get("x"), store.parked.get("j-1")) == ((then, None) if replaced else (None, before))
    if replaced:
        assert store.parked.unpark([before], due.claim) == 0
        assert claim(store, at=6).retries == (stays,)


def test_parking_again_changes_nothing(store: Store) -> None:
    """A worker parks a retry again when the answer to the first time was lost."""
    for _ in range(3):
        store.parked.park(parked())
    assert (store.parked.count(), keys(store)) == (1, ["j-1"])


def test_a_retry_and_the_turn_it_follows_are_written_together(store: Store) -> None:
    """Neither is written if the reservation is another worker's."""
    reservation = Reservation("j-1", 0)
    store.reservations.reserve(
        reservation, publication="p", holder="w-1", mark=secrets.token_hex(8), now=NOW, until=after(60)
    )
    assert store.parked.park(parked(), Settle(reservation, "w-1", after(3600)))
    told = store.reservations.reserve(
        reservation, publication="p", holder="w-2", mark=secrets.token_hex(8), now=NOW, until=after(60)
    )
    assert (told.grant, store.parked.count()) == (Grant.SETTLED, 1)
    other = Reservation("j-2", 0)
    store.reservations.reserve(
        other, publication="p", holder="w-1", mark=secrets.token_hex(8), now=NOW, until=after(60)
    )
    assert not store.parked.park(parked("j-2"), Settle(other, "w-2", after(3600)))
    told = store.reservations.reserve(
        other, publication="p", holder="w-2", mark=secrets.token_hex(8), now=NOW, until=after(60)
    )
    assert (told.grant, store.parked.count()) == (Grant.HELD, 1)


@pytest.mark.requirement("RET-11")
def test_a_retry_is_rescheduled(store: Store) -> None:
    """Sooner, later, and again what was found before."""
    store.parked.park(parked("a", 60))
    found = store.parked.get("a")
    assert found is not None
    for _ in range(2):
        assert store.parked.reschedule(found, NOW)
    assert store.parked.get("a") == replace(found, next_retry_at=NOW)
    assert store.parked.reschedule(found, after(5))
    assert claimed(store, at=4.999) == []
    assert claim(store, at=5).retries == (replace(found, next_retry_at=after(5)),)


def test_a_retry_is_cancelled(store: Store) -> None:
    """A second cancelling finds no retry."""
    store.parked.park(parked())
    store.parked.park(parked("j-2"))
    assert store.parked.cancel(parked())
    assert not store.parked.cancel(parked())
    assert (store.parked.get("j-1"), keys(store), store.parked.count()) == (None, ["j-2"], 1)


@pytest.mark.parametrize(
    ("its_own", "anothers", "sent_again"),
    [("p-1", None, "p-2"), ("p-1", "p-2", None), ("", None, None)],
)
def test_a_cancelled_delay_does_not_run_and_another_job_of_its_id_does(
    store: Store, its_own: str, anothers: str | None, sent_again: str | None
) -> None:
    """Its message may have been published, too; another job may have been sent before, or is sent later."""

    def asked(publication: str) -> Grant:
        reservation, mark = Reservation("j-1", 0), secrets.token_hex(8)
        times = {"now": after(0), "until": after(60)}
        return store.reservations.reserve(
            reservation, publication=publication, holder="w-1", mark=mark, **times
        ).grant

    if anothers:
        assert asked(anothers) is Grant.TAKEN
    delay = parked(fence=0, kind="scheduled", state={"v": 1, "attempt": 1, "publication": its_own})
    store.parked.park(delay)
    assert store.parked.cancel(delay, drop_until=after(3600))
    assert store.parked.count() == 0
    assert asked(its_own) is (Grant.RESENT if anothers else Grant.SETTLED)
    if sent_again:
        assert asked(sent_again) is Grant.RESENT


def test_the_beginning_of_a_jobs_id(store: Store) -> None:
    """The store takes the text as it is; a job with several chains counts once."""
    named = ["order-1", "order-2", "order%", "order*x", "ORDER-3", "ordér"]
    for n, name in enumerate([*named, *["order-1"] * 9]):
        store.parked.park(parked(name, key=f"chain {n}"))
    for text, found in {
        "order-": ["order-1", "order-2"],
        "order%": ["order%"],
        "order*": ["order*x"],
        "ordé": ["ordér"],
        "order-12": [],
    }.items():
        assert sorted(store.parked.ids_beginning(text, 2)) == found, text


def test_whose_retry_is_not_there_any_more_changes_nothing(store: Store) -> None:
    """The retry is claimed, was replaced by a later one, was parked anew, or is gone."""
    for name in ("claimed", "later", "anew"):
        store.parked.park(parked(name))
    claim(store)
    store.parked.park(parked("later", 60, fence=2))
    store.parked.park(parked("anew", 60, parked_at=NOW))
    for name in ("claimed", "later", "anew", "gone"):
        assert not store.parked.reschedule(parked(name), after(500)), name
        assert not store.parked.cancel(parked(name)), name
    assert store.parked.count() == 3
    assert sorted(claimed(store, at=60)) == ["anew", "claimed", "later"]


def test_the_next_one_due_comes_first(store: Store) -> None:
    """The order of parking does not matter; retries of one moment have a fixed order, over all pages."""
    for n in random.Random(7).sample(range(20), 20):
        store.parked.park(parked(f"j-{n:02}", n // 2))
    found = keys(store)
    assert [int(key[2:]) // 2 for key in found] == [n // 2 for n in range(20)]
    assert list(walk(store, 3)) == found
    claim(store, at=5)
    assert keys(store) == found


@pytest.mark.parametrize("cursor", ["", "x", "9" * 5000 + ":j"])
def test_a_cursor_that_no_page_gave_out(store: Store, cursor: str) -> None:
    """The error names the cursor."""
    with pytest.raises(ValueError, match=r"^cursor: .* was not given out by this store$"):
        store.parked.list(EVERYTHING, limit=5, cursor=cursor)


def test_filters(store: Store) -> None:
    """A queue whole, a type whole or by a pattern; both together."""
    for name, type_ in TYPES.items():
        store.parked.park(parked(name, type=type_, queue="q"))
    store.parked.park(parked("elsewhere", type="auth.expired", queue="q.*"))
    for pattern, names in MATCHES:
        assert sorted(keys(store, Filter("q", pattern))) == names, pattern
    store.parked.park(parked("third", type="auth.expired", queue="q.r"))
    assert keys(store, Filter("q.*")) == keys(store, Filter("q.*", "auth.*")) == ["elsewhere"]
    assert (store.parked.count(Filter("q.*")), store.parked.count(Filter("*"))) == (1, 0)


def test_several_chains_of_one_job(store: Store) -> None:
    """Any of them is the job's retry."""
    store.parked.park(parked("j-1", key="one"))
    store.parked.park(parked("j-1", key="two"))
    for left in (2, 1):
        found = store.parked.get("j-1")
        assert store.parked.count() == left
        assert found is not None
        assert store.parked.cancel(found)
    assert store.parked.get("j-1") is None


def test_a_chain_of_a_kind(store: Store) -> None:
    """A retry of a job, and another job that its user has delayed under the same id."""
    for n, kind in enumerate(("retry", "scheduled", "retry")):
        store.parked.park(parked("j-1", due=n, key=f"j-1#{n}", kind=kind))
    store.parked.park(parked("j-10", kind="scheduled"))
    found = store.parked.get("j-1", "scheduled")
    assert found is not None
    assert (found.key, found.kind) == ("j-1#1", "scheduled")
    assert store.parked.cancel(found)
    assert store.parked.get("j-1", "scheduled") is None
    retry = store.parked.get("j-1", "retry")
    assert retry is not None
    assert retry.kind == "retry"


def test_namespaces_have_retries_of_their_own(url: str) -> None:
    """Both namespaces are in one database."""
    one, two = open_store(url, "one"), open_store(url, "two")
    one.parked.park(parked())
    assert (keys(two), two.parked.count(), two.parked.get("j-1"), claimed(two)) == ([], 0, None, [])
    assert not two.parked.cancel(parked())
    two.parked.park(parked(queue="of two"))
    due = claim(two)
    assert one.parked.unpark(due.retries, due.claim) == 0
    assert claim(one).retries == (parked(),)


def park_some(url: str, turns: Iterator[int]) -> None:
    """Park a quarter of many retries."""
    store = open_store(url)
    quarter = next(turns)
    for n in range(quarter, MANY, 4):
        store.parked.park(parked(f"j-{n}", -n / 1000))


def publish_due(url: str) -> list[str]:
    """Claim and publish until nothing is due; return the keys of what was published."""
    store = open_store(url)
    published: list[str] = []
    while (due := claim(store, limit=200)).retries:
        published += (retry.key for retry in due.retries)
        assert store.parked.unpark(due.retries, due.claim) == len(due.retries)
    return published


class Quarters(Iterator[int]):
    """0 to 3, one for each process that asks."""

    def __init__(self) -> None:
        self._next = multiprocessing.get_context("fork").Value("i", 0)

    def __next__(self) -> int:
        with self._next.get_lock():
            self._next.value += 1
            return self._next.value - 1


@pytest.mark.timeout(300)
def test_many_schedulers_publish_each_retry_once(url: str, store: Store) -> None:
    """None twice, none left over."""
    assert in_processes(4, park_some, url, Quarters()) == [None] * 4
    assert store.parked.count() == MANY
    published = list(itertools.chain.from_iterable(in_processes(4, publish_due, url)))
    assert len(published) == MANY
    assert set(published) == {f"j-{n}" for n in range(MANY)}
    assert store.parked.count() == 0


def test_of_many_threads_each_claims_its_own(store: Store) -> None:
    """The threads share one store."""
    for n in range(200):
        store.parked.park(parked(f"j-{n}"))
    start = threading.Barrier(8)

    def claims(_: int) -> list[str]:
        start.wait(90)
        return list(itertools.chain.from_iterable(claimed(store, limit=7) for _ in range(6)))

    with ThreadPoolExecutor(8) as pool:
        won = list(itertools.chain.from_iterable(pool.map(claims, range(8))))
    won += claimed(store, limit=200)
    assert sorted(won) == sorted(f"j-{n}" for n in range(200))


def publish_until_killed(url: str, told: Connection) -> None:
    """Claim and publish retries, one claim after the other, until killed."""
    store = open_store(url)
    while (due := claim(store, limit=10)).retries:
        for retry in due.retries:
            told.send(retry.key)
        store.parked.unpark(due.retries, due.claim)
    threading.Event().wait(90)


def test_what_a_killed_scheduler_had_claimed_is_due_again(url: str, store: Store) -> None:
    """The retries are due when the claim is over. None is lost, and no other is published twice."""
    names = [f"j-{n:03}" for n in range(300)]
    for n, name in enumerate(names):
        store.parked.park(parked(name, n / 1000 - 1))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    scheduler = context.Process(target=publish_until_killed, args=(url, sender))
    scheduler.start()
    published = [receiver.recv() for _ in range(95)]
    os.kill(scheduler.pid or 0, signal.SIGKILL)
    scheduler.join(90)
    while receiver.poll():
        published.append(receiver.recv())
    left = claimed(store, limit=300)
    again = claimed(store, at=60 - 0.001, limit=300) + claimed(store, at=60, limit=300)
    assert not set(left) & set(published)
    assert len([name for name in again if name not in left]) <= 10
    assert {*published, *left, *again} == set(names)


def park_until_killed(url: str, told: Connection) -> None:
    """Reserve runs and park the retries that follow, until killed."""
    store = open_store(url)
    for n in itertools.count():
        reservation = Reservation(f"j-{n}", 0)
        store.reservations.reserve(
            reservation, publication="p", holder="w-1", mark=secrets.token_hex(8), now=NOW, until=after(60)
        )
        told.send(n)
        store.parked.park(parked(reservation.key), Settle(reservation, "w-1", after(3600)))


def test_what_a_killed_worker_was_parking(url: str, store: Store) -> None:
    """Either the retry is parked and its reservation settled, or neither is done."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=park_until_killed, args=(url, sender))
    worker.start()
    last = 0
    while last < 40:
        last = receiver.recv()
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join(90)
    while receiver.poll():
        last = receiver.recv()
    for key in (f"j-{n}" for n in range(last + 1)):
        told = store.reservations.reserve(
            Reservation(key, 0),
            publication="p",
            holder="w-2",
            mark=secrets.token_hex(8),
            now=after(60),
            until=after(120),
        )
        assert told.grant is (Grant.LOST if store.parked.get(key) is None else Grant.SETTLED), key


DUE = [
    (Filter(), {"retry": [1, 2, 0, 1], "scheduled": [0, 1, 0, 1], "held": [0, 0, 1, 0]}),
    (Filter(queue="mail"), {"retry": [0, 1, 0, 0], "scheduled": [0, 1, 0, 0]}),
    (Filter(type="mail.*", kind="retry"), {"retry": [0, 1, 0, 1]}),
]


@pytest.mark.parametrize(("where", "told"), DUE)
def test_what_falls_due_is_counted_by_kind_and_step(store: Store, where: Filter, told: Any) -> None:
    """What is due before comes first; what is due after the last step does not count."""
    mail = {"type": "mail.send", "queue": "mail"}
    for n, (due, fields) in enumerate(
        [
            (-0.001, {}),
            (0.0, {}),
            (59.999, mail),
            (30, {**mail, "kind": "scheduled"}),
            (60, {"kind": "held"}),
            (120, {"type": "mail.send"}),
            (179.999, {"kind": "scheduled"}),
            (180, {}),
        ]
    ):
        store.parked.park(parked(f"j-{n}", due, **fields))
    counts = store.parked.due(where, NOW, timedelta(minutes=1), 3)
    assert counts.known == 4
    assert {kind: [*found] for kind, found in counts.by_kind.items() if any(found)} == told


def test_too_many_that_fall_due_are_not_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQL tells the steps before; Redis tells all, unless the jobs are of very many types."""
    for module in ("ojs_bridge.store.sql.jobs.LOOKED", "ojs_bridge.store.redis.jobs.LOOKED"):
        monkeypatch.setattr(module, 4)
    for n in range(6):
        store.parked.park(parked(f"j-{n}", 25 * n, type=f"t-{n}"))
    counts = store.parked.due(EVERYTHING, NOW, timedelta(minutes=1), 3)
    is_redis = type(store.parked).__name__ == "RedisParkedJobs"
    assert (counts.known, counts.by_kind) == (
        (4, {"retry": [0, 3, 2, 1]}) if is_redis else (2, {"retry": [0, 3]})
    )
    monkeypatch.setattr("ojs_bridge.store.redis.jobs.LOT", 5)
    counts = store.parked.due(EVERYTHING, NOW, timedelta(minutes=1), 3)
    assert counts.known == (0 if is_redis else 2)


def test_due_jobs_of_one_type_are_read_or_counted(store: Store) -> None:
    """Redis reads a few entries, and counts many: the numbers are the same."""
    for n in range(520):
        store.parked.park(parked(f"j-{n}", n / 4))
    for seconds in (10, 60):
        step, places = timedelta(seconds=seconds), range(0, 120, seconds)
        counts = store.parked.due(EVERYTHING, NOW, step, len(places)).by_kind["retry"]
        assert [*counts] == [0, *(seconds * 4 for _ in places)]
    assert sum(store.parked.due(EVERYTHING, NOW, timedelta(seconds=10), 13).by_kind["retry"]) == 520
