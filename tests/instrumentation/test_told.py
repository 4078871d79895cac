"""What others hear of a job, on real workers, is what the tables of the docs say."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import pytest

from ojs_bridge import Snooze
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.fleets import OnCelery
from tests.contract.notes import VARIABLE, Noting, Settings, client
from tests.contract.steps import KEEP, calls, dies, naps, raises, waits_for
from tests.instrumentation.snippets import DOCS
from tests.instrumentation.telling import shown
from tests.on_celery.fleet import in_seconds
from tests.servers import eventually

#: The events of Celery's workers that say how a run has ended.
ENDS = ("task-succeeded", "task-retried", "task-failed", "task-rejected", "task-revoked")
HOOKS = "tests.instrumentation.telling.Hooks"
OPERATE = "tests.instrumentation.telling.operate"
#: The page and the heading of a framework's table, the app of Django, and the settings of the workers, also
#: those that only Django's app needs.
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "celery": {
        "table": ("reference/events.md", "## Celery's own signals and states"),
        "app": "django_celery_results",
        "settings": {"instruments": ("telling.heard", "sentry", "celerys_own")},
        "django": {"results": "django-db"},
    },
    "dramatiq": {
        "table": ("how-to/monitoring.md", "## What Dramatiq's middleware is told"),
        "app": "django_dramatiq",
        "settings": {"instruments": ("sentry", "otel"), "middleware": (HOOKS,)},
        "django": {"middleware": (HOOKS, "django_dramatiq.middleware.AdminMiddleware")},
    },
}
#: Retries that the broker delays, and those that the store keeps, far enough from what tells of them.
SOON, LATER = (
    {"initial_interval": wait, "max_interval": wait, "max_attempts": 2, **KEEP} for wait in ("PT1.5S", "PT3S")
)
#: The beginning of a row of both tables; that of a broker's delay is not in Celery's.
SUCCEEDS, RETRIED, SNOOZES, FAILS = "a run succeeds", "a run fails", "a run snoozes", "a job ends"
DUE, DELAYED = ("its time", "the time of a parked"), ("its time", "the time of a job that the broker")
EARLY, LATE, REPLAYED = "a delivery comes before", "a late copy", "a dead letter"
STOPPED, CHILD, DIES, LOST = (
    "a worker is stopped",
    "a process of the pool dies in a run",
    "a worker dies",
    "the next delivery",
)
LAST = "a process of the pool dies in the last"
#: What only Celery has.
POOL = (CHILD, LAST)
#: How a job goes: its rows in their order. What stands in a list may come any number of times.
JOBS: dict[str, list[Any]] = {
    "retried from the broker": [RETRIED, DELAYED, SUCCEEDS],
    "parked": [RETRIED, DUE, SUCCEEDS],
    "run by hand": [RETRIED, DUE, SUCCEEDS],
    "snoozed in the broker": [SNOOZES, DELAYED, SUCCEEDS],
    "snoozed in the store": [SNOOZES, DUE, SUCCEEDS],
    "early": [EARLY, DUE, SUCCEEDS],
    "buried and replayed": [FAILS, REPLAYED, SUCCEEDS],
    "delivered twice": [SUCCEEDS, LATE],
    "its process dies": [CHILD, DUE, SUCCEEDS],
    "its process dies in the last attempt": [LAST],
    "stopped and killed": [STOPPED, DIES, [EARLY, DUE], [EARLY, DELAYED], LOST, DELAYED, SUCCEEDS],
}
#: Words of a cell that others hear at the side of the rest: no order holds between them.
SIDES = ("on_|errback", "task-", "(before|after)_n?ack", "before_delay")


def table_of(framework: str) -> dict[str, list[list[str]]]:
    """Return the words of each cell of a table in the docs, by what happens."""
    page, heading = FRAMEWORKS[framework]["table"]
    section = (DOCS / page).read_text("utf-8").partition(heading)[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return {what: [re.findall("`(.+?)`", cell) for cell in cells] for what, *cells in rows}


class Said:
    """What a table says of the jobs of this test, as patterns."""

    def __init__(self, framework: str) -> None:
        self._table = table_of(framework)
        self.jobs = [name for name, rows in JOBS.items() if rows[0] not in POOL or framework == "celery"]
        used = {self._row(row) for name in self.jobs for rows in JOBS[name] for row in _all(rows)}
        assert used == {*self._table}, "each row is seen"

    def _row(self, begins: str | tuple[str, ...]) -> str:
        (found,) = [what for what in self._table if what.startswith(begins)]
        return found

    def pattern(self, job: str, column: int, side: str = "") -> str:
        """Return what is told of a job in a column, and at a side of it."""

        def words(row: Any) -> str:
            if isinstance(row, list):
                return f"(?:{''.join(map(words, row))})*"
            cell = self._table[self._row(row)][column]
            return "".join(f"{re.escape(word)} " for word in cell if _side(word) == side)

        return "".join(map(words, JOBS[job]))


def _all(rows: Any) -> list[Any]:
    return rows if isinstance(rows, list) else [rows]


def _ids(event: dict[str, Any]) -> list[str]:
    tags, more = event.get("tags", {}), event.get("extra", {})
    return [tags.get("celery_task_id", ""), more.get("dramatiq_message_id", "")]


def _side(word: str) -> str:
    return next((side for side in SIDES if re.match(side, word)), "")


class Seen:
    """What was told of the jobs of a fleet."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._notes, self._settings, self._is_celery = (
            Noting(settings.backend),
            settings,
            fleet.framework == "celery",
        )

    def column(self, job: str, column: int) -> list[str]:
        """Return the words of a column about a job, in the order of time."""
        return [self._heard, lambda job: shown(self._settings, job), self._reported, self._spans][column](job)

    def _heard(self, job: str) -> list[str]:
        told = [name.replace("OSError", "error") for name in self._notes.read("told", job)]
        called = [name for name, *_ in self._notes.read("calls", job) if re.match(SIDES[0], name)]
        events = [event for event in self._notes.read("task-events", job) if event in ENDS]
        return told + called + events

    def _reported(self, job: str) -> list[str]:
        # One without the facts of the bridge has the id that Sentry's integration knows.
        others = [event for event in self._notes.read("sentry", self._settings.queue) if job in _ids(event)]
        events = [*self._notes.read("sentry", job), *others]
        # The fleet's broken listener has a line for each event.
        events = [event for event in events if "listener" not in event.get("logentry", {}).get("message", "")]
        return [f"ojs.ended={event['tags'].get('ojs.ended')}" for event in events]

    def _spans(self, job: str) -> list[str]:
        spans = self._notes.read("spans", self._settings.queue)
        spans = [s for s in spans if s["attributes"].get("messaging.message.id") == job]
        spans.sort(key=lambda span: span["start_time"])
        short = "/" if self._is_celery else f"{self._settings.queue} "
        parts = [span["name"].split(short)[0 if self._is_celery else -1] for span in spans]
        failed = [span["status"]["status_code"] == "ERROR" for span in spans]
        return [
            f"{part}(ERROR)" if bad else part
            for part, bad in zip(parts, failed, strict=True)
            if "ojs." not in part
        ]


