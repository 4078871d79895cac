"""A reservation says who runs which job, until when; all stores behave alike."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import pytest

from ojs_bridge import open_store
from ojs_bridge.store import Grant, Reservation, ReserveAnswer, Settle, Store
from tests.servers import eventually
from tests.store.processes import in_processes
from tests.store.test_parked import parked
from tests.store.test_store import AWKWARD, letter

#: Not a fixed time: Redis forgets by its own clock.
NOW = datetime.now(timezone.utc).replace(microsecond=345_000)
TAKEN, HELD, LOST, SETTLED, RESENT = Grant
FIRST, SECOND = "w-1", "w-2"

Step: TypeAlias = Callable[[Store], Any]


def after(seconds: float) -> datetime:
    """A time so long after NOW."""
    return NOW + timedelta(seconds=seconds)


def reserve(
    store: Store,
    fence: int = 0,
    *,
    key: str = "j-1",
    publication: str = "p-1",
    holder: str = FIRST,
    at: float = 0.0,
    mark: str = "",
) -> ReserveAnswer:
    """Ask to reserve a run for a minute."""
    return store.reservations.reserve(
        Reservation(key, fence),
        publication=publication,
        holder=holder,
        mark=mark or secrets.token_hex(8),
        now=after(at),
        until=after(at + 60),
    )


def over(fence: int = 0, holder: str | None = FIRST, *, key: str = "j-1") -> Settle:
    """The settlement of a reservation, to be remembered for an hour."""
    return Settle(Reservation(key, fence), holder, after(3600))


def ask(fence: int, **known: Any) -> Step:
    """Return a step that asks to reserve a run."""
    return lambda store: reserve(store, fence, **known).grant


def settle(fence: int, holder: str | None = FIRST) -> Step:
    """Return a step that settles a reservation."""
    return lambda store: store.reservations.settle(over(fence, holder))


def release(fence: int, holder: str | None = FIRST) -> Step:
    """Return a step that releases a reservation."""
    return lambda store: store.reservations.release(over(fence, holder))


#: The steps before, the question, and the answer.
GRANTS: dict[str, tuple[Sequence[Step], Step, Grant]] = {
    "nobody had it": ([], ask(0), TAKEN),
    "nobody had the runs before": ([], ask(7), TAKEN),
    "another has it": ([ask(0)], ask(0, holder=SECOND), HELD),
    "we have it ourselves": ([ask(0)], ask(0), HELD),
    "until a moment from now": ([ask(0)], ask(0, at=59.999, holder=SECOND), HELD),
    "until now": ([ask(0)], ask(0, at=60, holder=SECOND), LOST),
    "we had it ourselves": ([ask(0)], ask(0, at=60), LOST),
    "a later run was lost": ([ask(0), ask(3)], ask(3, at=60, holder=SECOND), LOST),
    "what was lost is held": ([ask(0), ask(0, at=60, holder=SECOND)], ask(0, at=61), HELD),
    "what was lost is lost": ([ask(0), ask(0, at=60, holder=SECOND)], ask(0, at=120), LOST),
    "an earlier run is live": ([ask(0)], ask(1, holder=SECOND), TAKEN),
    "an earlier run was lost": ([ask(0)], ask(1, at=90, holder=SECOND), TAKEN),
    "an earlier run is settled": ([ask(0), settle(0)], ask(1), TAKEN),
    "a later run is live": ([ask(2)], ask(1, holder=SECOND), SETTLED),
    "a later run was there": ([ask(2)], ask(1, at=90, holder=SECOND), SETTLED),
    "a later run is settled": ([ask(2), settle(2)], ask(1), SETTLED),
    "it is settled": ([ask(1), settle(1)], ask(1), SETTLED),
    "it is settled, its time over": ([ask(1), settle(1)], ask(1, at=90), SETTLED),
    "it is settled, unseen": ([settle(1)], ask(1), SETTLED),
    "it is settled for a dead one": ([ask(1), settle(1, None)], ask(1), SETTLED),
    "it was released": ([ask(2), release(2)], ask(2, holder=SECOND), TAKEN),
    "the one after was released": ([ask(2), release(2)], ask(1), SETTLED),
    "the first was released": ([ask(0), release(0)], ask(0, holder=SECOND), TAKEN),
    "released, whoever sent it": ([ask(0), release(0)], ask(0, publication="p-2"), TAKEN),
    "sent again": ([ask(0)], ask(0, publication="p-2"), RESENT),
    "sent again when it is over": ([ask(0)], ask(0, at=90, publication="p-2"), RESENT),
    "sent again when it is settled": ([ask(0), settle(0)], ask(0, publication="p-2"), RESENT),
    "sent again when it is retried": ([ask(0), ask(1)], ask(0, publication="p-2"), RESENT),
    "the first one again": ([ask(0), ask(1, publication="")], ask(0), SETTLED),
    "sent again as a retry": ([ask(0)], ask(1, publication="p-2"), RESENT),
    "sent again by a retry": ([ask(0), ask(1, publication="")], ask(1, publication="p-2"), RESENT),
    "sent again by a settled retry": ([ask(1), settle(1)], ask(1, publication="p-2"), RESENT),
    "sent again from the start": ([ask(3)], ask(0, publication="p-2"), RESENT),
    "the bridge sent it": ([ask(0)], ask(1, publication=""), TAKEN),
    "the bridge sent it twice": ([ask(1)], ask(1, publication=""), HELD),
    "asked again": ([ask(0, mark="m")], ask(0, mark="m"), TAKEN),
    "asked again, told as lost": ([ask(0), ask(0, at=60, mark="m")], ask(0, at=60, mark="m"), LOST),
    "another asks with the same mark": ([ask(0, mark="m")], ask(0, mark="m", holder=SECOND), HELD),
    "asked again, settled as dead": ([ask(0, mark="m"), settle(0, None)], ask(0, mark="m"), SETTLED),
    "who sent it is not known": ([ask(0)], ask(0, publication=""), HELD),
    "who sent the first is not known": ([ask(0, publication="")], ask(0, publication="p-2"), HELD),
    "who sent what is settled is not known": ([settle(0)], ask(0, publication="p-2"), SETTLED),
}


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("before", "asked", "grant"), GRANTS.values(), ids=GRANTS)
def test_who_may_run_a_job(store: Store, before: Sequence[Step], asked: Step, grant: Grant) -> None:
    """Each case is a line of the contract."""
    for step in before:
        step(store)
    assert asked(store) is grant


#: The steps before, the settlement, and whether the settlement is accepted.
SETTLEMENTS: dict[str, tuple[Sequence[Step], Step, bool]] = {
    "ours": ([ask(1)], settle(1), True),
    "again": ([ask(1), settle(1)], settle(1), True),
    "without a record": ([], settle(1), True),
    "another's": ([ask(1, holder=SECOND)], settle(1), False),
    "taken over": ([ask(1), ask(1, at=60, holder=SECOND)], settle(1), False),
    "an earlier one": ([ask(2)], settle(1), False),
    "a later one": ([ask(1)], settle(2), False),
    "a dead one's": ([ask(1, holder=SECOND)], settle(1, None), True),
    "a dead one's, again": ([ask(1), settle(1, None)], settle(1, None), True),
    "ours, settled for us": ([ask(1), settle(1, None)], settle(1), False),
    "a dead one's that it has settled": ([ask(1), settle(1)], settle(1, None), False),
}


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("before", "settling", "ours"), SETTLEMENTS.values(), ids=SETTLEMENTS)
def test_who_settles_a_turn(store: Store, before: Sequence[Step], settling: Step, ours: bool) -> None:
    """The turn's holder settles it, or another process for a dead holder, but not both."""
    for step in before:
        step(store)
    assert settling(store) is ours


