"""Without a store the broker's dead queue has the dead letters: listed, replayed, deleted as in a store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pika
import pytest

from ojs_bridge import DeadLetter, LetterNotFound, adapters
from ojs_bridge.errors import Unreachable
from tests.contract.conftest import FLEETS
from tests.contract.fleet import Fleet, end
from tests.contract.steps import Step, raises, raises_its_number
from tests.servers import eventually

ONCE = {"max_attempts": 1}


@pytest.fixture
def fleet(storeless: Fleet) -> Fleet:
    """A fleet without a store, whose dead queue is empty."""
    letters = storeless.bridge.broker_letters
    for letter in letters.list().letters:
        letters.delete(letter.id)
    return storeless


def ids(fleet: Fleet, **kind: Any) -> list[str]:
    """The ids of what is listed, newest first."""
    return [letter.id for letter in fleet.bridge.broker_letters.list(**kind).letters]


def bury(fleet: Fleet, *steps: Step, **options: Any) -> str:
    """Send a job that dies, and wait until the dead queue has it."""
    job = fleet.send("act_kept", *steps, **options)
    end(fleet, job)
    eventually(lambda: job in ids(fleet), what="the dead letter")
    return job


@pytest.mark.requirement("DLQ-006")
def test_they_are_listed_and_found(fleet: Fleet) -> None:
    lemon = raises_its_number("lemon")
    first = bury(fleet, lemon, meta={"tenant": "acme"})
    second = bury(fleet, raises(DeadLetter, "card.stolen", "reported"))
    letters = fleet.bridge.broker_letters
    for _ in range(3):  # reading changes nothing
        assert ids(fleet) == [second, first]
    until = letters.get(second).discarded_at
    for kind in ({"error_type": "builtins.*"}, {"text": "LEMON"}, {"until": until}):
        assert ids(fleet, **kind) == [first], kind
    type_ = letters.get(first).type
    assert type_.endswith("act_kept")
    assert (ids(fleet, type=type_), ids(fleet, type="other")) == ([second, first], [])
    assert (ids(fleet, queue=fleet.queue), ids(fleet, queue="other")) == ([second, first], [])
    page = letters.list(limit=1)
    assert [letter.id for letter in page.letters] == [second]
    last = letters.list(limit=1, cursor=page.next_cursor)
    assert ([letter.id for letter in last.letters], last.next_cursor) == ([first], None)
    letter = letters.get(first)
    assert (letter.queue, letter.framework) == (fleet.queue, fleet.framework)
    assert (letter.attempt, letter.max_attempts, letter.cause) == (2, 2, "exhausted")
    assert [entry["message"] for entry in letter.errors] == ["lemon 1", "lemon 2"]
    assert letter.reading.args[-1] == lemon
    assert letter.reading.meta == {"tenant": "acme"}
    assert "found in the broker's dead queue" in letter.reason
    assert (letters.get(second).cause, letters.get(second).error_type) == ("handler", "card.stolen")


@pytest.mark.requirement("DLQ-003", "RET-17")
def test_they_are_replayed(fleet: Fleet) -> None:
    plain = bury(fleet, raises(OSError, "one"), raises(OSError, "two"), "ok")
    letters = fleet.bridge.broker_letters
    assert letters.replay(plain).replay_count == 1
    assert end(fleet, plain, nth=2).type == "job.completed"
    assert ids(fleet) == []
    assert [run.attempt for run in fleet.runs(plain)] == [1, 2, 1]
    state = fleet.runs(plain)[2].ojs
    assert ([error["message"] for error in state["errors"]], state["replay_count"]) == (["one", "two"], 1)
    # The operator's process tells of the replay, another one may tell of its end before.
    eventually(lambda: "dead_letter.retried" in [event.type for event in fleet.events(plain)])


@pytest.mark.requirement("DLQ-R002")
def test_a_replay_may_change_arguments_and_policy(fleet: Fleet) -> None:
    job = bury(fleet, raises(OSError, "bad"), policy=ONCE)
    letters = fleet.bridge.broker_letters
    args = [*letters.get(job).reading.args[:-1], raises(OSError, "good")]
    again = letters.replay(job, args=args, meta={"tenant": "t"}, retry={"max_attempts": 3})
    assert again.retry == {"max_attempts": 3}
    end(fleet, job, nth=2)
    assert [run.attempt for run in fleet.runs(job)] == [1, 1, 2, 3]
    eventually(lambda: ids(fleet) == [job], what="the dead letter")
    # On Redis Dramatiq moves the message first, and the adapter then writes the final state over it.
    whole = ["bad", "good", "good", "good"]
    eventually(lambda: [entry["message"] for entry in letters.get(job).errors] == whole, what="every error")
    letter = letters.get(job)
    assert letter.reading.meta["tenant"] == "t"


def test_they_are_deleted(fleet: Fleet) -> None:
    jobs = [bury(fleet, raises(OSError), policy=ONCE) for _ in range(3)]
    letters = fleet.bridge.broker_letters
    letters.delete(jobs[1])
    assert ids(fleet) == [jobs[2], jobs[0]]
    for use, gone in itertools.product((letters.get, letters.replay, letters.delete), (jobs[1], "never-was")):
        with pytest.raises(LetterNotFound, match=f"there is no dead letter .*{gone}"):
            use(gone)
    eventually(lambda: fleet.events(jobs[1])[-1].type == "dead_letter.deleted", what="the event of the end")


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_many_operators_publish_each_letter_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """On a slow broker, too."""
    monkeypatch.setattr(adapters.dead_queues, "PATIENCE", 30.0)
    slow = Slow(fleet.bridge.engine.context.publishers[fleet.framework], seconds)
    monkeypatch.setitem(fleet.bridge.engine.context.publishers, fleet.framework, slow)
    jobs = [bury(fleet, raises(OSError), "ok", policy=ONCE) for _ in range(6)]
    together = threading.Barrier(4)

    def replay() -> list[str]:
        done = []
        for job in jobs:
            together.wait(90)
            with suppress(LetterNotFound):
                done.append(fleet.bridge.broker_letters.replay(job).id)
        return done

    with ThreadPoolExecutor(4) as pool:
        replayed = [job for each in [pool.submit(replay) for _ in range(4)] for job in each.result()]
    assert sorted(replayed) == sorted(jobs)
    assert {end(fleet, job, nth=2).type for job in jobs} == {"job.completed"}
    assert [len(fleet.runs(job)) for job in jobs] == [2] * 6
    assert ids(fleet) == []


class Slow:
    """A publisher whose broker takes so many seconds."""

    def __init__(self, publisher: Any, seconds: float) -> None:
        self.knows, self._publisher, self._seconds = publisher.knows, publisher, seconds

    def republish(self, *letter: Any) -> None:
        """Wait, and publish."""
        time.sleep(self._seconds)
        self._publisher.republish(*letter)


class Down:
    """A publisher whose broker is away."""

    def knows(self, type_: str) -> bool:
        """Know every task."""
        return True

    def republish(self, *letter: Any) -> None:
        """Fail."""
        raise Unreachable("down")


def test_one_that_cannot_be_published_stays_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [bury(fleet, raises(OSError), "ok", policy=ONCE) for _ in range(2)]
    letters = fleet.bridge.broker_letters
    before = letters.list().letters
    with monkeypatch.context() as patched:
        patched.setitem(fleet.bridge.engine.context.publishers, fleet.framework, Down())
        with pytest.raises(Unreachable, match="down"):
            letters.replay(jobs[0])
        assert letters.list().letters == before
    letters.replay(jobs[0])
    assert end(fleet, jobs[0], nth=2).type == "job.completed"
    assert ids(fleet) == [jobs[1]]


@pytest.mark.parametrize("kind", FLEETS)
def test_they_are_there_too_if_a_store_fails(made: Callable[..., Fleet], kind: str) -> None:
    """No attempt is repeated where the bridge fails open, though the history has no room in the header."""
    fleet = made(kind, store="sqlite:////nowhere/at/all.db", fail_open=True, insist=1)
    fleet.start()
    job = fleet.send("act_kept", raises(OSError))
    long = fleet.send("act_kept", raises(OSError), policy={"max_attempts": 13, "max_interval": "PT0.1S"})
    for each in (job, long):
        end(fleet, each)
    eventually(lambda: fleet.dead() == {job, long}, what="the dead letters")
    assert [len(fleet.runs(each)) for each in (job, long)] == [2, 13]
    (letter,) = (letter for letter in fleet.bridge.broker_letters.list().letters if letter.id == long)
    assert [error["attempt"] for error in letter.errors] == list(range(4, 14))
    for said in ("until the store works, dead letters go to", "kept in the broker's dead queue, not in the"):
        assert said in fleet.worker.log


@pytest.mark.parametrize(
    ("kind", "suffix"), [("celery-rabbitmq", "dead"), ("dramatiq-rabbitmq", "XQ")], ids=["celery", "dramatiq"]
)
def test_a_dead_queue_is_used_as_it_is_and_declared_again_when_it_is_gone(
    made: Callable[..., Fleet], kind: str, suffix: str
) -> None:
    """RabbitMQ refuses to declare a queue that exists with other arguments."""
    fleet = made(kind, store=None)
    name = f"{fleet.queue}.{suffix}"
    with pika.BlockingConnection(pika.URLParameters(fleet.settings.broker)) as connection:
        channel = connection.channel()
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", "x-max-length": 99})
        fleet.start()
        first = bury(fleet, raises(OSError), policy=ONCE)
        assert ids(fleet) == [first]
        channel.queue_delete(name)
        second = bury(fleet, raises(OSError), policy=ONCE)
        assert ids(fleet) == [second]
        fleet.bridge.broker_letters.replay(second)
        end(fleet, second, nth=2)
