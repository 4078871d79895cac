"""Operators look for many dead letters, replay, purge and export them, with secrets hidden."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, Event, InvalidRetryPolicy, Letter, LetterNotFound
from ojs_bridge.engine.runs import Override
from ojs_bridge.errors import StoreError, Unreachable, Unstorable
from ojs_bridge.messages import read_message
from ojs_bridge.operations import letters
from ojs_bridge.rules.job import Header
from ojs_bridge.store import Parked, to_json
from tests.lives import FRAMEWORK, KEEP, Outbox, bridge_with_outbox
from tests.servers import eventually
from tests.store.conftest import run
from tests.store.test_store import NOW, entry, letter

Lives = tuple[Bridge, Outbox]


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


def bury(bridge: Bridge, letter_id: str, **fields: Any) -> Letter:
    """Bury a letter of the outbox, a moment old."""
    assert bridge.store is not None
    fields = {"discarded_at": bridge.engine.now() - timedelta(seconds=60), "framework": FRAMEWORK, **fields}
    found = letter(letter_id, **fields)
    bridge.store.letters.bury(found)
    return found


def celery_message(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """A message as the Celery adapter keeps it."""
    return {
        "body": json.dumps([args, kwargs, {"callbacks": None}]),
        "body_encoding": "utf-8",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"id": "j-1", "task": "t", "argsrepr": "(…)", "tenant": "acme", "ojs": "{}"},
        "parameters": ["user", "password"],
    }


def dramatiq_message(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """A message as the Dramatiq adapter keeps it."""
    told = {"args": args, "kwargs": kwargs, "options": {"retries": 3, "tenant": "acme"}}
    return {"encoded": json.dumps(told), "encoding": "utf-8"}


@pytest.mark.requirement("DLQ-R001")
def test_many_are_counted_and_then_replayed(fleet: Lives) -> None:
    """The replay takes the letters of a kind, the oldest first; the count before changes nothing."""
    bridge, outbox = fleet
    now = bridge.engine.now()  # the same for all, or a pause between two would change their order
    for n in range(450):
        bury(bridge, f"j-{n}", type="a" if n % 3 else "b", discarded_at=now - timedelta(seconds=n))
    found = bridge.dead_letters.replay_all(type="a")
    assert (found.matched, found.succeeded, found.confirmed) == (300, 0, False)
    assert outbox.published == []
    seen: list[int] = []
    done = bridge.dead_letters.replay_all(type="a", confirm=True, progress=seen.append)
    assert (done.matched, done.succeeded, done.failed, done.confirmed) == (300, 300, 0, True)
    assert seen[-1] == 300
    assert seen == sorted(seen)
    published = [sent.id for sent, _ in outbox.published]
    assert published == [f"j-{n}" for n in reversed(range(450)) if n % 3]
    assert bridge.dead_letters.stats().by_type == {"b": 150}


@pytest.mark.requirement("DLQ-R001")
def test_those_that_cannot_be_replayed_stay_and_are_told(fleet: Lives) -> None:
    """Letters that fail, are held, or belong to another framework or an unknown task stay; the rest go."""
    bridge, outbox = fleet
    for name in ("good", "bad", "held"):
        bury(bridge, name)
    bury(bridge, "foreign", framework="elsewhere")
    bury(bridge, "stranger", type="gone")
    outbox.refuses = {"bad": TypeError("no such thing")}
    outbox.strangers = {"gone"}
    assert bridge.store is not None
    bridge.store.letters.claim(["held"], now=bridge.engine.now(), seconds=60)
    done = bridge.dead_letters.replay_all(confirm=True)
    assert (done.matched, done.succeeded, done.failed) == (5, 1, 4)
    told = dict(done.errors)
    assert told["bad"] == "no such thing"
    assert told["held"] == "it is being replayed, or is gone"
    assert told["foreign"].startswith("dead letter 'foreign' belongs to elsewhere, and this process has")
    assert told["stranger"] == (
        "dead letter 'stranger' is a 'gone', which outbox here does not know: it would only die again"
    )
    assert [sent.id for sent, _ in outbox.published] == ["good"]
    outbox.refuses, outbox.strangers = {}, set()
    assert bridge.dead_letters.replay("bad").id == "bad"


@pytest.mark.requirement("DLQ-R001")
def test_a_broker_that_is_down_ends_it_and_loses_nothing(fleet: Lives) -> None:
    """The published letters are gone from the store, the rest are there and free."""
    bridge, outbox = fleet
    for n in range(6):
        bury(bridge, f"j-{n}", discarded_at=bridge.engine.now() - timedelta(seconds=60 - n))
    outbox.refuses = {"j-3": Unreachable("down")}
    with pytest.raises(Unreachable):
        bridge.dead_letters.replay_all(confirm=True)
    assert [sent.id for sent, _ in outbox.published] == ["j-0", "j-1", "j-2"]
    outbox.refuses = {}
    assert bridge.dead_letters.replay_all(confirm=True).succeeded == 3
    assert bridge.dead_letters.stats().total == 0


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_a_store_that_fails_once_the_message_was_sent(
    fleet: Lives, monkeypatch: pytest.MonkeyPatch, *, many: bool
) -> None:
    """The bridge insists: a letter that stayed would be replayed, and its job run, once more."""
    bridge, outbox = fleet
    bury(bridge, "j-1")
    assert bridge.store is not None
    delete, failures = bridge.store.letters.delete, [StoreError("away for a moment")]

    def failing(letter_ids: Sequence[str], claim: int) -> int:
        if failures:
            raise failures.pop()
        return delete(letter_ids, claim)

    monkeypatch.setattr(bridge.store.letters, "delete", failing)
    if many:
        bridge.dead_letters.replay_all(confirm=True)
    else:
        bridge.dead_letters.replay("j-1")
    assert [sent.id for sent, _ in outbox.published] == ["j-1"]
    assert bridge.dead_letters.stats().total == 0


@dataclass
class Ledger(Outbox):
    """A publisher that notes on disk each letter that it has published, before another process can know."""

    path: str = ""
    noted: int = 0

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Note a letter's id, and publish no more than half of them: the killing test may be slow."""
        with Path(self.path).open("a") as file:
            file.write(f"{letter.id}\n")
        self.noted += 1
        if self.noted == 150:
            signal.pause()


