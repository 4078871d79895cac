"""Groups of dead letters as operators see them: they are listed and muted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.operations.groups import ErrorGroup
from ojs_bridge.store import Store
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
        "error_type": "external.timeout",
        "pattern": "user # is slow",
        "frame": None,
        "message": "user 333 is slow",
        "sample_id": "a3",
        "count": 3,
        "first_at": "2026-11-21T10:00:02.345Z",
        "last_at": "2026-11-21T13:30:02.345Z",
        "types": sorted(user.group.types),
        "queues": sorted(user.group.queues),
        "deaths": {"since": "2026-11-21T10:00:02.345Z", "step_seconds": 3600.0, "counts": [1, 1, 0, 1]},
        "muted": None,
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


def test_what_cannot_be_muted(bridge: Bridge) -> None:
    """The error names the argument."""
    for change in (bridge.dead_letters.groups.mute, bridge.dead_letters.groups.unmute):
        with pytest.raises(ValueError, match=r"^group: 'x' must be a fingerprint, 16 hexadecimal digits$"):
            change("x")


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
