"""The operator's view of dead letters: list, get, retry, delete, stats."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, ConfigurationError, Event, Letter, LetterNotFound
from ojs_bridge.engine.runs import Override
from ojs_bridge.rules.decision import DeadLettered
from ojs_bridge.rules.job import Header
from tests.lives import FRAMEWORK, KEEP, Outbox, attempt, bridge_with_outbox, delivered, live_and_die
from tests.on_dramatiq.fleet import Fleet
from tests.servers import eventually


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of an empty store."""
    return f"sqlite:///{tmp_path}/ojs.db"


@pytest.fixture
def bridge(store: str) -> Bridge:
    """A bridge that serves one framework."""
    return bridge_with_outbox(store)[0]


def outbox(bridge: Bridge) -> Outbox:
    """Return the publisher of that framework, which keeps its messages."""
    publisher = bridge.engine.context.publishers[FRAMEWORK]
    assert isinstance(publisher, Outbox)
    return publisher


USES: dict[str, Callable[[Bridge], object]] = {
    "list": lambda bridge: bridge.dead_letters.list(),
    "get": lambda bridge: bridge.dead_letters.get("j-1"),
    "replay": lambda bridge: bridge.dead_letters.replay("j-1"),
    "delete": lambda bridge: bridge.dead_letters.delete("j-1"),
    "stats": lambda bridge: bridge.dead_letters.stats(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_without_a_store(use: Callable[[Bridge], object]) -> None:
    """The error says how to have a store."""
    with pytest.raises(ConfigurationError) as error:
        use(Bridge())
    assert str(error.value) == (
        "dead letters need a store: Bridge(store='sqlite:///ojs.db'), or OJS_BRIDGE_STORE"
    )


@pytest.mark.parametrize("name", ["get", "replay", "delete"])
def test_an_unknown_id(bridge: Bridge, name: str) -> None:
    """The error names the id, without the quotes of a KeyError."""
    with pytest.raises(LetterNotFound) as error:
        USES[name](bridge)
    assert str(error.value) == "there is no dead letter 'j-1'"


@pytest.mark.requirement("DLQ-001")
def test_the_letters_of_one_job_id(url: str) -> None:
    """The id of the job finds the only letter; where there are several, the error names them."""
    bridge, publisher = bridge_with_outbox(url)
    for chain in ("a", "b"):
        live_and_die(bridge, "j-1", chain, state=json.dumps({"v": 1, "attempt": 1, "chain": chain}))
    with pytest.raises(LetterNotFound, match=r"^job 'j-1' has more dead letters than one: j-1~a and j-1~b$"):
        bridge.dead_letters.get("j-1")
    bridge.dead_letters.delete("j-1~a")
    letter = bridge.dead_letters.get("j-1")
    assert (letter.id, letter.job_id) == ("j-1~b", "j-1")
    assert bridge.dead_letters.replay_all(confirm=True).succeeded == 1
    ((_, header),) = publisher.published
    assert (header.job.id, header.job.chain, bridge.dead_letters.list().letters) == ("j-1", "b", ())


@pytest.mark.requirement("DLQ-001")
def test_a_job_under_the_id_of_one_that_is_forgotten_has_a_letter_of_its_own(url: str) -> None:
    """As a job of each day may have: the store knows the run of yesterday's no more."""
    bridge, publisher = bridge_with_outbox(url)
    for message in ("first", "second"):
        live_and_die(bridge, "j-1", message)
    second, first = bridge.dead_letters.list().letters
    assert (first.id, second.job_id, second.id[:4]) == ("j-1", "j-1", "j-1~")
    assert [letter.errors[0]["message"] for letter in (first, second)] == ["first 1", "second 1"]
    assert bridge.dead_letters.replay(second.id).id == "j-1"
    ((_, header),) = publisher.published
    live_and_die(bridge, "j-1", "third", state=header.text)
    third, again = bridge.dead_letters.list().letters
    assert (again, third.job_id) == (first, "j-1")
    assert [entry["message"] for entry in third.errors][::3] == ["second 1", "third 1"]
    bridge.dead_letters.delete("j-1")
    assert bridge.dead_letters.get("j-1") == third


@pytest.mark.requirement("DLQ-001")
def test_two_such_jobs_that_die_at_the_same_time_have_two_letters(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": 1})
    live_and_die(bridge, "j-1", "first")
    dying = [attempt(bridge, delivered("j-1")[0], ConnectionError(word)) for word in ("second", "third")]
    now = bridge.engine.now()
    monkeypatch.setattr(bridge.engine, "now", lambda: now)
    for n, (job, run, decision) in enumerate(dying):
        assert isinstance(decision, DeadLettered)
        own = ({**job.errors[0], "timestamp": f"2026-11-20T10:00:0{n}.000Z"},)
        bridge.engine.storing.bury(run, job._replace(errors=own), decision, FRAMEWORK, {"args": [n]})
    found = {letter.errors[0]["message"] for letter in bridge.dead_letters.list().letters}
    assert found == {"first 1", "second", "third"}


@pytest.mark.requirement("DLQ-002")
def test_a_history_is_completed_from_an_earlier_letter_of_the_same_job_only(url: str, tmp_path: Path) -> None:
    """Its last delivery came again, and the store has no more what the header has no room for."""
    policy = {**KEEP, "max_attempts": 15}
    bridge, _ = bridge_with_outbox(url, retry=policy)

    def die_again(last: str, message: str) -> list[str]:
        job, run, decision = attempt(bridge, delivered("j-1", 15, last)[0], ConnectionError(message))
        assert isinstance(decision, DeadLettered)
        bridge.engine.storing.bury(run, job, decision, FRAMEWORK, {"args": ["j-1"]})
        return [str(entry["message"]) for entry in bridge.dead_letters.list().letters[0].errors]

    last = live_and_die(bridge, "j-1", "first")
    assert die_again(last, "first 15") == [f"first {n}" for n in range(1, 16)]
    elsewhere, _ = bridge_with_outbox(f"sqlite:///{tmp_path}/other.db", retry=policy)
    last = live_and_die(elsewhere, "j-1", "second")
    assert die_again(last, "second 15") == [f"second {n}" for n in range(5, 16)]


@pytest.mark.requirement("DLQ-001")
def test_an_exhausted_job_is_a_dead_letter(bridge: Bridge) -> None:
    """The letter has the job's final state."""
    live_and_die(bridge, "j-1")
    letter = bridge.dead_letters.get("j-1")
    assert (letter.type, letter.queue, letter.framework) == ("billing.charge", "default", FRAMEWORK)
    assert (letter.attempt, letter.max_attempts, letter.cause) == (3, 3, "exhausted")
    assert letter.reason == "attempt 3 of 3 failed with builtins.ConnectionError, and no attempt is left"
    assert letter.message == {"args": ["j-1"]}
    assert letter.policy is not None
    assert (letter.policy["max_attempts"], letter.policy["initial_interval"]) == (3, "PT1S")
    assert [entry["message"] for entry in letter.errors] == ["down 1", "down 2", "down 3"]


@pytest.mark.requirement("DLQ-006")
def test_list_and_stats(bridge: Bridge) -> None:
    """A list has pages, the newest letter first; the counts are right."""
    for n in range(5):
        live_and_die(bridge, f"j-{n}")
    first = bridge.dead_letters.list(limit=3, type="billing.*", queue="default")
    rest = bridge.dead_letters.list(limit=3, error_type="builtins.*", cursor=first.next_cursor)
    assert [letter.id for letter in (*first.letters, *rest.letters)] == [f"j-{n}" for n in (4, 3, 2, 1, 0)]
    assert rest.next_cursor is None
    assert bridge.dead_letters.list(queue="another").letters == ()
    stats = bridge.dead_letters.stats()
    assert (stats.total, stats.by_error_type) == (5, {"builtins.ConnectionError": 5})


@pytest.mark.parametrize("limit", [0, -1, 1001, "5", None, 2.0])
def test_a_limit_out_of_range(bridge: Bridge, limit: Any) -> None:
    """The error names the limit, and the range."""
    with pytest.raises(ValueError, match=r"^limit: .* must be between 1 and 1000$"):
        bridge.dead_letters.list(limit=limit)


@pytest.mark.requirement("DLQ-003")
def test_a_replay(bridge: Bridge) -> None:
    """The job keeps its id and its history and gets fresh attempts; the letter is gone."""
    live_and_die(bridge, "j-1")
    letter = bridge.dead_letters.get("j-1")
    job = bridge.dead_letters.replay("j-1")
    assert (job.id, job.attempt, job.replay_count, job.next_retry_at) == ("j-1", 1, 1, None)
    assert job.errors == letter.errors
    [(published, header)] = outbox(bridge).published
    assert published == letter
    assert header.state["attempt"] == 1
    assert header.state["replay_count"] == 1
    assert header.state["errors"] == list(letter.errors)
    with pytest.raises(LetterNotFound):
        bridge.dead_letters.get("j-1")


@pytest.mark.requirement("DLQ-003")
@pytest.mark.parametrize("raises", [ConnectionError("no broker"), KeyboardInterrupt()])
def test_a_replay_that_cannot_be_published(bridge: Bridge, raises: BaseException) -> None:
    """The letter stays as it was, and can be replayed at once."""
    live_and_die(bridge, "j-1")
    letter = bridge.dead_letters.get("j-1")
    outbox(bridge).raises = raises
    with pytest.raises(type(raises)):
        bridge.dead_letters.replay("j-1")
    assert bridge.dead_letters.get("j-1") == letter
    outbox(bridge).raises = None
    assert bridge.dead_letters.replay("j-1").replay_count == 1


class Slow(Outbox):
    """A publisher that stays in the middle of publishing until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.go = threading.Event(), threading.Event()

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish, slowly."""
        self.busy.set()
        assert self.go.wait(90)
        super().republish(letter, header, override)


@pytest.mark.requirement("DLQ-003")
@pytest.mark.parametrize("name", ["replay", "delete"])
def test_while_one_replays_another_cannot(bridge: Bridge, name: str) -> None:
    """A second replay, and a deletion, are refused; the message is published once."""
    live_and_die(bridge, "j-1")
    slow = bridge.engine.context.publishers[FRAMEWORK] = Slow()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bridge.dead_letters.replay, "j-1")
        assert slow.busy.wait(90)
        with pytest.raises(LetterNotFound, match=r"^dead letter 'j-1' is being replayed, or is gone$"):
            USES[name](bridge)
        slow.go.set()
        assert first.result(90).id == "j-1"
    assert len(slow.published) == 1


class Doomed(Outbox):
    """A publisher whose job has died again before it returns."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.bridge = bridge

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish, and let the job die at once."""
        super().republish(letter, header, override)
        live_and_die(self.bridge, letter.id, "again", state=header.text)


@pytest.mark.requirement("DLQ-003")
def test_a_job_that_dies_again_at_once_is_not_lost(bridge: Bridge) -> None:
    """The new letter of the job stays."""
    live_and_die(bridge, "j-1")
    bridge.engine.context.publishers[FRAMEWORK] = Doomed(bridge)
    bridge.dead_letters.replay("j-1")
    letter = bridge.dead_letters.get("j-1")
    assert (letter.replay_count, len(letter.errors)) == (1, 6)


LARGE = "é" * 1000


@pytest.mark.requirement("DLQ-002", "DLQ-003")
@pytest.mark.parametrize("message", ["down", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("options", [{}, {"history": 12, "header_budget": 8192}], ids=["default", "own"])
def test_the_whole_history_through_three_lives(store: str, message: str, options: dict[str, Any]) -> None:
    """The job fails thirty times in each life, more often than the header has room for."""
    bridge, box = bridge_with_outbox(store, retry={**KEEP, "max_attempts": 30}, **options)
    live_and_die(bridge, "j-1", message)
    for replay in (1, 2):
        assert bridge.dead_letters.replay("j-1").replay_count == replay
        _, header = box.published[-1]
        assert len(header.text) <= options.get("header_budget", 16 * 1024)
        live_and_die(bridge, "j-1", message, state=header.text)
    errors = bridge.dead_letters.get("j-1").errors
    numbered = [(error.get("replay", 0), error["attempt"]) for error in errors]
    assert numbered == [(replay, n) for replay in range(3) for n in range(1, 31)]
    assert [error["message"] for error in errors] == [f"{message} {n}" for n in [*range(1, 31)] * 3]
    assert not any("cut" in error for error in errors)


@pytest.mark.requirement("DLQ-002")
def test_a_replay_that_failed_does_not_spoil_the_history(store: str) -> None:
    """The entries that the replay kept for its header are kept again."""
    bridge, box = bridge_with_outbox(store, retry={**KEEP, "max_attempts": 15})
    live_and_die(bridge, "j-1")
    box.raises = ConnectionError("no broker")
    with pytest.raises(ConnectionError):
        bridge.dead_letters.replay("j-1")
    box.raises = None
    bridge.dead_letters.replay("j-1")
    live_and_die(bridge, "j-1", state=box.published[0][1].text)
    assert len(bridge.dead_letters.get("j-1").errors) == 30


def test_a_deleted_letter_leaves_nothing(store: str) -> None:
    """The letter and the kept errors are gone."""
    bridge, box = bridge_with_outbox(store, retry={**KEEP, "max_attempts": 15})
    live_and_die(bridge, "j-1")
    box.raises = ConnectionError("no broker")
    with pytest.raises(ConnectionError):
        bridge.dead_letters.replay("j-1")
    bridge.dead_letters.delete("j-1")
    assert bridge.store is not None
    assert bridge.store.letters.kept_errors("j-1") == []
    assert bridge.dead_letters.list().letters == ()


def test_events(store: str) -> None:
    """A letter is added, retried and deleted; each event has the job's type and queue."""
    heard: list[Event] = []
    bridge, _ = bridge_with_outbox(store, listeners=[heard.append])
    live_and_die(bridge, "j-1")
    live_and_die(bridge, "j-2")
    bridge.dead_letters.replay("j-1")
    bridge.dead_letters.delete("j-2")
    assert bridge.flush(30)
    known = {"job_type": "billing.charge", "queue": "default"}
    assert [(e.type, e.subject, e.data) for e in heard if e.type.startswith("dead_letter.")] == [
        ("dead_letter.added", "j-1", known),
        ("dead_letter.added", "j-2", known),
        ("dead_letter.retried", "j-1", {**known, "replay_count": 1}),
        ("dead_letter.deleted", "j-2", known),
    ]


@pytest.mark.requirement("DLQ-002", "DLQ-003")
def test_from_end_to_end(store: str, unique: str) -> None:
    """A Dramatiq job fails thirty times, is replayed, fails thirty times more, is replayed, and succeeds."""
    fleet = Fleet(StubBroker(), unique, store=store)

    def fails_sixty_times(n: int) -> None:
        if n <= 60:
            raise ConnectionError(f"down {n}")

    quick = {"max_attempts": 30, "initial_interval": "PT0.001S", "max_interval": "PT0.001S", **KEEP}
    job = fleet.send(fleet.actor(fails_sixty_times, ojs_retry=quick))
    with fleet.working(threads=2, timeout=5):
        for nth in (1, 2):
            fleet.end(job, nth=nth, seconds=50)
            eventually(lambda nth=nth: len(fleet.bridge.dead_letters.get(job.id).errors) == 30 * nth)  # type: ignore[misc]
            letter = fleet.bridge.dead_letters.get(job.id)
            fleet.bridge.dead_letters.replay(job.id)
        assert fleet.end(job, nth=3).type == "job.completed"
    assert [(e.get("replay"), e["attempt"]) for e in letter.errors] == [
        *((None, n) for n in range(1, 31)),
        *((1, n) for n in range(1, 31)),
    ]
    assert [e["message"] for e in letter.errors] == [f"down {n}" for n in range(1, 61)]
    assert fleet.bridge.store is not None
    eventually(lambda: fleet.bridge.store.letters.kept_errors(job.id) == [])