def different(said: Said, seen: Seen, jobs: dict[str, str], columns: list[int]) -> list[str]:
    """Return where what was told of jobs differs from the table."""
    found = []
    for name, job in jobs.items():
        for column in columns:
            words = seen.column(job, column)
            for side in ("", *SIDES):
                told = "".join(f"{word} " for word in words if _side(word) == side)
                if not re.fullmatch(said.pattern(name, column, side), told):
                    found.append(f"{name}: {told}\n  not {said.pattern(name, column, side)}")
    return found


def copied(fleet: Fleet, job: str) -> Callable[[], object]:
    """Return what gives the message of a running job out once more, as a broker does that thinks it lost."""
    redis, queue = client(fleet.settings.broker), fleet.queue
    if fleet.framework == "celery":
        (held,) = [text for text in redis.hvals("unacked") if job in text]
        return lambda: redis.lpush(queue, json.dumps(json.loads(held)[0]))
    messages = f"{queue}:{queue}.msgs"
    ((name, body),) = [each for each in redis.hgetall(messages).items() if job in each[1]]
    return lambda: (redis.hset(messages, name, body), redis.rpush(f"{queue}:{queue}", name))


@contextmanager
def listening(fleet: Fleet) -> Iterator[None]:
    """Note the events by which a Celery worker tells monitors of jobs."""
    if not isinstance(fleet, OnCelery):
        yield
        return
    notes, app, stops = Noting(fleet.settings.backend), fleet._fleet.app, threading.Event()

    def note(event: dict[str, Any]) -> None:
        if "uuid" in event:
            notes.note("task-events", event["uuid"], event["type"])

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": note})
            while not stops.is_set():
                with suppress(TimeoutError):
                    receiver.capture(limit=None, timeout=1, wakeup=False)

    thread = threading.Thread(target=listen)
    thread.start()
    yield
    stops.set()
    thread.join()