def replay_until_killed(url: str, path: str) -> None:
    """Replay all letters."""
    bridge = Bridge(url, KEEP)
    bridge.engine.context.publishers[FRAMEWORK] = Ledger(path=path)
    bridge.dead_letters.replay_all(confirm=True, rate=200)


@pytest.mark.requirement("DLQ-R001")
def test_a_bulk_replay_that_is_killed_loses_nothing(url: str, tmp_path: Path) -> None:
    """Every letter is published or still there; the rest can be replayed when the claim has ended."""
    bridge, ledger = Bridge(url), tmp_path / "published"
    names = {f"j-{n}" for n in range(300)}
    for name in names:
        bury(bridge, name)
    ledger.touch()
    process = get_context("spawn").Process(target=replay_until_killed, args=(url, str(ledger)))
    process.start()
    eventually(lambda: len(ledger.read_text().split()) >= 120, seconds=80)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(90)
    published = ledger.read_text().split()
    left = {found.id for found in bridge.dead_letters.list(limit=1000).letters}
    assert len(published) == len({*published}) < len(names)
    assert {*published} | left == names
    assert bridge.store is not None
    later = bridge.engine.now() + timedelta(seconds=61)
    assert {found.id for found in bridge.store.letters.claim([*left], now=later, seconds=60).letters} == left


@pytest.mark.requirement("DLQ-R001")
def test_operators_who_replay_the_same_at_once_publish_each_once(url: str) -> None:
    """An operator is told of the letters that another operator has."""
    fleets = [bridge_with_outbox(url) for _ in range(4)]
    for n in range(120):
        bury(fleets[0][0], f"j-{n}")
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda one: one[0].dead_letters.replay_all(confirm=True), fleets))
    published = [sent.id for _, outbox in fleets for sent, _ in outbox.published]
    assert sorted(published) == sorted(f"j-{n}" for n in range(120))
    assert sum(one.succeeded for one in done) == 120
    assert fleets[0][0].dead_letters.stats().total == 0