RETURNS: dict[str, tuple[Sequence[Step], Step, bool]] = {
    "ours": ([ask(1)], release(1), True),
    "the first": ([ask(0)], release(0), True),
    "again": ([ask(1), release(1)], release(1), False),
    "the first again": ([ask(0), release(0)], release(0), False),
    "without a record": ([], release(1), False),
    "another's": ([ask(1, holder=SECOND)], release(1), False),
    "a dead one's": ([ask(1, holder=SECOND)], release(1, None), True),
    "an earlier one": ([ask(2)], release(1), False),
    "a later one": ([ask(1)], release(2), False),
    "settled": ([ask(1), settle(1)], release(1), False),
    "settled, the first": ([ask(0), settle(0)], release(0), False),
}


@pytest.mark.parametrize(("before", "returning", "ours"), RETURNS.values(), ids=RETURNS)
def test_who_gives_a_turn_back(store: Store, before: Sequence[Step], returning: Step, ours: bool) -> None:
    """The holder, or another process for a dead holder, gives back a turn that is not settled."""
    for step in before:
        step(store)
    assert returning(store) is ours


@pytest.mark.requirement("RET-12")
def test_a_lost_attempt_whose_answer_was_lost_is_not_unused(store: Store) -> None:
    """The worker that asked gives back what it never began; the attempt has begun before."""
    reserve(store)
    assert reserve(store, at=60, holder=SECOND, mark="b").grant is LOST
    assert not store.reservations.release(over(0, SECOND)._replace(mark="b"))
    assert reserve(store, at=61).grant is HELD
    assert reserve(store, at=120).grant is LOST


