"""The brokers' dead queues have in common: pages, redaction, and refusals."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy, Letter, LetterNotFound
from ojs_bridge.dramatiq.translate import restored
from tests.lives import bridge_with_outbox, live_and_die
from tests.on_dramatiq.fleet import Fleet, Sent
from tests.servers import eventually

ONCE = {"max_attempts": 1, "on_exhaustion": "dead_letter"}


@pytest.fixture
def stub() -> StubBroker:
    """A fresh StubBroker."""
    return StubBroker()


def charge(n: int, user: str, *, password: str) -> None:
    """Fail, and tell a secret."""
    raise OSError(f"{user} has no {password}")


def bury(fleet: Fleet, *users: str) -> list[Sent]:
    """Have jobs die one after the other."""
    actor = fleet.actor(lambda n, user, secret: charge(n, user, password=secret), ojs_retry=ONCE)
    jobs = []
    with fleet.working(threads=1):
        for user in users:
            jobs.append(fleet.send(actor, user, "sesame"))
            eventually(lambda: fleet.dead(jobs[-1]))
            time.sleep(0.002)  # so that no two die in one millisecond
    return jobs


def listed(bridge: Bridge, **kind: Any) -> list[str]:
    """The ids of a page."""
    return [letter.id for letter in bridge.broker_letters.list(**kind).letters]


USES: dict[str, Callable[[Bridge], object]] = {
    "list": lambda bridge: bridge.broker_letters.list(),
    "get": lambda bridge: bridge.broker_letters.get("j-1"),
    "replay": lambda bridge: bridge.broker_letters.replay("j-1"),
    "delete": lambda bridge: bridge.broker_letters.delete("j-1"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_without_an_app_or_a_broker(use: Callable[[Bridge], object]) -> None:
    """The error says which module to import."""
    with pytest.raises(ConfigurationError, match="given the bridge to none: import the module that does"):
        use(Bridge())


@pytest.mark.parametrize("name", ["get", "replay", "delete"])
def test_one_that_is_not_there(stub: StubBroker, unique: str, name: str) -> None:
    """The error is a LetterNotFound, as with a store."""
    bridge = Fleet(stub, unique).bridge
    stub.declare_queue(unique)
    with pytest.raises(LetterNotFound, match=r"^there is no dead letter 'j-1' in the brokers' dead queues$"):
        getattr(bridge.broker_letters, name)("j-1")


@pytest.mark.requirement("DLQ-R005")
def test_pages_do_not_shift(stub: StubBroker, unique: str) -> None:
    """Letters that come or go meanwhile change nothing on the next pages."""
    fleet = Fleet(stub, unique)
    jobs = bury(fleet, "a", "b", "c", "d", "e")
    newest = [job.id for job in reversed(jobs)]
    letters = fleet.bridge.broker_letters
    first = letters.list(limit=2)
    assert [letter.id for letter in first.letters] == newest[:2]
    (late,) = bury(fleet, "f")
    letters.delete(newest[1])
    second = letters.list(limit=2, cursor=first.next_cursor)
    assert [letter.id for letter in second.letters] == newest[2:4]
    third = letters.list(limit=2, cursor=second.next_cursor)
    assert ([letter.id for letter in third.letters], third.next_cursor) == (newest[4:], None)
    assert listed(fleet.bridge, limit=1) == [late.id]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"limit": 0}, "limit: 0 must be between 1 and 1000"),
        ({"cursor": "x"}, "cursor: 'x' was returned by no page"),
        ({"since": datetime(2026, 1, 1)}, "since: .* must be a time with a zone"),
    ],
)
def test_what_cannot_be_asked(stub: StubBroker, unique: str, asked: dict[str, Any], told: str) -> None:
    """The error is a ValueError, as with a store."""
    with pytest.raises(ValueError, match=told):
        Fleet(stub, unique).bridge.broker_letters.list(**asked)


def test_secrets_stay_hidden(stub: StubBroker, unique: str) -> None:
    """Secrets are hidden in arguments, errors and searches; the replayed message has them."""
    fleet = Fleet(stub, unique, redact=lambda name, value: "***" if value == "sesame" else value)
    (job,) = bury(fleet, "ann")
    shown: Letter = fleet.bridge.broker_letters.get(job.id)
    assert "sesame" not in str(shown)
    assert shown.errors[0]["message"] == "ann has no [redacted]"
    assert "sesame" not in str(fleet.bridge.broker_letters.list())
    assert (listed(fleet.bridge, text="sesame"), listed(fleet.bridge, text="ann")) == ([], [job.id])
    (whole,) = fleet.bridge.engine.context.dead_queues["dramatiq"].read(1)
    assert "sesame" in restored(whole.message).args
    fleet.bridge.broker_letters.replay(job.id)
    with fleet.working():
        fleet.end(job, nth=2)
    assert len(job.runs) == 2


class CtrlC(dramatiq.Middleware):
    """Presses Ctrl-C when a message was sent."""

    def after_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        """Press it."""
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_when_the_message_was_sent(stub: StubBroker, unique: str) -> None:
    """The letter leaves its queue and its replay is told before the Ctrl-C is heard."""
    fleet = Fleet(stub, unique)
    (job,) = bury(fleet, "ann")
    stub.add_middleware(CtrlC())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fleet.bridge.broker_letters.replay(job.id)
    finally:
        signal.signal(signal.SIGINT, before)
    assert listed(fleet.bridge) == []
    eventually(lambda: "dead_letter.retried" in fleet.heard.types(job.id), what="the event")


def test_a_replay_with_what_no_job_can_have(stub: StubBroker, unique: str) -> None:
    """The replay is refused before a letter is claimed, and the letter stays."""
    fleet = Fleet(stub, unique)
    (job,) = bury(fleet, "ann")
    letters = fleet.bridge.broker_letters
    for override in ({"args": "x"}, {"queue": ""}, {"meta": {"ojs": 1}}):
        with pytest.raises(ValueError, match=next(iter(override))):
            letters.replay(job.id, **override)  # type: ignore[arg-type]
    with pytest.raises(InvalidRetryPolicy):
        letters.replay(job.id, retry={"max_attempts": -1})
    assert listed(fleet.bridge) == [job.id]


def test_one_whose_state_nobody_can_read(stub: StubBroker, unique: str) -> None:
    """The list shows the letter as it is, and its replay starts afresh."""
    fleet = Fleet(stub, unique)
    job = fleet.send(fleet.actor(lambda n: None), ojs={"v": 99})
    with fleet.working():
        eventually(lambda: fleet.dead(job))
    letter = fleet.bridge.broker_letters.get(job.id)
    assert letter.cause == "invalid"
    assert "version 99" in str(letter.errors)
    fleet.bridge.broker_letters.replay(job.id)
    with fleet.working():
        assert fleet.end(job, nth=2).type == "job.completed"


def test_what_the_store_has_is_not_among_them(stub: StubBroker, unique: str, tmp_path: Any) -> None:
    """Each letter is listed in the place that holds it."""
    fleet = Fleet(stub, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    stub.declare_queue(unique)
    bridge, _ = bridge_with_outbox(f"sqlite:///{tmp_path}/ojs.db")
    live_and_die(bridge, "j-1")
    assert [letter.id for letter in fleet.bridge.dead_letters.list().letters] == ["j-1"]
    assert listed(fleet.bridge) == []