def test_a_replay_that_outlasts_its_claim_claims_anew(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new claim keeps the letters from others; each is published once."""
    bridge, outbox = fleet
    for n in range(5):
        bury(bridge, f"j-{n}", discarded_at=bridge.engine.now() - timedelta(seconds=60 - n))
    monkeypatch.setattr("ojs_bridge.operations.replaying.CLAIM_SECONDS", 0.2)
    assert bridge.dead_letters.replay_all(confirm=True, rate=10).succeeded == 5
    assert [sent.id for sent, _ in outbox.published] == [f"j-{n}" for n in range(5)]


def test_a_slow_replay_claims_each_letter_when_its_time_has_come(
    fleet: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause between two letters may be longer than a claim: another operator gets neither of them."""
    bridge, outbox = fleet
    store, publish, others = bridge.store, outbox.republish, list[str]()
    assert store is not None
    for n in range(2):
        bury(bridge, f"j-{n}")

    def republish(letter: Letter, header: Header, override: Override) -> None:
        claimed = store.letters.claim([letter.id], now=bridge.engine.now(), seconds=60)
        others.extend(found.id for found in claimed.letters)
        publish(letter, header, override)

    monkeypatch.setattr(outbox, "republish", republish)
    monkeypatch.setattr("ojs_bridge.operations.replaying.CLAIM_SECONDS", 0.5)
    assert bridge.dead_letters.replay_all(confirm=True, rate=0.9).succeeded == 2
    assert others == []


def test_a_rate(fleet: Lives) -> None:
    """The replay publishes at most so many letters a second."""
    bridge, _ = fleet
    for n in range(6):
        bury(bridge, f"j-{n}")
    begun = time.monotonic()
    assert bridge.dead_letters.replay_all(confirm=True, rate=10).succeeded == 6
    assert time.monotonic() - begun >= 0.5
    for rate in (0, -1, "5", float("inf")):
        with pytest.raises(ValueError, match=r"^rate: .* must be a number of jobs a second above zero$"):
            bridge.dead_letters.replay_all(confirm=True, rate=rate)  # type: ignore[arg-type]


def test_what_dies_meanwhile_is_left_alone(fleet: Lives) -> None:
    """A job that dies again at once is not replayed for ever."""
    bridge, outbox = fleet
    bury(bridge, "j-1")
    again = bury(bridge, "later", discarded_at=NOW + timedelta(days=36500))
    assert bridge.dead_letters.replay_all(confirm=True).matched == 1
    assert [sent.id for sent, _ in outbox.published] == ["j-1"]
    assert bridge.dead_letters.get("later") == again


@pytest.mark.requirement("DLQ-R002")
def test_a_replay_with_overrides(fleet: Lives) -> None:
    """The publisher gets the overrides, and the header the policy; fields without an override stay."""
    bridge, outbox = fleet
    bury(bridge, "j-1", retry={"max_attempts": 4})
    job = bridge.dead_letters.replay(
        "j-1", queue="slow", args=[1], kwargs={"a": 2}, meta={"by": "me"}, retry={"initial_interval": "PT5S"}
    )
    assert job.queue == "slow"
    assert job.retry == {"max_attempts": 4, "initial_interval": "PT5S"}
    [override] = outbox.overrides
    assert (override.queue, override.args, override.kwargs, override.meta) == (
        "slow",
        [1],
        {"a": 2},
        {"by": "me"},
    )
    assert outbox.published[0][1].state["retry"] == job.retry


@pytest.mark.requirement("DLQ-R001", "DLQ-R002")
def test_many_with_overrides(fleet: Lives) -> None:
    """Each letter goes to the queue of its override; a wrong override is an error before the count."""
    bridge, outbox = fleet
    for n in range(3):
        bury(bridge, f"j-{n}", queue="q")
    changes = {"queue": "slow", "retry": {"max_attempts": 9}}
    assert bridge.dead_letters.replay_all(queue="q", confirm=True, override=changes).succeeded == 3
    assert {(o.queue, o.retry["max_attempts"]) for o in outbox.overrides} == {("slow", 9)}
    with pytest.raises(
        ValueError, match=r"^override: 'quue' is unknown; queue, args, kwargs, meta, retry, edits are"
    ):
        bridge.dead_letters.replay_all(override={"quue": "slow"})
    with pytest.raises(ValueError, match=r"^args: 7 must be a list$"):
        bridge.dead_letters.replay_all(override={"args": 7})


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ({"queue": ""}, "queue: '' must be the name of a queue"),
        ({"queue": 7}, "queue: 7 must be the name of a queue"),
        ({"args": "abc"}, "args: 'abc' must be a list"),
        ({"kwargs": [1]}, "kwargs: [1] must be an object with names"),
        ({"meta": {1: 2}}, "meta: {1: 2} must be an object with names"),
        ({"meta": {"retries": 2}}, "meta: 'retries' is the bridge's or the framework's own"),
    ],
)
def test_an_override_that_is_wrong(fleet: Lives, override: dict[str, Any], told: str) -> None:
    """The error names the override, and the letter stays."""
    bridge, outbox = fleet
    bury(bridge, "j-1")
    with pytest.raises(ValueError) as error:
        bridge.dead_letters.replay("j-1", **override)
    assert str(error.value) == told
    assert (outbox.published, bridge.dead_letters.stats().total) == ([], 1)


