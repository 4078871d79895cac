"""One list of all that waits: retries and scheduled jobs are seen and steered alike."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge import JobNotFound, LetterNotFound
from ojs_bridge.engine.rates import ShortWaits
from ojs_bridge.operations.waiting import Drained
from ojs_bridge.rules.job import Job
from tests.cli.running import run
from tests.lives import FRAMEWORK, bridge_with_outbox
from tests.store.test_parked import parked
from tests.store.test_store import letter


class House:
    """A bridge in whose store two retries and two scheduled jobs wait."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bridge, self.outbox = bridge_with_outbox(url)
        now = self.bridge.engine.now()
        for n, kind in enumerate(("retry", "scheduled", "retry", "scheduled")):
            attempt, name = 2 if kind == "retry" else 1, f"{kind[:5]}-{n}"
            state = {"v": 1, "attempt": attempt}
            due = now.replace(microsecond=0) + timedelta(hours=n + 1)
            how: dict[str, Any] = {"kind": kind, "attempt": attempt, "state": state, "fence": attempt - 1}
            self.store.parked.park(parked(name, framework=FRAMEWORK, next_retry_at=due, parked_at=now, **how))

    @property
    def store(self) -> Any:
        """Return the store."""
        return self.bridge.store

    def due(self, job_id: str) -> timedelta:
        """Return after what time a job is due."""
        return self.bridge.waiting.get(job_id).next_retry_at - self.bridge.engine.now()


@pytest.fixture
def full(url: str) -> House:
    """A house on each kind of store."""
    return House(url)


def ids(view: Any, **kind: Any) -> list[str]:
    return [found.id for found in view.list(**kind).jobs]


def test_two_views_of_one_list(full: House) -> None:
    bridge = full.bridge
    assert ids(bridge.waiting) == ["retry-0", "sched-1", "retry-2", "sched-3"]
    assert ids(bridge.waiting, kind="scheduled") == ids(bridge.scheduled) == ["sched-1", "sched-3"]
    assert ids(bridge.waiting, kind="retry") == ids(bridge.retries) == ["retry-0", "retry-2"]
    assert [view.count() for view in (bridge.waiting, bridge.retries, bridge.scheduled)] == [4, 2, 2]
    assert bridge.counts() == {"retryable": 2, "scheduled": 2, "pending": 0, "discarded": 0}
    found = bridge.scheduled.get("sched-1").to_ojs()
    assert (found["state"], found["attempt"], "next_retry_at" in found) == ("scheduled", 1, False)
    with pytest.raises(ValueError, match="kind: 'retry': these are scheduled jobs"):
        bridge.scheduled.list(kind="retry")


@pytest.mark.parametrize("act", ["get", "run", "cancel", "move"])
def test_each_view_knows_its_own_alone(full: House, act: str) -> None:
    """The error has the word of the view."""
    more = [full.bridge.engine.now()] * (act == "move")
    for view, job_id, word in (
        (full.bridge.retries, "sched-1", "parked retry"),
        (full.bridge.scheduled, "retry-0", "scheduled job"),
        (full.bridge.waiting, "nobody", "waiting job"),
    ):
        with pytest.raises(JobNotFound, match=f"there is no {word} '{job_id}'"):
            getattr(view, act)(job_id, *more)
    assert full.bridge.waiting.count() == 4


def test_one_that_is_being_published_is_named_by_its_word(full: House) -> None:
    now = full.bridge.engine.now()
    full.store.parked.claim(["sched-1"], now=now, until=now + timedelta(hours=1))
    with pytest.raises(JobNotFound, match="scheduled job 'sched-1' is being published, or is gone"):
        full.bridge.waiting.cancel("sched-1")


def test_a_job_is_moved(full: House) -> None:
    """To a later time, or an earlier one, of any zone; the audit has the time."""
    zone = timezone(timedelta(hours=9))
    full.bridge.waiting.move("sched-1", (full.bridge.engine.now() + timedelta(days=7)).astimezone(zone))
    full.bridge.retries.move("retry-2", full.bridge.engine.now() + timedelta(minutes=5))
    assert timedelta(days=6, hours=23) < full.due("sched-1") < timedelta(days=7, seconds=1)
    assert timedelta(minutes=4) < full.due("retry-2") < timedelta(minutes=5, seconds=1)
    record = full.bridge.audit.list().records[1]
    assert (record.action, record.subject["ids"]) == ("waiting.move", ["sched-1"])
    assert record.subject["at"].endswith("Z")