def send(fleet: Fleet, names: list[str]) -> dict[str, str]:
    """Send the jobs that need no other worker than the first one, and see them end."""
    task, key = task_of(fleet), f"go:{fleet.queue}"
    never = {**LATER, "initial_interval": "PT1H", "max_interval": "PT1H"}
    jobs = {
        "early": fleet.send(task, "ok", state={"v": 1, "attempt": 2, "next_retry_at": in_seconds(5)}),
        "retried from the broker": fleet.send(task, raises(OSError), "ok", policy=SOON),
        "parked": fleet.send(task, raises(OSError), "ok", policy=LATER),
        "run by hand": fleet.send(task, raises(OSError), "ok", policy=never),
        "snoozed in the broker": fleet.send(task, raises(Snooze, "PT1.5S"), "ok"),
        "snoozed in the store": fleet.send(task, raises(Snooze, "PT3S"), "ok"),
        "buried and replayed": fleet.send(
            task, raises(OSError), "ok", policy={**SOON, "max_attempts": 1}, followed_by=fleet.queue
        ),
        "delivered twice": fleet.send(task, waits_for(key)),
    }
    for name, attempts in {"its process dies": 2, "its process dies in the last attempt": 1}.items():
        if name in names:
            jobs[name] = fleet.send(task, dies(), "ok", policy={**SOON, "max_attempts": attempts})
    await_runs(fleet, jobs["delivered twice"])
    give_out = copied(fleet, jobs["delivered twice"])
    client(fleet.settings.backend).set(key, 1)
    end(fleet, jobs["delivered twice"])
    end(fleet, jobs["buried and replayed"])
    eventually(lambda: "job.retrying" in fleet.types(jobs["run by hand"]), what="a parked retry")
    give_out()
    end(fleet, fleet.send("act", calls(OPERATE, "dead_letters", "replay", jobs["buried and replayed"])))
    end(fleet, fleet.send("act", calls(OPERATE, "retries", "run", jobs["run by hand"])))
    for name, job in jobs.items():
        end(fleet, job, nth=2 if name == "buried and replayed" else 1)
    return jobs


def task_of(fleet: Fleet) -> str:
    """Return the task whose handlers are noted, or whose runs hear of a shutdown."""
    return "handled" if fleet.framework == "celery" else "interruptible"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_others_hear_what_the_docs_say(made: Callable[..., Fleet], framework: str) -> None:
    """Without Django's app the other columns are compared."""
    about = FRAMEWORKS[framework]
    has_django = find_spec(about["app"]) is not None
    said, columns = Said(framework), [0, 1, 2, 3] if has_django else [0, 2, 3]
    fleet = made(f"{framework}-valkey", visibility=5, park_after="PT2S", reservation="PT6S")
    # This process has no Django, since it has its settings once for all tests.
    settings = replace(fleet.settings, **about["settings"])
    if has_django:
        instruments = ("telling.django", *settings.instruments)
        settings = replace(settings, **about["django"], instruments=instruments)
    env, seen = {VARIABLE: json.dumps(asdict(settings))}, Seen(fleet, settings)
    options = ("-E",) if framework == "celery" else ()

    def compare(jobs: dict[str, str]) -> None:
        with suppress(TimeoutError):
            eventually(lambda: not different(said, seen, jobs, columns), seconds=20)
        found = different(said, seen, jobs, columns)
        assert not found, "\n".join(found)

    with listening(fleet):
        fleet.start(4, *options, **env).await_ready()
        jobs = send(fleet, said.jobs)
        # A worker that is stopped at once tells no more of what has just ended.
        compare(jobs)
        job = jobs["stopped and killed"] = fleet.send(task_of(fleet), naps(60), naps(60), "ok", policy=SOON)
        await_runs(fleet, job)
        if framework == "celery":
            # Celery's main process ends no run of which it has not heard yet.
            eventually(lambda: "task-started" in Noting(settings.backend).read("task-events", job))
        fleet.worker.process.send_signal(fleet.hurry)
        fleet.start(4, *options, **env).await_ready()
        await_runs(fleet, job, runs=2)
        fleet.worker.kill()
        fleet.start(4, *options, **env).await_ready()
        end(fleet, job)
        fleet.worker.stop()
        assert {*jobs} == {*said.jobs}
        compare(jobs)