def test_an_override_of_the_policy_that_is_wrong(fleet: Lives) -> None:
    """The override is wrong by itself, or together with the job's own policy."""
    bridge, outbox = fleet
    bury(bridge, "j-1", retry={"max_interval": "PT1M"})
    for retry in ({"max_attempts": -1}, {"initial_interval": "PT5M"}):
        with pytest.raises(InvalidRetryPolicy):
            bridge.dead_letters.replay("j-1", retry=retry)
    assert (outbox.published, bridge.dead_letters.get("j-1").id) == ([], "j-1")


@pytest.mark.requirement("DLQ-006")
def test_a_text_in_arguments_or_messages(fleet: Lives) -> None:
    """Upper and lower case are alike, on messages of both frameworks; the cursor goes on after the page."""
    bridge, _ = fleet
    bury(bridge, "c", message=celery_message("Ä-17", order="x"))
    bury(bridge, "d", message=dramatiq_message("ä-17"))
    bury(bridge, "e", errors=(entry(1, message="lost Ä-17 somewhere"),))
    bury(bridge, "f", message=celery_message("b-18"))
    found = bridge.dead_letters.list(text="ä-17")
    assert sorted(one.id for one in found.letters) == ["c", "d", "e"]
    first = bridge.dead_letters.list(text="Ä-17", limit=2)
    rest = bridge.dead_letters.list(text="Ä-17", limit=2, cursor=first.next_cursor)
    assert sorted(one.id for one in (*first.letters, *rest.letters)) == ["c", "d", "e"]
    assert bridge.dead_letters.list(text="nowhere").letters == ()
    assert bridge.dead_letters.replay_all(text="17").matched == 3


def test_a_text_is_looked_for_in_so_many_letters(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that has looked through enough letters, or for long enough, ends with a cursor to go on."""
    bridge = Bridge(url)
    for n in range(2100):
        bury(bridge, f"j-{n}", discarded_at=NOW - timedelta(seconds=n), message={"args": [n]})
    first = bridge.dead_letters.list(text="2050")
    assert (first.letters, first.next_cursor is None) == ((), False)
    rest = bridge.dead_letters.list(text="2050", cursor=first.next_cursor)
    assert [one.id for one in rest.letters] == ["j-2050"]
    assert rest.next_cursor is None
    monkeypatch.setattr("ojs_bridge.operations.dead_letters.SEARCH_SECONDS", 0)
    pages = letters.every_page(lambda cursor: bridge.dead_letters.list(text="2050", cursor=cursor))
    assert [[one.id for one in page.letters] for page in pages] == [[], [], [], [], ["j-2050"]]


REDACTIONS = {
    "[redacted]": ["secret"],
    "****": lambda name, value: "****" if name == "secret" else value,
}


@pytest.mark.parametrize("shown", REDACTIONS)
def test_a_text_is_searched_as_it_is_shown(tmp_path: Path, shown: str) -> None:
    """A redacted letter says what stands in the place of the secret, and not the secret."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge, all_seeing = Bridge(url, redact=REDACTIONS[shown]), Bridge(url)
    message = {"args": [], "kwargs": {"secret": "hunter22", "user": "ann"}, "options": {}}
    errors = (entry(1, message="no password like hunter22"),)
    bury(bridge, "a", message=message, errors=errors, framework="dramatiq")
    for text in ("like [redacted]", shown, "ann"):
        assert [one.id for one in bridge.dead_letters.list(text=text).letters] == ["a"]
    assert bridge.dead_letters.list(text="hunter22").letters == ()
    assert [one.id for one in all_seeing.dead_letters.list(text="HUNTER22").letters] == ["a"]


@pytest.mark.parametrize("name", ["since", "until"])
def test_a_time_without_a_zone(fleet: Lives, name: str) -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match=rf"^{name}: .* must be a time with a zone$"):
        fleet[0].dead_letters.list(**{name: datetime(2026, 1, 1)})  # type: ignore[arg-type]


