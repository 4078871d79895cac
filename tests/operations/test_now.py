"""The moment: what real stores have told, seldom asked, and the verdict about it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine import running
from ojs_bridge.engine.faults import Failures
from ojs_bridge.engine.running import KIND as RUNNING
from ojs_bridge.engine.runs import Backlog, Run
from ojs_bridge.operations import health, now
from ojs_bridge.operations.lately import Flows
from ojs_bridge.rules.decision import Complete, DeadLettered, RetryAt
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job, format_time
from ojs_bridge.rules.rise import minute_of
from ojs_bridge.store import BOUNDS, Document, Rate, Store
from tests.conftest import store_url
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.servers import Valkey, eventually
from tests.store.test_parked import parked
from tests.store.test_rates import record
from tests.store.test_store import letter

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
Lives = tuple[Bridge, Outbox]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no slow store."""
    monkeypatch.setattr(now, "SECONDS", 60.0)


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return store_url(request.param, request)


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


def died(
    type_: str, minutes: Mapping[int, int], at: datetime, outcome: str = "dead_lettered", queue: str = "mail"
) -> Sequence[Rate]:
    """Counts of deaths: so many in the minute that began so many minutes ago."""
    begins = minute_of(at)
    return [
        Rate(begins - ago * MINUTE, type_, queue, outcome, (count, *[0] * len(BOUNDS)))
        for ago, count in minutes.items()
    ]


def lives(
    store: Store, at: datetime, name: str = "a:1", queues: Sequence[str] = ("mail",), **more: Any
) -> None:
    """Write that a worker lives."""
    body = {
        "name": name, "host": name.partition(":")[0], "framework": FRAMEWORK, "queues": [*queues],
        "seen_at": format_time(at), "ended": False, **more,
    }  # fmt: skip
    store.documents.write(Document(health.KIND, f"{name}:{at.timestamp()}", at, body))


def store_of(bridge: Bridge) -> Store:
    assert bridge.store is not None
    return bridge.store


def test_what_dies_is_told_beside_what_is_usual(fleet: Lives) -> None:
    """The rates of the last days tell what is usual, the newest letter the error, a mark what explains it."""
    bridge, outbox = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    for day in (1, 2, 3):
        # In the hour of each day there were 120 deaths, two a minute.
        record(store, died("report", dict.fromkeys((-60, 0, 60), 120), at - day * DAY))
        record(store, died("report", dict.fromkeys((-60, 0, 60), 7200), at - day * DAY, "completed"))
    record(store, died("report", dict.fromkeys(range(60), 2), at))
    assert bridge.now().verdict.level == "well"
    record(store, died("charge", dict.fromkeys(range(1, 9), 75), at))
    record(store, died("charge", dict.fromkeys(range(1, 9), 5), at, "completed"))
    found = {"type": "charge", "framework": FRAMEWORK, "discarded_at": at}
    store.letters.bury(
        letter("j-1", errors=({"type": "external.down", "message": "bank answered 503"},), **found)
    )
    bridge.marks.add("v42", at=at - 9 * MINUTE)
    outbox.waiting = {"mail": 7}
    told = fresh(bridge)
    verdict = told.verdict
    assert verdict.level == "bad"
    assert ", usually 0, since " in verdict.sentence
    assert verdict.sentence.endswith(": bank answered 503.")
    assert verdict.since == minute_of(at) - 8 * MINUTE
    assert "the mark v42." in verdict.why
    seen = told.to_ojs()
    pulse, queues = seen["pulse"], seen["queues"]
    assert seen["hill"]["usual"] == [2.0] * 60
    assert (seen["hill"]["usual_retries"], sum(seen["hill"]["retries"])) == ([0.0] * 60, 0)
    assert (pulse["usual_deaths_per_minute"], pulse["usual_jobs_per_second"]) == (2.0, 2.033)
    assert [(queue["queue"], queue["depth"], queue["workers"]) for queue in queues] == [("mail", 7, 1)]