def test_how_long_another_has_it(store: Store) -> None:
    """The answer has a time only if another has or had the turn."""
    assert reserve(store, mark="a") == ReserveAnswer(TAKEN)
    assert reserve(store, at=5) == ReserveAnswer(HELD, after(60), FIRST, "a")
    assert reserve(store, at=60, mark="b") == ReserveAnswer(LOST, after(60), FIRST, "a")
    assert reserve(store, at=70) == ReserveAnswer(HELD, after(120), FIRST, "b")
    assert reserve(store, publication="p-2") == ReserveAnswer(RESENT)
    store.reservations.settle(over())
    assert reserve(store) == ReserveAnswer(SETTLED)


@pytest.mark.requirement("RET-13")
def test_a_heartbeat_extends_what_its_holder_holds(store: Store) -> None:
    """The answer names the turns that were not extended: another's, settled, of another run, unknown."""
    for key in ("mine", "settled", "moved on"):
        reserve(store, 1, key=key)
    reserve(store, 1, key="another's", holder=SECOND)
    store.reservations.settle(over(1, key="settled"))
    reserve(store, 2, key="moved on")
    lost = [Reservation(key, 1) for key in ("another's", "settled", "moved on", "unknown")]
    assert (
        list(store.reservations.extend([Reservation("mine", 1), *lost], holder=FIRST, until=after(300)))
        == lost
    )
    found = reserve(store, 1, key="mine", at=299)
    assert (found.grant, found.until, found.holder) == (HELD, after(300), FIRST)
    assert reserve(store, 1, key="another's", at=1).until == after(60)
    assert reserve(store, 2, key="moved on", at=1).until == after(60)


def test_a_suspicion_grows_until_it_ends(store: Store) -> None:
    """Its time begins with the first evidence, by the store's clock."""
    assert store.reservations.suspect("family", gone=False) is None

    def lasts(at_least: timedelta, *, gone: bool = False) -> bool:
        suspected = store.reservations.suspect("family", gone=gone)
        return suspected is not None and suspected >= at_least

    assert lasts(timedelta(), gone=True)
    eventually(lambda: lasts(timedelta(milliseconds=20)))
    assert lasts(timedelta(milliseconds=20), gone=True)
    assert store.reservations.suspect("other", gone=False) is None
    store.reservations.clear("family")
    assert store.reservations.suspect("family", gone=False) is None


def test_an_old_suspicion_is_forgotten(sql_url: str) -> None:
    """What nobody clears does not stay for ever; on Redis its key expires."""
    with closing(open_store(sql_url)) as store:
        store.reservations.suspect("family", gone=True)
        for hours, stays in ((20, True), (25, False)):
            store.reservations.expire_before(store.clock() + timedelta(hours=hours), limit=1)
            assert (store.reservations.suspect("family", gone=False) is not None) is stays


@pytest.mark.requirement("RET-13")
def test_who_was_taken_over_is_told_so(store: Store) -> None:
    """The worker's next heartbeat says so, and takes nothing back."""
    reserve(store)
    assert reserve(store, at=60, holder=SECOND).grant is LOST
    assert list(store.reservations.extend([Reservation("j-1", 0)], holder=FIRST, until=after(300))) == [
        Reservation("j-1", 0)
    ]
    found = reserve(store, at=61)
    assert (found.grant, found.until, found.holder) == (HELD, after(120), SECOND)


@pytest.mark.requirement("RET-13")
def test_a_heartbeat_of_a_thousand_turns(store: Store) -> None:
    """A heartbeat of no turns works, too."""
    reservations = [Reservation(f"j-{n}", n % 3) for n in range(1000)]
    for reservation in reservations[::2]:
        reserve(store, reservation.fence, key=reservation.key)
    assert (
        sorted(
            store.reservations.extend(reservations, holder=FIRST, until=after(300)), key=reservations.index
        )
        == reservations[1::2]
    )
    assert list(store.reservations.extend([], holder=FIRST, until=after(300))) == []