def test_it_is_published_at_that_time(full: House) -> None:
    """A time in the past is now."""
    full.bridge.scheduled.move("sched-3", datetime(1970, 1, 1, tzinfo=timezone.utc))
    assert timedelta(seconds=-5) < full.due("sched-3") <= timedelta(0)
    now = full.bridge.engine.now()
    due = full.store.parked.claim_due(FRAMEWORK, now=now, until=now + timedelta(minutes=1), limit=9)
    assert [found.id for found in due.retries] == ["sched-3"]


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (datetime(2030, 1, 1), r"at: datetime.datetime\(2030, 1, 1, 0, 0\) must be a time with a zone"),
        ("2030-01-01T00:00:00Z", "at: '2030-01-01T00:00:00Z' must be a time with a zone"),
        (
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
            "at: 9999-12-31 .* must be in the years 1 to 9999 of UTC",
        ),
    ],
)
def test_what_is_no_time_to_move_to(full: House, at: Any, told: str) -> None:
    for move in (
        lambda: full.bridge.waiting.move("sched-1", at),
        lambda: full.bridge.operations.begin("move", at=at),
    ):
        with pytest.raises(ValueError, match=told):
            move()
    assert ids(full.bridge.waiting) == ["retry-0", "sched-1", "retry-2", "sched-3"]


def test_the_last_time_there_is(full: House) -> None:
    """It can be kept, listed and cancelled."""
    full.bridge.waiting.move("retry-0", datetime.max.replace(tzinfo=timezone.utc))
    assert ids(full.bridge.waiting)[-1] == "retry-0"
    full.bridge.waiting.cancel("retry-0")
    assert full.bridge.waiting.count() == 3


