"""Events of jobs, the listeners that hear them, and the log."""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, Discard, Event, Fail, Response, Retry, RetryPolicy, Snooze
from ojs_bridge import DeadLetter as DeadLetterResponse
from ojs_bridge.engine import events as engine_events
from ojs_bridge.engine.events import Dispatcher, harmless, log, of, started
from ojs_bridge.engine.runs import Run
from ojs_bridge.errors import StoreError
from ojs_bridge.rules.decision import Complete, DeadLettered, Discarded, decide
from ojs_bridge.rules.failures import ErrorMap, Failure, outcome_of
from ojs_bridge.rules.job import Job, decode
from tests.lives import FRAMEWORK
from tests.servers import eventually

NOW = datetime(2026, 11, 21, 10, 0, 2, tzinfo=timezone.utc)
JOB = Job("j-1", "billing.charge", "default", attempt=2)
LAST = Job("j-1", "billing.charge", "default", attempt=3)
POLICY = RetryPolicy(jitter=False)
KEPT = RetryPolicy(jitter=False, on_exhaustion="dead_letter", non_retryable_errors=["auth.*"])
SECRET = "4111-1111"


def decision_of(raised: BaseException | None, job: Job = JOB, policy: RetryPolicy = POLICY) -> Any:
    """Return the decision about a job that raised this."""
    outcome = None if raised is None else outcome_of(raised, ErrorMap())
    return decide(policy, job, outcome, now=NOW, rng=None)  # type: ignore[arg-type]


def told(raised: BaseException | None, job: Job = JOB, policy: RetryPolicy = POLICY) -> list[dict[str, Any]]:
    """Return the events of a decision, in their JSON form."""
    decision = decision_of(raised, job, policy)
    events = of(job, decision, max_attempts=policy.max_attempts, seconds=0.25, at=NOW)
    return [json.loads(json.dumps(event.to_ojs())) for event in events]


