"""Rules replay dead letters without an operator."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, Event, ReplayRule
from ojs_bridge.instrumentation.metrics import REPLAYED, of_event
from ojs_bridge.operations.replaying import PERIOD
from tests.lives import FRAMEWORK, Outbox
from tests.servers import eventually
from tests.store.test_store import entry, letter

HOUR = timedelta(hours=1)


def fleet(url: str, *rules: ReplayRule, **options: Any) -> tuple[Bridge, Outbox]:
    """A bridge with rules, and the publisher of its framework."""
    bridge = Bridge(url, replay_rules=rules, **options)
    outbox = bridge.engine.context.publishers[FRAMEWORK] = Outbox()
    return bridge, outbox


def bury(bridge: Bridge, letter_id: str, ago: timedelta, **fields: Any) -> None:
    """Bury a letter of the outbox that died some time ago."""
    assert bridge.store is not None
    known = {"discarded_at": bridge.engine.now() - ago, "framework": FRAMEWORK, **fields}
    bridge.store.letters.bury(letter(letter_id, **known))


def sent(outbox: Outbox) -> list[str]:
    """Return the ids of the published letters."""
    return [found.id for found, _ in outbox.published]


@pytest.mark.requirement("DLQ-R003")
def test_what_a_rule_names_is_replayed_after_its_delay(url: str) -> None:
    """A rule replays letters of its kind, old enough and not too often; the rest stay, and events follow."""
    rule = ReplayRule("timeouts", type="billing.*", error_type="external.*", delay="PT1H", max_replays=2)
    events: list[Event] = []
    bridge, outbox = fleet(url, rule, listeners=[events.append])
    bury(bridge, "due", 2 * HOUR, replay_count=1)
    bury(bridge, "young", HOUR / 2)
    bury(bridge, "often", 2 * HOUR, replay_count=2)
    bury(bridge, "mail", 2 * HOUR, type="mail.send")
    bury(bridge, "other", 2 * HOUR, errors=(entry(1, type="auth.expired"),))
    bury(bridge, "foreign", 2 * HOUR, framework="elsewhere")
    bury(bridge, "gone", 2 * HOUR, type="billing.gone")
    outbox.strangers = {"billing.gone"}
    bridge.dead_letters.apply_replay_rules()
    assert sent(outbox) == ["due"]
    assert bridge.dead_letters.stats().total == 6
    assert bridge.flush(30)
    assert [(e.type, e.subject, e.data["rule"], e.data["replay_count"]) for e in events] == [
        ("dead_letter.replayed", "due", "timeouts", 2)
    ]
    assert [*of_event(events[0])] == [(REPLAYED, 1, ("default", "billing.charge"))]


@pytest.mark.requirement("DLQ-R003")
def test_of_many_workers_one_applies_the_rules_in_a_minute(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other worker applies them before the minute is over."""
    now = [datetime.now(timezone.utc)]
    monkeypatch.setattr(Bridge, "_now", lambda _: now[0])
    fleets = [fleet(url, ReplayRule("all", delay="PT0S")) for _ in range(4)]
    for n in range(20):
        bury(fleets[0][0], f"j-{n}", HOUR)
    first = fleets[0][0]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: one[0].dead_letters.apply_replay_rules(), fleets))
    assert sorted(name for _, outbox in fleets for name in sent(outbox)) == sorted(
        f"j-{n}" for n in range(20)
    )
    bury(first, "later", HOUR)
    first.dead_letters.apply_replay_rules()
    assert first.dead_letters.stats().total == 1
    now[0] += PERIOD
    first.dead_letters.apply_replay_rules()
    assert first.dead_letters.stats().total == 0


def test_what_a_rule_cannot_replay_stays(url: str) -> None:
    """The other letters go."""
    bridge, outbox = fleet(url, ReplayRule("all", delay="PT0S"))
    bury(bridge, "bad", HOUR)
    bury(bridge, "good", HOUR)
    outbox.refuses = {"bad": TypeError("no")}
    bridge.dead_letters.apply_replay_rules()
    assert sent(outbox) == ["good"]
    assert [found.id for found in bridge.dead_letters.list().letters] == ["bad"]


@pytest.mark.requirement("DLQ-R003")
def test_a_worker_applies_them(url: str) -> None:
    """A worker applies them from its start on; a rule that is switched off does nothing."""
    off = ReplayRule("off", queue="kept", delay="PT0S", enabled=False)
    bridge, outbox = fleet(url, off, ReplayRule("all", queue="default", delay="PT0S"))
    bury(bridge, "kept", HOUR, queue="kept")
    bury(bridge, "j-1", HOUR)
    bridge.start()
    try:
        eventually(lambda: sent(outbox) == ["j-1"], what="it was published")
        eventually(lambda: bridge.dead_letters.stats().total == 1, what="it left the store")
    finally:
        bridge.stop()
    assert [found.id for found in bridge.dead_letters.list().letters] == ["kept"]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no name": (lambda: ReplayRule(""), "replay rule: name: '' must be a name"),
    "delay": (lambda: ReplayRule("a", delay="1h"), "replay rule 'a': delay: '1h' "),
    "max_replays": (
        lambda: ReplayRule("a", max_replays=0),
        "replay rule 'a': max_replays: 0 must be an integer of at least 1",
    ),
    "twice": (
        lambda: Bridge(replay_rules=[ReplayRule("a"), ReplayRule("a")]),
        "replay_rules: two rules are called 'a'",
    ),
    "no list": (lambda: Bridge(replay_rules=7), "replay_rules: 7 must be a list of ReplayRules"),  # type: ignore[arg-type]
    "no rule": (lambda: Bridge(replay_rules=["a"]), "replay_rules: 'a' is not a ReplayRule"),  # type: ignore[list-item]
}


@pytest.mark.parametrize(("make", "told"), WRONG.values(), ids=WRONG)
def test_a_rule_that_is_wrong(make: Callable[[], object], told: str) -> None:
    """The error names the rule, its field and the field's own rule."""
    with pytest.raises(ConfigurationError) as error:
        make()
    assert str(error.value).startswith(told)
