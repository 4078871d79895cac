"""Groups of errors as operators see them: they are listed, muted and resolved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, NotFound
from ojs_bridge.operations.group import ErrorGroup
from ojs_bridge.rules.faults import LIVE
from ojs_bridge.store import Document, Store
from tests.conftest import store_url
from tests.store.test_groups import GONE, HOUR, NO, NOW, TIMES, USER, died, fill


@pytest.fixture(params=["sqlite", "valkey"])
def bridge(request: pytest.FixtureRequest) -> Iterator[Bridge]:
    """A bridge with letters of three groups."""
    bridge = Bridge(store_url(request.param, request), redact=["secret"])
    fill(store_of(bridge))
    yield bridge
    bridge.stop()


def store_of(bridge: Bridge) -> Store:
    """The store of a bridge."""
    assert bridge.store is not None
    return bridge.store


def names(found: tuple[ErrorGroup, ...]) -> list[str]:
    """The fingerprints of groups."""
    return [each.group.fingerprint for each in found]


def test_a_group_in_json(bridge: Bridge) -> None:
    """It has all that a page shows of it."""
    user = bridge.dead_letters.groups.list(steps=4, since=TIMES[0], until=TIMES[4])[0]
    assert user.to_ojs() == {
        "fingerprint": USER,
        "state": "steady",
        "state_since": None,
        "error_type": "external.timeout",
        "pattern": "user # is slow",
        "frame": None,
        "message": "user 333 is slow",
        "sample_id": "a3",
        "count": 3,
        "retrying": 0,
        "per_minute": 0.0,
        "first_at": "2026-11-21T10:00:02.345Z",
        "last_at": "2026-11-21T13:30:02.345Z",
        "types": sorted(user.group.types),
        "queues": sorted(user.group.queues),
        "deaths": {"since": "2026-11-21T10:00:02.345Z", "step_seconds": 3600.0, "counts": [1, 1, 0, 1]},
        "muted": None,
        "resolved": None,
    }


def test_the_deaths_are_those_of_the_chart(bridge: Bridge) -> None:
    """In the same span of time, and none is left out."""
    letters = bridge.dead_letters
    chart, groups = letters.timeline(steps=9), letters.groups.list(steps=9)
    assert [sum(each) for each in zip(*(x.group.deaths for x in groups), strict=True)] == [*chart.counts]
    assert sum(chart.counts) == 6


def test_what_is_no_choice_of_groups(bridge: Bridge) -> None:
    """The error names the argument."""
    wrong: list[dict[str, Any]] = [
        {"order": "first"}, {"limit": 0}, {"offset": -1}, {"steps": 0}, {"group": "x"}
    ]  # fmt: skip
    for asked in wrong:
        with pytest.raises(ValueError, match=f"^({next(iter(asked))}|limit): "):
            bridge.dead_letters.groups.list(**asked)


def test_a_muted_group_is_left_out_until_it_is_asked_for(bridge: Bridge) -> None:
    """Its letters stay as they are."""
    groups = bridge.dead_letters.groups
    with bridge.audit.acting("ann"):
        mute = groups.mute(USER)
    assert names(groups.list()) == [GONE, NO]
    shown = groups.list(muted=True)
    assert names(shown) == [USER, GONE, NO]
    assert [each.mute for each in shown] == [mute, None, None]
    assert bridge.dead_letters.stats().total == 6
    assert len(bridge.dead_letters.list(group=USER).letters) == 3
    groups.mute(USER)
    assert mute.by == "ann" != groups.mutes()[USER].by
    groups.unmute(USER)
    groups.unmute(GONE)
    assert names(groups.list()) == [USER, GONE, NO]
    assert groups.mutes() == {}
    actions = [record.action for record in bridge.audit.list().records]
    assert actions == ["group.unmute", "group.mute", "group.mute"]


def test_a_mute_ends_at_its_time(bridge: Bridge) -> None:
    """Without a word from anybody."""
    groups, now = bridge.dead_letters.groups, bridge.engine.now()
    groups.mute(USER, until=now + timedelta(hours=1))
    groups.mute(NO, until=now - timedelta(seconds=1))
    assert set(groups.mutes()) == {USER}
    assert names(groups.list()) == [GONE, NO]


def test_a_mute_without_a_time_ends_after_a_week(bridge: Bridge) -> None:
    mute = bridge.dead_letters.groups.mute(USER)
    assert (mute.until, mute.count) == (mute.at + timedelta(days=7), 3)


def test_a_mute_is_lifted_when_the_group_grows_by_more_than_it_had(bridge: Bridge) -> None:
    """Another fault that grows lifts nothing."""
    groups, now = bridge.dead_letters.groups, bridge.engine.now()
    groups.mute(USER)
    hours = (now - NOW) / HOUR + 1
    for n in range(9):
        store_of(bridge).letters.bury(died(f"other-{n}", hours, "gone"))
    for n in range(3):
        store_of(bridge).letters.bury(died(f"new-{n}", hours, f"user {n} is slow"))
    assert names(groups.list()) == [GONE, NO]
    store_of(bridge).letters.bury(died("one-more", hours + 1, "user 9 is slow"))
    assert names(groups.list()) == [USER, GONE, NO]
    assert groups.mutes() == {}
    groups.mute(USER)
    assert groups.mutes()[USER].count == 7


def test_a_resolved_group_comes_back_with_its_next_death(bridge: Bridge) -> None:
    """Its letters stay; what operators do is on record."""
    groups = bridge.groups
    with bridge.audit.acting("ann"):
        made = groups.resolve(USER, " v42 ")
    user = groups.get(USER)
    assert (user.state, user.state_since, user.resolution) == ("resolved", made.at, made)
    assert (made.by, made.mark) == ("ann", "v42")
    assert names(groups.list(state="resolved")) == [USER]
    assert names(groups.list(state=["steady", "resolved"], order="count")) == [USER, NO, GONE]
    died_at = made.at + timedelta(milliseconds=1)
    store_of(bridge).letters.bury(replace(died("again", 0, "user 9 is slow"), discarded_at=died_at))
    [back] = groups.list(state=LIVE)
    assert (back.group.fingerprint, back.state, back.state_since) == (USER, "came_back", died_at)
    assert back.resolution == made
    groups.resolve(USER)
    groups.unresolve(USER)
    groups.unresolve(GONE)
    assert (groups.get(USER).state, groups.resolutions()) == ("steady", {})
    actions = [(record.action, record.subject) for record in bridge.audit.list().records]
    of_user = {"group": USER}
    assert actions == [
        ("group.unresolve", of_user),
        ("group.resolve", of_user),
        ("group.resolve", {**of_user, "mark": "v42"}),
    ]


def test_a_group_is_new_for_an_hour_or_since_a_deploy(bridge: Bridge) -> None:
    """A mark that is to come is none."""
    now = bridge.engine.now()
    for n, ago in enumerate((timedelta(minutes=59), timedelta(hours=5), timedelta(hours=7))):
        store_of(bridge).letters.bury(replace(died(f"new-{n}", 0, type=f"new.{n}"), discarded_at=now - ago))

    def new() -> list[str]:
        return [each.group.types[0] for each in bridge.groups.list(state="new")]

    assert new() == ["new.0"]
    bridge.marks.add("v42", at=now - timedelta(hours=6))
    assert new() == ["new.0", "new.1"]
    bridge.marks.add("v43", at=now - timedelta(minutes=5))
    bridge.marks.add("v44", at=now + timedelta(hours=5))
    assert new() == ["new.0"]
    assert [each.state for each in bridge.groups.list()] == ["new", *["steady"] * 5]


def test_the_worst_come_first(bridge: Bridge) -> None:
    """What dies now, then what is new, then what is large; page by page, and none twice or left out."""
    now, store = bridge.engine.now(), store_of(bridge)

    def die(type_: str, count: int, ago: float) -> None:
        for n in range(count):
            at = now - timedelta(seconds=ago)
            store.letters.bury(replace(died(f"{type_}-{n}", 0, type=type_), discarded_at=at))

    die("new", 1, 600)
    die("dies.some", 5, 20)
    die("dies.many", 40, 30)
    die("large", 30, 90_000)
    groups = bridge.groups
    whole = [one.group.types[0] for one in groups.list(order="worst")]
    assert whole == ["dies.many", "dies.some", "new", "large", "billing.charge", "t.a", "billing.charge"]
    assert [one.per_minute for one in groups.list(order="worst", limit=3)] == [40, 5, 0]
    pages = (names(groups.list(order="worst", limit=2, offset=offset)) for offset in range(0, 8, 2))
    assert [name for page in pages for name in page] == names(groups.list(order="worst"))
    assert [one.group.types[0] for one in groups.list(order="worst", state=LIVE)] == whole[:3]


def test_what_another_version_has_said_of_a_group_is_not_in_the_way(bridge: Bridge) -> None:
    """Only what can be read counts."""
    for kind, body in (("mute", {"muted": {"by": "x"}}), ("mute", {}), ("resolved", {"resolved": [1]})):
        store_of(bridge).documents.write(Document(kind, f"{len(body)}{kind}", NOW, body))
    store_of(bridge).documents.write(Document("faults", "9", NOW, {"faults": {USER: {"type": 1}, NO: None}}))
    store_of(bridge).documents.write(Document("faults", "8", NOW, {"faults": [1]}))
    store_of(bridge).documents.write(Document("faults", "7", NOW, {}))
    assert names(bridge.groups.list()) == [USER, GONE, NO]


def test_what_cannot_be_muted(bridge: Bridge) -> None:
    """The error names the argument."""
    groups = bridge.groups
    for change in (groups.mute, groups.unmute, groups.resolve, groups.unresolve, groups.get):
        with pytest.raises(ValueError, match=r"^group: 'x' must be a fingerprint, 16 hexadecimal digits$"):
            change("x")
    with pytest.raises(NotFound, match="there is no group 'ffffffffffffffff'"):
        groups.resolve("f" * 16)
    with pytest.raises(ValueError, match=r"^mark: ' ' must have 1 to 1000 characters$"):
        groups.resolve(USER, " ")
    with pytest.raises(ValueError, match=r"^state: 'bad' must be one of new, growing, steady, came_back, "):
        groups.list(state="bad")  # type: ignore[arg-type]


def test_a_group_is_replayed_and_deleted_as_any_choice_of_letters(bridge: Bridge) -> None:
    """Through the operations that there are."""
    letters = bridge.dead_letters
    assert letters.purge(group=USER).matched == 3
    begun = bridge.operations.begin("purge", group=USER)
    assert bridge.operations.run(begun).succeeded == 3
    assert letters.purge(confirm=True, group=NO).succeeded == 2
    assert [*letters.export(group=NO)] == []
    assert letters.stats(group=GONE).total == 1
    assert letters.replay_all(group=GONE).matched == 1
    assert sum(letters.timeline(group=GONE).counts) == 1


def test_an_error_is_grouped_before_it_is_redacted(bridge: Bridge) -> None:
    """The group that is shown is that of the store, and no secret is shown."""
    message = {"args": [], "kwargs": {"secret": "hunter"}, "options": {}}
    store_of(bridge).letters.bury(replace(died("s", 9, "no password like hunter"), message=message))
    [group] = bridge.dead_letters.groups.list(limit=1)
    assert group.message.startswith("no password like")
    assert "hunter" not in str(group.to_ojs())
    [shown] = bridge.dead_letters.list(group=group.group.fingerprint).letters
    assert shown.to_ojs()["metadata"]["fingerprint"] == group.group.fingerprint


def test_groups_need_a_store() -> None:
    """Without a store there are none."""
    with pytest.raises(ConfigurationError, match="groups need a store"):
        Bridge().dead_letters.groups.list()