def test_purge(fleet: Lives) -> None:
    """A purge counts first; then the letters of the kind are gone, a held one stays, and an event follows."""
    bridge, _ = fleet
    events: list[Event] = []
    bridge = Bridge(bridge.store, listeners=[events.append])
    for n in range(5):
        bury(bridge, f"j-{n}", queue="a" if n < 4 else "b")
    assert bridge.store is not None
    bridge.store.letters.claim(["j-2"], now=bridge.engine.now(), seconds=60)
    assert bridge.dead_letters.purge(queue="a").matched == 4
    assert bridge.dead_letters.stats().total == 5
    done = bridge.dead_letters.purge(queue="a", confirm=True)
    assert (done.matched, done.succeeded, done.failed) == (4, 3, 1)
    assert bridge.dead_letters.stats().by_queue == {"a": 1, "b": 1}
    assert bridge.flush(30)
    action, pruned = events
    assert (pruned.type, dict(pruned.data)) == (
        "dead_letter.pruned",
        {"count": 3, "pruning_policy": "purge"},
    )
    assert (action.type, action.data["action"], action.data["outcome"]) == (
        "operator.action",
        "dead_letter.delete",
        "running",
    )
    [record] = bridge.audit.list().records
    assert (record.outcome, record.count) == ("done", 3)


@pytest.mark.requirement("DLQ-R004")
def test_stats_tell_of_retention(fleet: Lives) -> None:
    """The stats have the spec's own shape."""
    bridge, _ = fleet
    bury(bridge, "j-1")
    before = bridge.engine.now()
    told = bridge.dead_letters.stats().to_ojs()
    assert (told["total"], told["by_error_type"]) == (1, {"external.timeout": 1})
    assert (told["retention"]["max_age"], told["retention"]["max_count"]) == ("P180D", 10_000)
    due = datetime.fromisoformat(told["retention"]["next_prune_at"].replace("Z", "+00:00"))
    assert timedelta(0) < due - before
    assert due - bridge.engine.now() <= timedelta(minutes=5)


def test_deaths_over_time(fleet: Lives) -> None:
    """The steps are equal, each death is in one of them; filters by kind and time count."""
    bridge, _ = fleet
    for n in range(10):
        bury(bridge, f"j-{n}", type="a" if n else "b", discarded_at=bridge.engine.now() - timedelta(hours=n))
    found = bridge.dead_letters.timeline(steps=6)
    assert (len(found.counts), sum(found.counts)) == (6, 10)
    assert timedelta(hours=9) <= found.step * 6 < timedelta(hours=9, minutes=5)
    since = bridge.engine.now() - timedelta(hours=3.5)
    assert sum(bridge.dead_letters.timeline(since=since).counts) == 4
    assert sum(bridge.dead_letters.timeline(since=since, type="a").counts) == 3
    assert sum(bridge.dead_letters.timeline(type="none").counts) == 0
    with pytest.raises(ValueError, match=r"^steps: 0 must be between 1 and 1000$"):
        bridge.dead_letters.timeline(steps=0)


def test_an_export_is_loaded_elsewhere(fleet: Lives, url: str) -> None:
    """Each letter is the same after the load, the oldest first."""
    bridge, _ = fleet
    letters = [bury(bridge, f"j-{n}", message=celery_message(n), attempt=n + 1) for n in range(3)]
    lines = list(bridge.dead_letters.export())
    assert len(lines) == 3
    other = Bridge(url, namespace="elsewhere")
    assert other.dead_letters.load([*lines, "\n"]) == 3
    for found in letters:
        assert other.dead_letters.get(found.id) == bridge.dead_letters.get(found.id)