def test_retries_are_told_with_their_own_error(fleet: Lives) -> None:
    """And deaths of the same type with theirs: another error killed one job of it a minute ago."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    record(store, died("mail.send", dict.fromkeys(range(1, 60), 90), at, "completed"))
    record(store, died("mail.send", dict.fromkeys(range(1, 9), 60), at, "retried"))
    gone = {"type": "shop.Gone", "message": "customer 8 is gone"}
    found = {"type": "mail.send", "framework": FRAMEWORK, "discarded_at": at - MINUTE}
    store.letters.bury(letter("j-1", errors=(gone,), **found))
    failures = Failures(store.documents, (), redacts=False)
    again = RetryAt(at + timedelta(hours=1), 3600, Failure("external.down", "the relay is busy"), "")
    for number in range(30):
        failures.add(Job(f"r-{number}", "mail.send", "mail"), again, at)
    failures.write(at)
    verdict = fresh(bridge).verdict
    assert verdict.about and (verdict.about.kind, verdict.about.count) == ("on_its_way", 30)
    assert ": the relay is busy" in verdict.sentence


def test_a_new_group_is_shown_until_all_of_it_was_replayed(fleet: Lives) -> None:
    bridge, _ = fleet
    at = bridge.engine.now()
    lives(store_of(bridge), at)
    found = {"type": "mail.send", "framework": FRAMEWORK, "discarded_at": at - 5 * MINUTE}
    store_of(bridge).letters.bury(letter("j-1", errors=({"type": "e", "message": "m"},), **found))
    failures = Failures(store_of(bridge).documents, (), redacts=False)
    failures.add(
        Job("j-1", "mail.send", "mail"), DeadLettered("exhausted", Failure("e", "m"), ""), at - 5 * MINUTE
    )
    failures.write(at)
    assert [group["count"] for group in fresh(bridge).to_ojs()["groups"]] == [1]
    bridge.dead_letters.replay("j-1")
    assert [group.state for group in bridge.groups.list()] == ["new"]
    assert fresh(bridge).to_ojs()["groups"] == []


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine's store is not slow."""
    monkeypatch.setattr(now, "SECONDS", 30.0)


def fresh(bridge: Bridge) -> now.Moment:
    """Ask anew, as if the last answer were old."""
    bridge._moments._made = None
    bridge._moments._reader._known = ((), -1e9, frozenset())
    if last_hour := bridge._moments._reader._last_hour:
        last_hour._read_all = None
    return bridge.now()