def test_many_are_moved(full: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts once, though it comes again on a later page."""
    monkeypatch.setattr("ojs_bridge.operations.waiting.READ", 1)
    at = full.bridge.engine.now() + timedelta(hours=2, minutes=30)
    begun = full.bridge.operations.begin("move", at=at)
    assert begun.to_ojs()["at"].startswith(f"{at:%Y-%m-%dT%H:%M}")
    done = full.bridge.operations.run(full.bridge.operations.get(begun.id))
    assert (done.state, done.matched, done.succeeded) == ("done", 4, 4)
    assert {found.next_retry_at for found in full.bridge.waiting.list().jobs} == {begun.at}
    [record] = full.bridge.audit.list().records
    assert (record.action, record.count, record.subject["at"]) == ("waiting.move", 4, begun.to_ojs()["at"])


def test_a_move_of_some_is_stopped_and_resumed(full: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ojs_bridge.operations.waiting.LOT", 1)
    monkeypatch.setattr("ojs_bridge.operations.runner.SAVED", 0)
    operations, at = full.bridge.operations, full.bridge.engine.now() + timedelta(days=2)
    begun = operations.begin("move", ids=["sched-3", "retry-0", "sched-1"], at=at)
    stopped = operations.run(begun, progress=lambda now: operations.stop(now.id))
    assert (stopped.state, stopped.at) == ("stopped", begun.at)
    done = operations.run(operations.resume(begun.id))
    assert (done.state, done.matched, done.succeeded) == ("done", 3, 3)
    assert ids(full.bridge.waiting)[0] == "retry-2"


@pytest.mark.parametrize(
    ("action", "asked", "told"),
    [
        ("move", {}, "at: None: a move has a time"),
        ("run", {"at": datetime.now(timezone.utc)}, "a run has no time"),
        ("purge", {"kind": "scheduled"}, "kind: 'scheduled': dead letters have none"),
        ("cancel", {"kind": "lost"}, "kind: 'lost' must be one of retry, scheduled, held"),
    ],
)
def test_a_bulk_operation_that_cannot_be(full: House, action: Any, asked: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        full.bridge.operations.begin(action, **asked)


def test_one_kind_is_cancelled_by_the_many(full: House) -> None:
    done = full.bridge.operations.run(full.bridge.operations.begin("cancel", kind="scheduled"))
    assert (done.succeeded, ids(full.bridge.waiting)) == (2, ["retry-0", "retry-2"])


def test_a_drain_leaves_nothing_behind(full: House) -> None:
    """The view of one kind drains the other, too; a scheduled job is delayed by its framework."""
    known = full.bridge.waiting.get("sched-3")
    assert full.bridge.retries.drain() == Drained(4, {}, 0, {})
    assert full.outbox.delayed["sched-3"] == known.next_retry_at
    assert full.bridge.waiting.count() == 0


def test_a_letter_is_found_by_its_jobs_id(full: House) -> None:
    """If it is the only one: a job that its user has given an id has a chain, too."""
    bridge, died = full.bridge, full.bridge.engine.now()
    full.store.letters.bury(letter("o-1~chain", discarded_at=died))
    for name in ("o-2~one", "o-2~two"):
        full.store.letters.bury(letter(name, discarded_at=died))
    found = bridge.dead_letters.find("o-1")
    assert found is not None
    assert (found.id, bridge.jobs.get("o-1").state, bridge.jobs.id_of("o-1")) == (
        *("o-1~chain", "discarded"), "o-1~chain",
    )  # fmt: skip
    assert bridge.dead_letters.find("o-") is None
    for ask in (bridge.dead_letters.find, bridge.jobs.get, bridge.dead_letters.id_of):
        with pytest.raises(LetterNotFound, match="more dead letters than one: o-2~one and o-2~two"):
            ask("o-2")


def test_on_the_command_line(tmp_path: Any) -> None:
    """The same commands serve each kind, and all; only the list of all has the kind."""
    full = House(f"sqlite:///{tmp_path}/ojs.db")

    def say(*words: str) -> str:
        return run(*words, store=full.url).out

    told = say("waiting", "list").splitlines()
    assert told[0].split()[:3] == ["id", "kind", "due"]
    assert [line.split()[:2] for line in told[1:]] == [
        *(["retry-0", "retry"], ["sched-1", "scheduled"], ["retry-2", "retry"], ["sched-3", "scheduled"]),
    ]
    assert [line.split()[0] for line in say("scheduled", "list").splitlines()] == ["id", "sched-1", "sched-3"]
    assert [found["id"] for found in run("retries", "list", "--json", store=full.url).json] == [
        *("retry-0", "retry-2"),
    ]
    shown = say("scheduled", "show", "sched-1")
    assert ["state", "scheduled"] in [line.split() for line in shown.splitlines()]
    wrong = run("scheduled", "show", "retry-0", store=full.url)
    assert (wrong.code, "there is no scheduled job 'retry-0'" in wrong.err) == (1, True)
    assert say("scheduled", "move", "sched-1", "--to", "2h") == "sched-1: moved\n"
    assert timedelta(hours=1, minutes=59) < full.due("sched-1") <= timedelta(hours=2)
    assert say("scheduled", "run", "sched-1") == "sched-1: due\n"
    assert say("retries", "move", "--all", "--to", "2030-01-01T00:00:00Z", "--yes") == "2 jobs moved\n"
    assert {found.next_retry_at.year for found in full.bridge.retries.list().jobs} == {2030}
    assert say("scheduled", "cancel", "--all", "--yes") == "2 jobs cancelled\n"
    assert ids(full.bridge.waiting) == ["retry-0", "retry-2"]


@pytest.mark.parametrize("to", ["tomorrow", "2030-13-01", "-2h"])
def test_a_time_that_is_none(tmp_path: Any, to: str) -> None:
    full = House(f"sqlite:///{tmp_path}/ojs.db")
    wrong = run("waiting", "move", "retry-0", f"--to={to}", store=full.url)
    assert wrong.code == 2
    assert f"to: '{to}' must be a time such as 2026-11-21T10:00:00Z, or how long from now" in wrong.err


def test_what_falls_due_is_told(full: House) -> None:
    """Whole minutes, quarters of an hour or longer steps from now on, of each view its own kind."""
    bridge = full.bridge
    full.bridge.waiting.run("retry-0")
    day = bridge.waiting.due(timedelta(days=1))
    assert (day.step, len(day.by_kind["retry"])) == (timedelta(minutes=15), 96)
    counted = {kind: sum(count or 0 for count in counts) for kind, counts in day.by_kind.items()}
    assert (counted["retry"] + (day.late or 0), counted["scheduled"]) == (2, 2)
    assert [*bridge.scheduled.due().by_kind] == ["scheduled"]
    hour = bridge.retries.due(queue="default", type="billing.*")
    assert (hour.since.second, hour.step, len(hour.by_kind["retry"])) == (0, timedelta(minutes=1), 60)
    shown = run("waiting", "due", "--within", "1d", "--store", full.url)
    assert (shown.code, "4 jobs fall due" in shown.out or "3 jobs fall due, 1 late" in shown.out) == (0, True)
    assert sum(run("scheduled", "due", "--store", full.url, "--json").json[0]["by_kind"]["scheduled"]) == 0
    for wrong, told in (
        ({"within": timedelta(seconds=1)}, "within: 0:00:01"),
        ({"kind": "held"}, "kind: 'held'"),
    ):
        with pytest.raises(ValueError, match=told):
            bridge.waiting.due(**wrong)


def test_what_is_not_counted_is_not_known(full: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries in the broker are told in the steps that are known."""
    for module in ("ojs_bridge.store.sql.jobs.LOOKED", "ojs_bridge.store.redis.jobs.LOOKED"):
        monkeypatch.setattr(module, 2)
    monkeypatch.setattr("ojs_bridge.store.redis.jobs.LOT", 0)
    waits, now = ShortWaits(full.store.documents, timedelta(minutes=1)), full.bridge.engine.now()
    waits.add(Job("j", "mail.send", "mail"), now + timedelta(minutes=20))
    waits.write(now)
    ahead = full.bridge.waiting.due(timedelta(days=1))
    is_redis = full.url.startswith("redis")
    assert (ahead.late, ahead.is_whole) == (None if is_redis else 0, False)
    assert ahead.by_kind["retry"][-1] is None
    assert sum(count or 0 for count in ahead.by_kind["retry"]) == (0 if is_redis else 2)