def test_an_import_writes_many_letters_at_a_time(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a few at a time where they are long: the store waits for its disk, or the way to it is long."""
    bridge, _ = fleet
    store = bridge.store
    assert store is not None
    lots: list[int] = []
    bury_all = store.letters.bury_all

    def counted(letters: Sequence[Letter]) -> None:
        lots.append(len(letters))
        bury_all(letters)

    monkeypatch.setattr(store.letters, "bury_all", counted)
    lines = [to_json(letter(f"j-{n:03}")) for n in range(450)]
    assert bridge.dead_letters.load(lines) == 450
    assert lots == [200, 200, 50]
    assert bridge.dead_letters.stats().total == 450
    monkeypatch.setattr(letters, "LOT_SIZE", 2.5 * len(lines[0]))
    assert bridge.dead_letters.load(lines[:5]) == 5
    assert lots[3:] == [2, 2, 1]


REFUSE = """
create trigger refuse before insert on ojs_dead_letters when new.id = 'j-5'
begin select raise(abort, 'no room'); end
"""


def test_an_import_that_the_store_refuses_says_what_went_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of letters, the last line, and the same in the audit; a second import completes it."""
    monkeypatch.setattr(letters, "LOT", 2)
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge, _ = bridge_with_outbox(url)
    lines = [to_json(letter(f"j-{n}")) for n in range(7)]
    bridge.dead_letters.load([])
    run(url, REFUSE)
    with pytest.raises(StoreError, match=r"no room.*; 4 of 7 letters were loaded, up to line 5$"):
        bridge.dead_letters.load(["", *lines])
    assert [x.id for x in bridge.dead_letters.list().letters] == ["j-3", "j-2", "j-1", "j-0"]
    record = bridge.audit.list().records[0]
    assert (record.outcome, record.count) == ("failed", 4)
    assert "up to line 5" in record.error
    run(url, "drop trigger refuse")
    assert bridge.dead_letters.load(lines) == 7
    assert bridge.dead_letters.stats().total == 7


def test_a_letter_that_the_store_can_never_keep_is_named_by_its_line(postgres_store_url: str) -> None:
    """The letters before it are there, though it would have gone with them in one step."""
    bridge, _ = bridge_with_outbox(postgres_store_url)
    digits = random.Random(7)
    long = ["".join(chr(digits.randrange(0x20000, 0x2A000)) for _ in range(255)) for _ in range(3)]
    bad = letter("bad", type=long[0], queue=long[1], errors=(entry(1, type=long[2]),))
    lines = [*map(to_json, (letter("j-0"), letter("j-1"), bad, letter("j-2")))]
    told = r"^line 3: the store .* cannot keep this: .*; 2 of 4 letters were loaded, up to line 2$"
    with pytest.raises(Unstorable, match=told):
        bridge.dead_letters.load(lines)
    assert [x.id for x in bridge.dead_letters.list().letters] == ["j-1", "j-0"]
    assert bridge.audit.list().records[0].count == 2


@pytest.mark.parametrize("damage", ["{", "[]", '{"id": "x"}', "null"])
def test_a_damaged_export(fleet: Lives, damage: str) -> None:
    """The error names the line, and no letter is loaded."""
    bridge, _ = fleet
    bury(bridge, "j-1")
    lines = list(bridge.dead_letters.export())
    bridge.dead_letters.delete("j-1")
    with pytest.raises(ValueError, match=r"^line 2: it is no dead letter: "):
        bridge.dead_letters.load([*lines, damage])
    assert bridge.dead_letters.stats().total == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("errors", ["boom"]), ("attempt", "1"), ("message", []), ("retry", [1]), ("fence", None), ("id", 7)],
)
def test_a_letter_with_a_field_of_a_wrong_kind(fleet: Lives, field: str, value: object) -> None:
    """The error names the line, the field and the value, and no letter is loaded."""
    bridge, _ = fleet
    bury(bridge, "j-1")
    [line] = bridge.dead_letters.export()
    bridge.dead_letters.delete("j-1")
    with pytest.raises(ValueError, match=rf"^line 1: it is no dead letter: {field}.*: .*: Input should be"):
        bridge.dead_letters.load([json.dumps({**json.loads(line), field: value})])
    assert bridge.dead_letters.stats().total == 0


SECRET = "hunter2!"


@pytest.mark.parametrize(
    "message",
    [
        celery_message("ann", SECRET),
        celery_message("ann", password=SECRET),
        celery_message({"deep": [{"Password": SECRET}]}),
        {**dramatiq_message("ann", SECRET), "parameters": ["user", "password"]},
        dramatiq_message(password=[SECRET]),
    ],
)
def test_a_redaction_hides_secrets_everywhere(url: str, message: dict[str, Any]) -> None:
    """Lists, details, searches, exports, errors and reasons hide secrets; a replay has them."""
    bridge, outbox = bridge_with_outbox(url, redact=["password"])
    told = f"login failed with {SECRET}"
    errors = (entry(1, message=told, details={"sent": [SECRET]}, backtrace=[f"x {SECRET}"]),)
    bury(bridge, "j-1", message=message, errors=errors, reason=told)
    [listed] = bridge.dead_letters.list().letters
    shown = [listed.to_ojs(), bridge.dead_letters.get("j-1").to_ojs(), [*bridge.dead_letters.export()]]
    assert SECRET not in json.dumps(shown)
    assert listed.errors[0]["message"] == "login failed with [redacted]"
    assert "[redacted]" in json.dumps([listed.reading.args, listed.reading.kwargs])
    fields = ("args", "kwargs")
    assert listed.reading.hidden == tuple(
        name for name in fields if "[redacted]" in json.dumps(getattr(listed.reading, name))
    )
    assert bridge.dead_letters.list(text=SECRET).letters == ()
    assert len(bridge.dead_letters.list(text="redacted").letters) == 1
    with pytest.raises(ValueError, match=r"^line 1: dead letter 'j-1' was redacted"):
        bridge.dead_letters.load(bridge.dead_letters.export())
    bridge.dead_letters.replay("j-1")
    assert outbox.published[0][0].message == message