def test_a_store_is_asked_once_for_all_viewers(fleet: Lives) -> None:
    """Many viewers at the same time get one answer, and the next ones the same for five seconds."""
    bridge, _ = fleet
    asked, read = list[float](), bridge._moments._reader.read

    def counting(store: Store) -> Any:
        asked.append(time.monotonic())
        return read(store)

    bridge._moments._reader.read = counting  # type: ignore[method-assign]
    told = list[now.Moment]()
    viewers = [threading.Thread(target=lambda: told.append(bridge.now())) for _ in range(20)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert (len(asked), len({id(one) for one in told})) == (1, 1)
    assert bridge.now() is told[0]


def test_documents_of_other_versions_break_nothing(fleet: Lives) -> None:
    """What cannot be read is left out, and more fields than are known are no harm."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at, "new:1", mood="good", queues=["mail"])
    jobs = [["j-1", "charge", format_time(at - MINUTE), "a new field"]]
    body = {"name": "new:1", "told_at": format_time(at), "jobs": jobs, "pace": 3}
    store.documents.write(Document(RUNNING, "r-1", at, body))
    for kind in (health.KIND, RUNNING, "in-broker", "mark", "operation", "mute", "hold"):
        store.documents.write(Document(kind, "odd", at, {"what": ["another", "version"]}))
    told = fresh(bridge)
    assert told.facts.store.status == "ok"
    seen = told.to_ojs()
    assert [(worker["name"], [job["id"] for job in worker["running"]]) for worker in seen["workers"]] == [
        ("new:1", ["j-1"])
    ]
    assert bridge.health.check().checks["store"].status == "ok"


def test_a_worker_of_the_release_before_is_shown(fleet: Lives) -> None:
    """It tells nothing of what it runs; and a reader of that release finds nothing new in its document."""
    bridge, _ = fleet
    lives(store_of(bridge), bridge.engine.now())
    (worker,) = fresh(bridge).to_ojs()["workers"]
    assert (worker["name"], worker["runs"], worker["running"]) == ("a:1", 0, [])


def test_a_worker_tells_what_it_runs(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jobs that go on it tells id and type, and since when; and once that it runs none any more."""
    bridge, _ = fleet
    monkeypatch.setattr("ojs_bridge.engine.rates.PERIOD", 0.05)
    monkeypatch.setattr(running, "SELDOM", 1.0)
    job = Job("j-1", "charge", "mail")
    bridge.start(FRAMEWORK, lambda: ["mail"])
    try:
        run = bridge.engine.begin(job, job, bridge.engine.task())
        assert isinstance(run, Run)

        def running_now() -> list[Any]:
            return [one["running"] for one in fresh(bridge).to_ojs()["workers"]]

        eventually(lambda: running_now() not in ([], [[]]), what="that it runs")
        ((shown,),) = running_now()
        assert (shown["id"], shown["type"], set(shown)) == ("j-1", "charge", {"id", "type", "seconds"})
        bridge.engine.settling.settle(run, Complete())
        eventually(lambda: running_now() == [[]], what="that it runs no more")
    finally:
        bridge.stop()


def test_a_job_that_had_just_begun_is_not_said_to_run_for_long(fleet: Lives) -> None:
    """A process tells of short jobs every half a minute: by then they have ended."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    told_at = at - timedelta(seconds=20)
    jobs = [["long", "charge", format_time(told_at - MINUTE)], ["short", "charge", format_time(told_at)]]
    body = {"name": "a:1", "told_at": format_time(told_at), "count": 2, "jobs": jobs}
    store.documents.write(Document(RUNNING, "r-1", at, body))
    (worker,) = fresh(bridge).to_ojs()["workers"]
    assert (worker["runs"], [job["id"] for job in worker["running"]]) == (2, ["long"])


def test_a_rate_is_the_same_in_the_sentence_and_in_the_strip(fleet: Lives) -> None:
    """What has begun half a minute ago is not counted over two minutes."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    record(store, died("charge", {0: 50}, at))
    told = fresh(bridge)
    about = told.verdict.about
    assert about and about.count == pytest.approx(told.to_ojs()["pulse"]["deaths_per_minute"], abs=0.1)


def test_a_host_that_is_silent_is_told_unless_another_took_its_place(fleet: Lives) -> None:
    """Half of the workers are dead: that is bad, though each queue has a worker."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at - DAY / 2, "a:1", seen_at=format_time(at))
    lives(store, at - DAY / 2, "b:1", seen_at=format_time(at - 10 * MINUTE))
    verdict = fresh(bridge).verdict
    assert verdict.level == "bad"
    assert verdict.sentence.startswith("The host b is silent since ")
    lives(store, at - 5 * MINUTE, "c:1", seen_at=format_time(at))
    assert fresh(bridge).verdict.level == "well"


def test_a_hold_is_contained(fleet: Lives) -> None:
    """What a pause holds is a line, and no alarm."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    record(store, died("charge", {1: 3}, at, "completed"))
    bridge.pause("charge", reason="ledger")
    # In a long run of tests it would be overdue.
    store.parked.park(parked("h-1", type="charge", kind="held", next_retry_at=at + timedelta(days=1)))
    told = fresh(bridge)
    (line,) = told.verdict.lines
    assert (told.verdict.level, line.kind, line.count) == ("well", "contained", 1)
    assert told.to_ojs()["pulse"]["waits"]["held"] == 1


def test_queues_keep_up_or_do_not(fleet: Lives) -> None:
    """The change of the depth and the runs of the last minutes tell what comes in."""
    bridge, outbox = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    record(store, died("charge", {0: 0, 1: 120, 2: 120}, at, "completed"))
    outbox.waiting = {"mail": 100}
    (queue,) = fresh(bridge).facts.queues
    assert (queue.depth, queue.in_per_second, queue.keeps_up) == (100, None, None)
    depths = bridge._moments._flows._depths[FRAMEWORK, "mail"]
    depths[0] = (depths[0][0] - timedelta(seconds=60), 100)
    outbox.waiting = {"mail": 700}
    told = fresh(bridge)
    (queue,) = told.facts.queues
    assert queue.keeps_up is False
    assert queue.in_per_second is not None
    assert queue.in_per_second > queue.out_per_second > 0
    assert told.verdict.sentence.startswith("The queue mail falls behind by ")


@pytest.mark.parametrize(
    ("depths", "out", "keeps_up"),
    [
        ((100, 100, 100), 10.0, True),  # they take ten seconds
        ((2700, 2600, 2200), 2.7, True),  # it gets shorter
        ((2200, 2200, 2200), 2.7, False),
        ((2200, 2200, 2200), 0.0, False),
        ((2200, 2700, 2190), 2.7, False),
        ((9, 9, 9), 0.0, True),
        ((0, 0, 700), 2.7, False),
        ((700, 300, 0), 2.7, True),
    ],
)
def test_a_long_queue_keeps_up_only_if_it_gets_shorter(
    depths: Sequence[int], out: float, *, keeps_up: bool
) -> None:
    """Long is one of which less than it holds ends in three minutes."""
    flows, at = Flows(), datetime(2026, 11, 28, 3, 30, tzinfo=timezone.utc)
    told = [flows.of("celery", "mail", depth, at + n * MINUTE, out) for n, depth in enumerate(depths)]
    assert told[-1].keeps_up is keeps_up


def test_a_backlog_is_told_until_it_is_worked_off(fleet: Lives) -> None:
    """3,000 jobs came at once; three minutes later their number falls, and they take long."""
    bridge, outbox = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    record(store, died("charge", {0: 90, 1: 90, 2: 90}, at, "completed"))
    outbox.waiting, outbox.oldest_at = {"mail": 2700}, at - 3 * MINUTE
    fresh(bridge)
    depths = bridge._moments._flows._depths[FRAMEWORK, "mail"]
    depths[0] = (depths[0][0] - 2 * MINUTE, 2700)
    outbox.waiting = {"mail": 2200}
    told = fresh(bridge)
    assert told.facts.queues[0].keeps_up
    assert told.verdict.level == "slow"
    assert told.verdict.sentence.startswith("The queue mail is late: 2,200 jobs wait, and they take ")


def test_a_store_that_is_away_is_told_in_one_sentence() -> None:
    """What it has told before stays, with its time; the queues stay live. When it is back, that is over."""
    with Valkey() as server:
        bridge, outbox = bridge_with_outbox(server.url)
        store, at = store_of(bridge), bridge.engine.now()
        lives(store, at)
        record(store, died("charge", dict.fromkeys(range(1, 9), 75), at))
        before = fresh(bridge)
        assert before.verdict.level == "bad"
        server.stop()
        outbox.waiting = {"mail": 9}
        eventually(lambda: fresh(bridge).verdict.level == "away", seconds=90, what="that it is away")
        told = fresh(bridge)
        verdict, seen = told.verdict, told.to_ojs()
        assert verdict.sentence.startswith("The store is away since ")
        assert verdict.lines == ()
        assert seen["at"] == before.to_ojs()["at"]
        assert seen["hill"]["deaths"] == before.to_ojs()["hill"]["deaths"]
        assert seen["pulse"]["store"]["status"] == "away"
        assert seen["pulse"]["store"]["since"] > seen["at"]
        assert [queue["depth"] for queue in seen["queues"]] == [9]
        server.start()
        eventually(lambda: fresh(bridge).verdict.level != "away", seconds=90, what="that it is back")


def test_a_store_that_is_slow_is_not_away(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last answer stays, with its time and a note; one that never answers is away after a while."""
    bridge, _ = fleet
    at = bridge.engine.now()
    lives(store_of(bridge), at)
    record(store_of(bridge), died("charge", {1: 3}, at, "completed"))
    before = fresh(bridge)
    assert before.verdict.level == "well"
    goes_on, read = threading.Event(), bridge._moments._reader.read

    def slow(store: Store) -> Any:
        goes_on.wait(60)
        return read(store)

    monkeypatch.setattr(now, "SECONDS", 0.3)
    bridge._moments._reader.read = slow  # type: ignore[method-assign]
    try:
        told = fresh(bridge)
        assert (told.verdict.level, told.known.at) == ("slow", before.known.at)
        assert told.verdict.sentence == "The store takes long to answer."
        assert "takes long" in told.note
        monkeypatch.setattr(now, "SILENT", 0.0)
        assert fresh(bridge).verdict.level == "away"
    finally:
        goes_on.set()
    monkeypatch.setattr(now, "SECONDS", 30.0)
    eventually(lambda: fresh(bridge).verdict.level == "well", what="its answer")


def test_a_broker_that_is_away_is_told_in_one_sentence(fleet: Lives) -> None:
    """Nothing else is told, whatever else there is."""
    bridge, outbox = fleet
    lives(store_of(bridge), bridge.engine.now())
    outbox.raises = ConnectionError("connection refused")
    verdict = fresh(bridge).verdict
    assert verdict.level == "away"
    assert verdict.sentence.startswith("The broker is away since ")
    assert "connection refused" in verdict.why


def test_a_broker_that_is_slow_is_not_away(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers late, under load: that is a note, and its last answer stays, with its age.

    One that never answers is away after a while.
    """
    bridge, outbox = fleet
    at = bridge.engine.now()
    lives(store_of(bridge), at)
    record(store_of(bridge), died("charge", {1: 3}, at, "completed"))
    assert fresh(bridge).verdict.level == "well"
    goes_on, backlog = threading.Event(), outbox.backlog

    def slow(queues: Collection[str]) -> Sequence[Backlog]:
        goes_on.wait(60)
        return backlog(queues)

    monkeypatch.setattr(outbox, "backlog", slow)
    check = bridge._moments._probe.check
    monkeypatch.setattr(bridge._moments._probe, "check", lambda _, silent, more: check(0.3, silent, more))
    monkeypatch.setattr(now, "SILENT", 60.0)
    try:
        told = fresh(bridge)
        assert told.verdict.sentence == "The broker takes long to answer."
        assert (told.verdict.level, told.facts.broker.status) == ("slow", "degraded")
        monkeypatch.setattr(now, "SILENT", 0.0)
        assert fresh(bridge).verdict.sentence.startswith("The broker is away since ")
        monkeypatch.setattr(now, "SILENT", 60.0)
        # The late answer comes, and the next one is late, too.
        outbox.waiting = {"mail": 7}
        goes_on.set()
        asking = bridge._moments._probe._asking["broker"]
        eventually(lambda: not asking.thread.is_alive(), what="its late answer")
        goes_on.clear()
        told = fresh(bridge)
        assert [(queue.queue, queue.depth) for queue in told.facts.queues] == [("mail", 7)]
        assert told.facts.broker.status == "degraded"
        assert re.fullmatch(
            r"the broker takes long to answer, and its queues are those of \d+ s ago", told.note
        )
    finally:
        goes_on.set()
    monkeypatch.setattr(bridge._moments._probe, "check", check)
    monkeypatch.setattr(now, "SILENT", 60.0)
    eventually(lambda: fresh(bridge).verdict.level == "well", what="its answer")


def test_the_first_viewer_does_not_wait_long_for_a_broker(
    fleet: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has time then; what the broker tells follows."""
    bridge, outbox = fleet
    lives(store_of(bridge), bridge.engine.now())
    goes_on, backlog = threading.Event(), outbox.backlog

    def slow(queues: Collection[str]) -> Sequence[Backlog]:
        goes_on.wait(300)
        return backlog(queues)

    monkeypatch.setattr(outbox, "backlog", slow)
    monkeypatch.setattr(now, "SECONDS", 1.0)
    monkeypatch.setattr(now, "FIRST", 200.0)
    monkeypatch.setattr(now, "SILENT", 300.0)
    began = time.monotonic()
    try:
        told = bridge.now()
        assert time.monotonic() - began < 100
        assert (len(told.known.workers), told.facts.broker.status) == (1, "degraded")
        assert told.note == "the broker takes long to answer, and its queues are not known"
    finally:
        goes_on.set()
    monkeypatch.setattr(now, "SECONDS", 30.0)
    eventually(lambda: fresh(bridge).facts.broker.status == "ok", what="the broker's answer")


def test_deaths_that_are_over_are_a_line(fleet: Lives) -> None:
    """What died some minutes ago, and dies no more, is no alarm."""
    bridge, _ = fleet
    store, at = store_of(bridge), bridge.engine.now()
    lives(store, at)
    record(store, died("mail.send", {4: 30, 5: 25}, at))
    told = fresh(bridge)
    (line,) = told.verdict.lines
    assert (told.verdict.level, line.kind, line.count) == ("well", "ended", 55)
    assert line.text.startswith("mail.send: 55 deaths from ")
    assert line.text.endswith("; none since")
    assert told.to_ojs()["pulse"]["deaths_per_minute"] == 0