def test_forgetting_settled_turns(store: Store) -> None:
    """Only the turn of the given fence is forgotten; a turn that is under way stays."""
    for key in ("settled", "moved on"):
        reserve(store, 1, key=key)
        store.reservations.settle(over(1, key=key))
    reserve(store, 2, key="moved on")
    reserve(store, 1, key="live")
    store.reservations.expire([Reservation(key, 1) for key in ("settled", "moved on", "live", "unknown")])
    store.reservations.expire([])
    assert reserve(store, 1, key="settled").grant is TAKEN
    assert reserve(store, 2, key="moved on").grant is HELD
    assert reserve(store, 1, key="live").grant is HELD


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: ascii(text)[:20])
def test_no_name_is_too_awkward(store: Store, text: str) -> None:
    """A key, a publication or a holder may be any text, and is not mistaken for a similar one."""
    key, publication, holder = f"k {text}", f"p {text}", f"h {text}"
    assert reserve(store, key=key, publication=publication, holder=holder).grant is TAKEN
    assert reserve(store, key=f"{key}'").grant is TAKEN
    assert reserve(store, key=key, publication=f"{publication}'").grant is RESENT
    assert reserve(store, key=key, publication=publication).grant is HELD
    assert list(store.reservations.extend([Reservation(key, 0)], holder=f"{holder}'", until=after(90))) == [
        Reservation(key, 0)
    ]
    assert list(store.reservations.extend([Reservation(key, 0)], holder=holder, until=after(90))) == []
    assert not store.reservations.settle(over(0, f"{holder}'", key=key))
    assert store.reservations.settle(over(0, holder, key=key))


def test_keys_differ_by_case(store: Store) -> None:
    """Two jobs."""
    assert [reserve(store, key=key).grant for key in ("job", "JOB", "Job")] == [TAKEN] * 3


def test_namespaces_have_reservations_of_their_own(url: str) -> None:
    """Both namespaces are in one database."""
    one, two = open_store(url, "one"), open_store(url, "two")
    assert reserve(one).grant is TAKEN
    assert list(two.reservations.extend([Reservation("j-1", 0)], holder=FIRST, until=after(90))) == [
        Reservation("j-1", 0)
    ]
    assert reserve(two).grant is TAKEN
    one.reservations.settle(over())
    assert reserve(two).grant is HELD


def test_a_letter_and_its_turn_are_written_together(store: Store) -> None:
    """Again and again, as when the first answer was lost."""
    reserve(store, 1)
    for _ in range(2):
        assert store.letters.bury(letter(), over(1))
        assert reserve(store, 1).grant is SETTLED
    assert store.letters.get("j-1") == letter()
    assert store.letters.bury(letter("unknown"), over(1, key="unknown")), "rather two than none"


#: The steps that took a reservation from its run, and the late settlement of that run.
LATE: dict[str, tuple[Sequence[Step], Settle]] = {
    "another has taken it over": ([ask(1), ask(1, at=60, holder=SECOND)], over(1)),
    "another has dealt with it": (
        [ask(1), ask(1, at=60, holder=SECOND), settle(1, SECOND)],
        over(1),
    ),
    "it was settled for a dead one": ([ask(1), settle(1, None)], over(1)),
    "the job has gone on": ([ask(1), ask(2, holder=SECOND)], over(1)),
    "a dead one had settled it": ([ask(1), settle(1)], over(1, None)),
}


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("before", "late"), LATE.values(), ids=LATE)
def test_what_a_run_says_too_late_is_not_written(store: Store, before: Sequence[Step], late: Settle) -> None:
    """A late run does not change an earlier letter, kept errors or the reservation."""
    for step in before:
        step(store)
    kept = [(0, {"attempt": 1, "type": "a.b"})]
    store.letters.bury(letter(queue="earlier"))
    store.letters.keep_errors("j-1", kept)
    assert not store.letters.bury(letter(queue="late"), late)
    assert not store.parked.park(parked(), late)
    assert store.letters.get("j-1") == letter(queue="earlier")
    assert (store.parked.count(), store.letters.kept_errors("j-1")) == (0, kept)
    assert not store.reservations.settle(late)


def test_a_turn_that_was_taken_over_is_not_forgotten(store: Store) -> None:
    """The worker that lost the turn may still try to write its outcome."""
    reserve(store, 0)
    assert reserve(store, 0, at=60, holder=SECOND).grant is LOST
    assert store.reservations.settle(over(0, SECOND))
    store.reservations.expire([Reservation("j-1", 0)])
    assert not store.letters.bury(letter(), over(0))
    assert reserve(store, 0).grant is SETTLED


KEYS = [f"j-{n}" for n in range(50)]