def test_a_redaction_of_ones_own(url: str) -> None:
    """A callable gets names and values, or places where a parameter's name is not known."""
    seen: list[tuple[str, Any]] = []

    def shorten(name: str, value: Any) -> Any:
        seen.append((name, value))
        return f"{value[:4]}…" if name in ("card", "1") else value

    bridge, _ = bridge_with_outbox(url, redact=shorten)
    bury(bridge, "j-1", message=dramatiq_message("ann", "4111-1111", card="4222-2222"))
    reading = bridge.dead_letters.get("j-1").reading
    assert (reading.args, reading.kwargs) == (["ann", "4111…"], {"card": "4222…"})
    assert ("0", "ann") in seen


def test_parked_retries_are_redacted(url: str) -> None:
    """A parked retry is shown redacted, as dead letters are; the stored retry keeps its secrets."""
    bridge, _ = bridge_with_outbox(url, redact={"password"})
    parked = Parked(
        id="j-1", key="j-1", fence=1, type="t", queue="q", framework=FRAMEWORK, attempt=2, max_attempts=3,
        next_retry_at=NOW, parked_at=NOW, reason=f"no {SECRET}",
        state={"v": 1, "attempt": 2, "errors": [entry(1, message=SECRET)]},
        message=celery_message("ann", SECRET),
    )  # fmt: skip
    assert bridge.store is not None
    bridge.store.parked.park(parked)
    [listed] = bridge.retries.list().jobs
    shown = [listed.to_ojs(), bridge.retries.get("j-1").to_ojs(), repr(listed)]
    assert SECRET not in json.dumps(shown)
    assert bridge.store.parked.get("j-1") == replace(parked)
    bridge.retries.cancel("j-1")


@pytest.mark.parametrize("redact", ["password", 7])
def test_a_redaction_that_is_none(redact: Any) -> None:
    """The error names the argument."""
    with pytest.raises(ConfigurationError, match=r"^redact: .* is neither a collection of argument names"):
        Bridge(redact=redact)


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("content_type", ["application/x-python-serialize", "application/x-yaml"])
def test_a_pickled_body_is_never_opened(fleet: Lives, content_type: str) -> None:
    """The reading says that the body is pickled; everything else of the letter is shown."""
    bridge, _ = fleet
    body = b64encode(pickle.dumps([[Bomb()], {}, {}])).decode()
    message = {**celery_message(), "body": body, "body_encoding": "base64", "content_type": content_type}
    bury(bridge, "j-1", message=message)
    reading = bridge.dead_letters.get("j-1").reading
    assert (reading.args, reading.kwargs, reading.meta) == (None, None, {"tenant": "acme"})
    assert "which is not opened here" in reading.note
    assert bridge.dead_letters.list(text="bomb").letters == ()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"body": 7},
        {"body": "{", "body_encoding": "utf-8", "content_type": "application/json", "headers": {}},
        {"encoded": "gAR9", "encoding": "base64"},
        {"encoded": "[]", "encoding": "utf-8"},
        {"encoded": "x"},
    ],
)
def test_a_message_that_nobody_can_read(message: dict[str, Any]) -> None:
    """The reading says why, if there was a message at all."""
    reading = read_message(message)
    assert reading.args is None
    assert bool(reading.note) == bool(message)


def test_a_letter_that_is_gone_for_overrides(fleet: Lives) -> None:
    """The error is the one for any letter that is gone."""
    with pytest.raises(LetterNotFound):
        fleet[0].dead_letters.replay("nobody", queue="slow")