TIMED_OUT = Response("external.timeout", "slow", details={"card": SECRET})
KNOWN = {"job_type": "billing.charge", "queue": "default"}
RAN = {**KNOWN, "attempt": 2, "duration_ms": 250.0}
ERROR = {"code": "RETRY", "type": "external.timeout", "message": "slow"}
FAILED = ("job.failed", {**RAN, "error": {**ERROR, "retryable": True}})
RETRY_REASON = "attempt 2 of 3 failed with external.timeout; retry 2 in 2.000 s"
EVENTS: dict[str, tuple[Any, Job, RetryPolicy, list[tuple[str, dict[str, Any]]]]] = {
    "success": (None, JOB, POLICY, [("job.completed", RAN)]),
    "retry": (
        TIMED_OUT,
        JOB,
        POLICY,
        [
            FAILED,
            (
                "job.retrying",
                {
                    **RAN,
                    "max_attempts": 3,
                    "next_retry_at": "2026-11-21T10:00:04.000Z",
                    "delay_ms": 2000.0,
                    "error": ERROR,
                    "reason": RETRY_REASON,
                },
            ),
        ],
    ),
    "snooze": (
        Snooze("PT10S"),
        JOB,
        POLICY,
        [
            (
                "job.snoozed",
                {
                    **RAN,
                    "next_retry_at": "2026-11-21T10:00:12.000Z",
                    "delay_ms": 10_000.0,
                    "reason": "the handler asked for a pause of 10.000 s",
                },
            )
        ],
    ),
    "exhausted": (
        TIMED_OUT,
        LAST,
        POLICY,
        [
            ("job.failed", {**RAN, "attempt": 3, "error": {**ERROR, "retryable": True}}),
            (
                "job.discarded",
                {
                    **KNOWN,
                    "total_attempts": 3,
                    "last_error": ERROR,
                    "dead_lettered": False,
                    "cause": "exhausted",
                    "reason": "attempt 3 of 3 failed with external.timeout, and no attempt is left",
                    "response_code": "RETRY",
                    "duration_ms": 250.0,
                },
            ),
        ],
    ),
    "fail": (
        Fail("validation.amount", "negative"),
        JOB,
        POLICY,
        [
            (
                "job.failed",
                {
                    **RAN,
                    "error": {
                        "code": "FAIL",
                        "type": "validation.amount",
                        "message": "negative",
                        "retryable": False,
                    },
                },
            ),
            (
                "job.discarded",
                {
                    **KNOWN,
                    "total_attempts": 2,
                    "last_error": {
                        "code": "FAIL",
                        "type": "validation.amount",
                        "message": "negative",
                    },
                    "dead_lettered": False,
                    "cause": "handler",
                    "reason": "attempt 2 of 3 failed with validation.amount, and the handler said FAIL",
                    "response_code": "FAIL",
                    "duration_ms": 250.0,
                },
            ),
        ],
    ),
    "dead letter": (
        Response("auth.expired"),
        JOB,
        KEPT,
        [
            (
                "job.failed",
                {
                    **RAN,
                    "error": {
                        "code": "RETRY",
                        "type": "auth.expired",
                        "message": "auth.expired",
                        "retryable": False,
                    },
                },
            ),
            (
                "job.discarded",
                {
                    **KNOWN,
                    "total_attempts": 2,
                    "last_error": {"code": "RETRY", "type": "auth.expired", "message": "auth.expired"},
                    "dead_lettered": True,
                    "cause": "non_retryable",
                    "reason": "attempt 2 of 3 failed with auth.expired, which matches auth.*",
                    "response_code": "RETRY",
                    "duration_ms": 250.0,
                },
            ),
            ("dead_letter.added", KNOWN),
        ],
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_the_events_of_each_decision(name: str) -> None:
    """Each event has its type and the data that the events document requires, and no details."""
    raised, job, policy, expected = EVENTS[name]
    events = told(raised, job, policy)
    assert [(event["type"], event["data"]) for event in events] == expected
    assert SECRET not in json.dumps(events)


def test_the_start_of_an_attempt() -> None:
    """The event names the worker."""
    data = started(JOB, NOW).to_ojs()["data"]
    assert data.pop("worker_id")
    assert data == {**KNOWN, "attempt": 2}


def test_the_envelope() -> None:
    """The envelope is that of section 2 of the events document; ids are unique, the subject is the job."""
    events = [event.to_ojs() for event in (started(JOB, NOW), started(JOB, NOW))]
    assert events[0]["id"] != events[1]["id"]
    for event in events:
        assert event.pop("id").startswith("evt_")
        assert event.pop("source").startswith("ojs://ojs-bridge/workers/")
        assert event.pop("data")
        assert event == {
            "specversion": "1.0",
            "type": "job.started",
            "time": "2026-11-21T10:00:02.000Z",
            "subject": "j-1",
            "datacontenttype": "application/json",
        }


# Section 4 of the events document requires these data of each type.
REQUIRED = {
    "job.started": {"job_type", "queue", "worker_id", "attempt"},
    "job.completed": {"job_type", "queue", "duration_ms", "attempt"},
    "job.failed": {"job_type", "queue", "attempt", "error"},
    "job.retrying": {"job_type", "queue", "attempt", "max_attempts", "next_retry_at", "error"},
    "job.discarded": {"job_type", "queue", "total_attempts", "last_error"},
}


def test_required_data() -> None:
    """No event lacks data that the spec requires."""
    events = [started(JOB, NOW).to_ojs(), *(e for r, j, p, _ in EVENTS.values() for e in told(r, j, p))]
    assert {event["type"] for event in events} >= REQUIRED.keys()
    for event in events:
        assert event["data"].keys() >= REQUIRED.get(event["type"], set())
        for error in (event["data"].get("error"), event["data"].get("last_error")):
            assert error is None or error.keys() >= {"code", "message"}


LINES = [
    (None, POLICY, None, None),
    (TIMED_OUT, POLICY, "WARNING", f"job j-1 (billing.charge) retrying: {RETRY_REASON}"),
    (
        Retry("external.limited", "429", after="PT9S"),
        POLICY,
        "WARNING",
        "job j-1 (billing.charge) retrying: attempt 2 of 3 failed with external.limited; "
        "retry 2 in 9.000 s, as the handler asked",
    ),
    (
        Snooze("PT10S"),
        POLICY,
        "INFO",
        "job j-1 (billing.charge) snoozed: the handler asked for a pause of 10.000 s",
    ),
    (
        Discard("card.declined", SECRET),
        POLICY,
        "ERROR",
        "job j-1 (billing.charge) discarded: attempt 2 of 3 failed with card.declined, "
        "and the handler said DISCARD",
    ),
    (
        DeadLetterResponse("card.stolen", SECRET),
        POLICY,
        "ERROR",
        "job j-1 (billing.charge) dead-lettered: attempt 2 of 3 failed with card.stolen, "
        "and the handler said DEAD_LETTER",
    ),
    (
        Response("auth.expired", SECRET, details={"card": SECRET}),
        KEPT,
        "ERROR",
        "job j-1 (billing.charge) dead-lettered: attempt 2 of 3 failed with auth.expired, "
        "which matches auth.*",
    ),
    (
        Response("two\nlines\x1b[31m"),
        POLICY,
        "WARNING",
        "job j-1 (billing.charge) retrying: attempt 2 of 3 failed with two\\nlines\\x1b[31m; "
        "retry 2 in 2.000 s",
    ),
]


@pytest.mark.parametrize(("raised", "policy", "level", "text"), LINES, ids=lambda value: str(value)[:30])
def test_the_log_line_of_each_decision(
    caplog: pytest.LogCaptureFixture, raised: Any, policy: RetryPolicy, level: str | None, text: str | None
) -> None:
    """The line is exactly this one, without a message, details or arguments."""
    with caplog.at_level(logging.DEBUG, "ojs_bridge"):
        log(JOB, decision_of(raised, policy=policy))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == (
        [(level, text)] if level else []
    )


class Heard:
    """A listener that keeps the events it hears."""

    def __init__(self) -> None:
        self.types: list[str] = []

    def __call__(self, event: Event) -> None:
        self.types.append(event.type)


def numbered(first: int, last: int) -> list[Event]:
    """Events whose types are numbers."""
    return [Event(str(n), "j-1", NOW, {}) for n in range(first, last)]


def test_events_are_heard_in_order() -> None:
    """Every listener hears all events."""
    one, two = Heard(), Heard()
    dispatcher = Dispatcher([one, two])
    for n in range(0, 3000, 3):
        dispatcher.emit(numbered(n, n + 3))
    assert dispatcher.flush(30)
    assert one.types == two.types == [str(n) for n in range(3000)]


GREEN = """
from gevent import monkey

monkey.patch_all()

import time
from datetime import datetime, timezone
from ojs_bridge import Event
from ojs_bridge.engine.events import Dispatcher

heard = []
dispatcher = Dispatcher([lambda event: (time.sleep(0.2), heard.append(event.type))])
dispatcher.emit([Event("1", "j-1", datetime.now(timezone.utc), {})])
print(dispatcher.flush(0.01), dispatcher.flush(30), heard)
"""


def test_a_green_process_waits_for_its_last_events() -> None:
    """Its queues are those of gevent."""
    command = [sys.executable, "-c", GREEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "False True ['1']\n", done.stderr


@pytest.mark.parametrize("error", [ValueError("boo"), SystemExit(1), KeyboardInterrupt()])
def test_a_listener_that_raises(caplog: pytest.LogCaptureFixture, error: BaseException) -> None:
    """The other listeners hear everything, the listener itself the next event, and the log has the error."""
    heard, calls = Heard(), Heard()

    def raises(event: Event) -> None:
        calls(event)
        raise error

    dispatcher = Dispatcher([raises, heard])
    dispatcher.emit(numbered(0, 3))
    assert dispatcher.flush(30)
    assert heard.types == calls.types == ["0", "1", "2"]
    assert [r.getMessage() for r in caplog.records] == [
        f"listener {raises!r} failed on {n} of job j-1" for n in range(3)
    ]


def test_a_listener_that_blocks_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emitting stays quick: many events wait, the others are dropped, counted and logged."""
    monkeypatch.setattr(engine_events, "MAX_WAITING", 100)
    release = threading.Event()
    heard = Heard()

    def blocks(_event: Event) -> None:
        release.wait()

    dispatcher = Dispatcher([blocks, heard])
    dispatcher.emit(numbered(0, 1))
    eventually(dispatcher._queue.empty, what="the listener is busy")
    dispatcher.emit(numbered(1, 351))  # would not end, if it waited for the listener
    assert not dispatcher.flush(0.05)
    assert dispatcher._queue.qsize() == 100
    assert [record.getMessage() for record in caplog.records] == [
        f"listeners are too slow: {count} events dropped so far" for count in (1, 100, 200)
    ]
    release.set()
    assert dispatcher.flush(30)
    assert heard.types == [str(n) for n in range(101)]


def test_jobs_go_on_while_a_listener_blocks(tmp_path: Path) -> None:
    """A thousand jobs run to their end, though the listener has not yet heard of the first one."""
    entered, release = threading.Event(), threading.Event()
    heard: list[Event] = []

    def blocks(event: Event) -> None:
        entered.set()
        release.wait()
        heard.append(event)

    bridge = Bridge(listeners=[blocks])
    for n in range(1000):
        job = Job(f"j-{n}", "t", "q")
        begun = bridge.engine.begin(job, job, bridge.engine.task())
        assert isinstance(begun, Run)
        bridge.engine.settling.settle(begun, bridge.engine.judge(begun, None))
    assert entered.wait(90)
    assert not heard
    release.set()


def test_without_listeners_there_is_no_thread() -> None:
    """A bridge without listeners starts no thread."""
    before = {*threading.enumerate()}
    bridge = Bridge()
    bridge.engine.begin(JOB, JOB, bridge.engine.task())
    assert bridge.engine.context.events.listeners == ()
    assert bridge.flush()
    assert {*threading.enumerate()} <= before


@pytest.fixture
def no_more_threads() -> Iterator[None]:
    """Have each new thread ask for a stack that no machine has."""
    usual = threading.stack_size(2**46)
    yield
    threading.stack_size(usual)


@pytest.mark.skipif(sys.platform == "darwin", reason="where stacks are not reserved")
def test_where_no_thread_can_be_started(no_more_threads: None, caplog: pytest.LogCaptureFixture) -> None:
    """The job runs, no listener hears of it, and the log says why."""
    heard = Heard()
    bridge = Bridge(listeners=[heard])
    assert isinstance(bridge.engine.begin(JOB, JOB, bridge.engine.task()), Run)
    assert [record.getMessage() for record in caplog.records] == [
        "the thread of the listeners cannot be started: can't start new thread: 1 events dropped so far"
    ]
    assert bridge.flush()


def test_a_listener_that_blocks_delays_no_other_bridge_s_events() -> None:
    """Each bridge of a process has a thread of its own for its listeners."""
    release, told = threading.Event(), []
    blocked, other = Dispatcher([lambda event: release.wait(90)]), Dispatcher([told.append])
    blocked.emit(numbered(0, 1))
    try:
        other.emit(numbered(0, 3))
        assert other.flush(30)
        assert len(told) == 3
    finally:
        release.set()


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    """The child does not repeat events that wait in its parent."""
    context = multiprocessing.get_context("fork")
    told, release = context.SimpleQueue(), threading.Event()

    def tells(event: Event) -> None:
        if event.type != "busy":
            told.put((event.type, multiprocessing.current_process().name))
        else:
            release.wait(90)

    dispatcher = Dispatcher([tells])
    dispatcher.emit([Event("busy", "j-1", NOW, {}), *numbered(0, 1)])

    def child() -> None:
        assert dispatcher.flush(0)
        dispatcher.emit(numbered(1, 2))
        assert dispatcher.flush(30)

    process = context.Process(target=child, name="child")
    process.start()
    assert told.get() == ("1", "child")
    process.join(90)
    assert process.exitcode == 0
    release.set()
    assert dispatcher.flush(30)
    assert told.get() == ("0", "MainProcess")
    assert told.empty()


def test_the_events_of_a_job_in_order(tmp_path: Path) -> None:
    """The job has three attempts, from its start to its dead letter."""
    heard = Heard()
    retry = {"initial_interval": "PT0.001S", "on_exhaustion": "dead_letter"}
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", retry, listeners=[heard])
    state = None
    for attempt in (1, 2, 3):
        bare = Job("j-1", "t", "q", attempt)
        job = bare if state is None else decode(state, bare)
        eventually(lambda job=job: not job.next_retry_at or job.next_retry_at <= bridge.engine.now())  # type: ignore[misc]
        run = bridge.engine.begin(job, bare, bridge.engine.task())
        assert isinstance(run, Run)
        decision = bridge.engine.judge(run, OSError("down"))
        after = bridge.engine.carrying.after(run.job, decision)
        state = bridge.engine.storing.header(after).text
        if isinstance(decision, DeadLettered):
            bridge.engine.storing.bury(run, after, decision, FRAMEWORK, {})
        bridge.engine.settling.settle(run, decision)
    assert bridge.flush(30)
    again = ["job.started", "job.failed", "job.retrying"]
    assert heard.types == [*again, *again, "job.started", "job.failed", "job.discarded", "dead_letter.added"]


def test_every_failed_attempt_says_how_long_it_ran_and_why_it_failed(tmp_path: Path) -> None:
    """The failure, the retry after it and the end have the duration and the error."""
    heard: list[Event] = []
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", {"max_attempts": 3}, listeners=[heard.append])
    for attempt in (1, 2, 3):
        job = Job("j-1", "t", "q", attempt, fence=attempt - 1)
        run = bridge.engine.begin(job, job, bridge.engine.task())
        assert isinstance(run, Run)
        ran = run._replace(since=run.since - 10 * attempt)
        bridge.engine.settling.settle(ran, bridge.engine.judge(ran, OSError(f"down for the {attempt}. time")))
    assert bridge.flush(30)
    told = [(event.type, event.data) for event in heard if event.type != "job.started"]
    again = ["job.failed", "job.retrying"]
    assert [type_ for type_, _ in told] == [*again, *again, "job.failed", "job.discarded"]
    for (_, data), attempt in zip(told, (1, 1, 2, 2, 3, 3), strict=True):
        assert 10_000 * attempt <= data["duration_ms"] < 10_000 * attempt + 5_000
        assert (data.get("error") or data["last_error"])["message"] == f"down for the {attempt}. time"


class Hostile(logging.Filter):
    """A logging filter that raises, as a full disk or a bug does."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Raise."""
        raise OSError("no space left on device")


def test_a_log_that_fails_harms_nobody() -> None:
    """The decision has been carried out already, and the listeners hear of it."""
    heard, hostile = Heard(), Hostile()
    bridge = Bridge(listeners=[heard])
    run = bridge.engine.admit(JOB, JOB, bridge.engine.task())
    assert isinstance(run, Run)
    logger = logging.getLogger("ojs_bridge")
    logger.addFilter(hostile)
    try:
        bridge.engine.settling.settle(run, Discarded("handler", Failure("a.b"), "why"))
        bridge.engine.settling.settle(run, Complete())
    finally:
        logger.removeFilter(hostile)
    assert bridge.flush(30)
    assert heard.types == ["job.failed", "job.discarded", "job.completed"]


def fails_with(error: Exception) -> None:
    """A step that fails."""
    raise error


def test_an_outage_after_a_decision_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Every job that runs when the store goes away meets it. Only an error of code has a traceback."""
    for error in (StoreError("the store failed"), ZeroDivisionError()):
        harmless(JOB, fails_with, error)
    outage, fault = caplog.records
    assert (outage.levelname, outage.exc_info) == ("WARNING", None)
    assert outage.getMessage().endswith("the job is not affected: the store failed")
    assert (fault.levelname, fault.exc_info and fault.exc_info[0]) == ("ERROR", ZeroDivisionError)


def test_times_are_in_utc() -> None:
    """Times of any zone are written in UTC."""
    zone = timezone(timedelta(hours=5, minutes=30))
    assert started(JOB, NOW.astimezone(zone)).to_ojs()["time"] == "2026-11-21T10:00:02.000Z"