def grants_of(url: str, at: float) -> list[Grant]:
    """The store's answers to one process, which asks for the same fifty reservations as the others."""
    store = open_store(url)
    return [reserve(store, key=key, holder=f"w-{os.getpid()}", at=at).grant for key in KEYS]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("at", "won"), [(0, TAKEN), (60, LOST)], ids=["free", "expired"])
def test_of_many_processes_one_has_a_turn(url: str, store: Store, at: float, won: Grant) -> None:
    """The store tells all other processes that the turn is held."""
    if won is LOST:
        for key in KEYS:
            reserve(store, key=key)
    found = in_processes(4, grants_of, url, at)
    assert [Counter(of_key) for of_key in zip(*found, strict=True)] == [{won: 1, HELD: 3}] * len(KEYS)


@pytest.mark.requirement("RET-12")
def test_of_many_threads_one_has_a_turn(store: Store) -> None:
    """The threads share one store."""
    start = threading.Barrier(8)

    def grants(n: int) -> list[Grant]:
        start.wait(90)
        return [reserve(store, key=key, holder=f"w-{n}").grant for key in KEYS[:20]]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(grants, range(8)))
    assert [Counter(of_key) for of_key in zip(*found, strict=True)] == [{TAKEN: 1, HELD: 7}] * 20


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("how", ["settle", "bury", "park"])
def test_either_its_holder_settles_a_turn_or_another_takes_it_over(store: Store, how: str) -> None:
    """Never both, though both try at the same moment; nor neither."""
    start = threading.Barrier(2)
    for key in KEYS:
        reserve(store, key=key)
    ways: dict[str, Callable[[str], bool]] = {
        "settle": lambda key: store.reservations.settle(over(key=key)),
        "bury": lambda key: store.letters.bury(letter(key), over(key=key)),
        "park": lambda key: store.parked.park(parked(key), over(key=key)),
    }

    def settles() -> list[bool]:
        start.wait(90)
        return [ways[how](key) for key in KEYS]

    def takes_over() -> list[Grant]:
        start.wait(90)
        return [reserve(store, key=key, holder=SECOND, at=60).grant for key in KEYS]

    with ThreadPoolExecutor(2) as pool:
        settled, told = pool.submit(settles), pool.submit(takes_over)
        assert [SETTLED if ours else LOST for ours in settled.result()] == told.result()
    ours = {key for key, was_ours in zip(KEYS, settled.result(), strict=True) if was_ours}
    if how == "bury":
        assert {key for key in KEYS if store.letters.get(key)} == ours
    if how == "park":
        assert {key for key in KEYS if store.parked.get(key)} == ours


def busy_until_killed(url: str, told: Connection) -> None:
    """Reserve runs, and bury each job as its reservation ends, until killed."""
    store = open_store(url)
    for n in itertools.count():
        reserve(store, key=f"j-{n}")
        told.send(n)
        store.letters.bury(letter(f"j-{n}"), over(key=f"j-{n}"))


@pytest.mark.requirement("RET-12")
def test_what_a_killed_worker_leaves_behind(url: str, store: Store) -> None:
    """Each reservation is settled with its letter there, or it is lost; the store is free at once."""
    context = multiprocessing.get_context("fork")
    for enough in (3, 10, 17):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=busy_until_killed, args=(url, sender))
        worker.start()
        while (last := receiver.recv()) < enough:
            pass
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join(90)
        while receiver.poll():
            last = receiver.recv()
        for key in (f"j-{n}" for n in range(last + 1)):
            grant = reserve(store, key=key, holder=SECOND, at=60).grant
            assert grant is (LOST if store.letters.get(key) is None else SETTLED), key
            store.reservations.expire([Reservation(key, 0)])
            claimed = store.letters.claim([key], now=NOW, seconds=9)
            assert grant is LOST or store.letters.delete([key], claimed.claim) == 1
            store.reservations.release(over(0, SECOND, key=key))


def test_what_is_under_way_is_neither_settled_nor_expired(store: Store) -> None:
    """Of many, whoever holds them."""
    for n in range(400):
        reserve(store, key=f"j-{n}")
    store.reservations.settle(over(key="j-1"))
    asked = [*(Reservation(f"j-{n}", 0) for n in range(400)), Reservation("j-2", 1), Reservation("none", 0)]
    under_way = store.reservations.under_way(asked, now=after(1))
    assert under_way.keys() == {*asked[:400]} - {Reservation("j-1", 0)}
    assert {*under_way.values()} == {FIRST}
    assert store.reservations.under_way(asked, now=after(3600)) == {}
    assert store.reservations.under_way([], now=after(1)) == {}
