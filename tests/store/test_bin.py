"""The bin of deleted letters: an undo brings each back once, and never one whose job has gone on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from ojs_bridge import open_store
from ojs_bridge.rules.job import Job
from ojs_bridge.store import EVERYTHING, KEEP, Bin, Grant, GroupPage, Letter, Reservation, Settle, Store
from ojs_bridge.store.sql import SQLStore
from ojs_bridge.store.sql.bin import take_out
from tests.servers import eventually
from tests.store.test_store import entry, letter

#: Redis forgets what is over by its own clock.
NOW = datetime.now(timezone.utc).replace(microsecond=0)
BIN = Bin("op-1", NOW)


def bury(store: Store, letter_id: str = "j", fence: int = 3, **fields: object) -> Letter:
    """Bury the letter of a run, and settle this run."""
    known = {"discarded_at": NOW, "errors": (entry(1),), **fields}
    made = letter(letter_id, key=letter_id, fence=fence, **known)
    assert begin(store, letter_id, fence) is Grant.TAKEN
    order = Settle(Reservation(letter_id, fence), "w", NOW + KEEP)
    assert store.letters.bury(made, order)
    return made


def purge(store: Store, *letters: Letter, into: Bin | None = BIN) -> int:
    return store.letters.prune(letters, now=NOW, into=into)


def undo(store: Store, deletion: str = BIN.deletion) -> set[str]:
    return {
        letter_id
        for page in store.letters.binned(deletion, since=NOW)
        for letter_id in store.letters.restore(deletion, page)
    }


def begin(store: Store, key: str, fence: int) -> Grant:
    """Begin a run of a job."""
    reservation, until = Reservation(key, fence), NOW + timedelta(minutes=5)
    how = {"publication": "", "holder": "w", "mark": f"m-{fence}", "now": NOW, "until": until}
    return store.reservations.reserve(reservation, **how).grant  # type: ignore[arg-type]


def succeed(store: Store, of: Letter, fence: int) -> None:
    """Settle a run as the end of its job."""
    job = Job(of.id, of.type, of.queue, 1, errors=of.errors, fence=fence)
    assert store.reservations.settle(Settle(Reservation(of.key, fence), "w", NOW + KEEP, job=job))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_an_undo_brings_back_what_was_deleted(store: Store, *, one_by_one: bool) -> None:
    """The letters are as they were in every view; the bin is in none."""
    at = [NOW + timedelta(seconds=n) for n in range(7)]
    known = [
        bury(store, f"j-{n}", queue=f"q-{n % 2}", type=f"t-{n % 3}", discarded_at=at[n]) for n in range(7)
    ]
    groups = GroupPage("count", (), (NOW, NOW + timedelta(hours=1)), 50, 0)
    before = store.letters.stats(), store.letters.groups(EVERYTHING, groups)
    if one_by_one:
        for each in known:
            claimed = store.letters.claim([each.id], now=NOW, seconds=60)
            assert store.letters.delete([each.id], claimed.claim, BIN) == 1
    else:
        assert purge(store, *known) == 7
    assert store.letters.stats().total == store.letters.count(EVERYTHING) == 0
    assert store.letters.groups(EVERYTHING, groups) == []
    assert store.letters.group_sizes(EVERYTHING) == {}
    assert (store.letters.get("j-1"), store.letters.ids_beginning("j-", 9)) == (None, [])
    assert store.letters.list(EVERYTHING, limit=9, cursor=None).letters == ()
    assert undo(store) == {each.id for each in known}
    assert (store.letters.stats(), store.letters.groups(EVERYTHING, groups)) == before
    assert [store.letters.get(each.id) for each in known] == known
    assert undo(store) == set()
    # A letter that is back is claimed and deleted as any other.
    claimed = store.letters.claim(["j-1"], now=NOW, seconds=60)
    assert store.letters.delete(["j-1"], claimed.claim) == 1


def test_an_undo_is_safe_to_repeat(store: Store) -> None:
    """Its answer may be lost; and a letter that has been replayed since does not come back."""
    made = bury(store)
    purge(store, made)
    assert store.letters.restore(BIN.deletion, [made]) == {"j"}
    assert store.letters.restore(BIN.deletion, [made]) == {"j"}
    claimed = store.letters.claim(["j"], now=NOW, seconds=60)
    store.letters.delete(["j"], claimed.claim)
    assert store.letters.restore(BIN.deletion, [made]) == set()
    assert store.letters.get("j") is None


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_that_has_begun_again_has_its_letter_in_the_bin(store: Store, *, ends: bool) -> None:
    """A replay was killed after it had published; then the letter was deleted, and the job ran."""
    made = bury(store)
    purge(store, made)
    assert begin(store, "j", 4) is Grant.TAKEN
    if ends:
        succeed(store, made, 4)
    assert undo(store) == set()
    assert store.letters.get("j") is None
    assert [each.id for page in store.letters.binned(BIN.deletion, since=NOW) for each in page] == ["j"]


def test_a_job_that_begins_after_the_undo_takes_its_letter_away(store: Store) -> None:
    made = bury(store)
    purge(store, made)
    assert undo(store) == {"j"}
    assert begin(store, "j", 4) is Grant.TAKEN
    succeed(store, made, 4)
    assert store.letters.get("j") is None


def test_an_undo_leaves_no_reservation(store: Store) -> None:
    """A letter without one, as an import writes it: a later job of its id runs from its first attempt."""
    made = letter("j", key="j", fence=3, discarded_at=NOW)
    store.letters.bury(made)
    purge(store, made)
    assert undo(store) == {"j"}
    assert begin(store, "j", 0) is Grant.TAKEN


def test_a_new_death_wins(store: Store) -> None:
    """Also where the new letter was deleted, too: each deletion has its own."""
    made = bury(store)
    purge(store, made)
    newer = bury(store, fence=4, discarded_at=NOW + timedelta(seconds=5))
    assert undo(store) == set()
    assert store.letters.get("j") == newer
    purge(store, newer, into=Bin("op-2", NOW))
    assert undo(store) == set()
    assert undo(store, "op-2") == {"j"}
    assert store.letters.get("j") == newer


def test_without_a_bin_nothing_is_kept(store: Store) -> None:
    made = bury(store)
    purge(store, made, into=None)
    assert [*store.letters.binned("op-1", since=NOW)] == []


def test_many_letters_and_old_ones(store: Store) -> None:
    """Whole bins are read in parts; SQL forgets an old bin, and shows none, Redis does so itself."""
    known = [bury(store, f"j-{n:03}") for n in range(650)]
    for at in range(0, 650, 50):
        assert purge(store, *known[at : at + 50]) == 50
    store.letters.forget_bin(before=NOW)
    assert len(undo(store)) == 650
    purge(store, known[0])
    later = NOW + timedelta(milliseconds=1)
    assert len([*store.letters.binned(BIN.deletion, since=later)]) == (store.backend != "sql")
    store.letters.forget_bin(before=NOW + timedelta(milliseconds=1))
    if store.backend == "sql":
        assert [*store.letters.binned(BIN.deletion, since=NOW)] == []


def test_an_undo_and_the_runs_of_its_jobs_at_once(url: str, store: Store) -> None:
    """No success has a letter beside it, whichever comes first: the undo waits for no run, nor is it late."""
    known = [bury(store, f"j-{n:03}") for n in range(120)]
    purge(store, *known)
    others = [open_store(url) for _ in range(4)]

    def run(turn: int) -> None:
        for made in known[turn::2]:
            if begin(others[turn], made.key, 4) is Grant.TAKEN:
                succeed(others[turn], made, 4)

    def bring_back(turn: int) -> None:
        for made in reversed(known):
            others[turn].letters.restore(BIN.deletion, [made])

    with ThreadPoolExecutor(4) as pool:
        acts = [pool.submit(act, turn) for turn, act in enumerate((run, run, bring_back, bring_back))]
        for act in acts:
            act.result()
    assert store.letters.count(EVERYTHING) == 0
    for other in others:
        other.close()


def test_a_run_that_begins_within_an_undo_waits_for_its_end(postgres_url: str) -> None:
    """So the end of the run finds the letter."""
    store, other = open_store(postgres_url), open_store(postgres_url)
    assert isinstance(store, SQLStore)
    made = letter("j", key="j", fence=3, errors=(entry(1),), discarded_at=NOW)
    store.letters.bury(made)
    purge(store, made)
    letters, database = store.letters, store.letters._db
    with ThreadPoolExecutor(1) as pool:
        with database.connection(durable=True) as connection:
            take_out(connection, BIN.deletion, [(letters._letter_row(made), made.last_run)])
            begun = pool.submit(begin, other, "j", 4)
            waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            eventually(lambda: connection.execute(waiting).scalar(), what="a run that waits")
            assert not begun.done()
        assert begun.result(60) is Grant.TAKEN
    succeed(other, made, 4)
    assert store.letters.get("j") is None
    store.close()
    other.close()
