"""The routes of groups: list, mute, unmute, and the filter by a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge.http.guarding import Access, tokens_of
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.rules.job import parse_time
from tests.conftest import store_url
from tests.http.doors import LETTERS, OPERATOR, READER, House, client_at, house, with_token
from tests.http.test_letters import refused
from tests.store.test_store import entry

GROUPS = f"{LETTERS}/groups"
FAULT = "billing.charge", "external.timeout"
SLOW, GONE = fingerprint(*FAULT, "user 1 is slow"), fingerprint(*FAULT, "gone")


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def door(request: pytest.FixtureRequest) -> House:
    """A door to a store with letters of two groups."""
    door = house(store_url(request.param, request))
    for n in range(5):
        message = f"user {n} is slow" if n else "gone"
        died = door.bridge.engine.now() - timedelta(minutes=n)
        door.bury(f"j-{n}", errors=({**entry(3), "message": message},), discarded_at=died)
    return door


def listed(door: House, **query: Any) -> list[str]:
    """The fingerprints of a page of groups."""
    answer = door.client.get(GROUPS, params=query)
    assert answer.status_code == 200, answer.text
    return [group["fingerprint"] for group in answer.json()["groups"]]


def test_a_round_through_all_routes(door: House) -> None:
    """A group is listed, muted, unmuted, resolved, replayed and deleted."""
    found = door.client.get(GROUPS, params={"order": "count"}).json()
    slow, gone = found["groups"]
    assert found["next_cursor"] is None
    assert (slow["fingerprint"], slow["count"], slow["pattern"], slow["muted"]) == (
        SLOW, 4, "user # is slow", None,
    )  # fmt: skip
    assert sum(slow["deaths"]["counts"]) == 4
    assert gone["fingerprint"] == GONE
    assert listed(door) == [GONE, SLOW]
    muted = door.client.post(f"{GROUPS}/{SLOW}/mute", json={"reason": "known"}).json()
    assert (muted["count"], parse_time(muted["until"]) - parse_time(muted["at"])) == (4, timedelta(days=7))
    assert listed(door) == [GONE]
    assert listed(door, muted="true") == [GONE, SLOW]
    assert door.client.delete(f"{GROUPS}/{SLOW}/mute").json() == {"muted": False, "fingerprint": SLOW}
    resolved = door.client.post(f"{GROUPS}/{SLOW}/resolve", json={"mark": "v42"}).json()
    assert (resolved["by"], resolved["mark"]) == ("anonymous", "v42")
    assert listed(door, state="resolved") == [SLOW]
    assert listed(door, state="new,came_back") == [GONE]
    assert door.client.delete(f"{GROUPS}/{SLOW}/resolve").json() == {"resolved": False, "fingerprint": SLOW}
    assert listed(door, state="new,came_back") == [GONE, SLOW]
    replayed = door.client.post(f"{LETTERS}/retry", json={"confirm": True, "filter": {"group": SLOW}})
    assert replayed.json()["succeeded"] == 4
    assert listed(door) == [GONE]
    purged = door.client.request("DELETE", LETTERS, json={"confirm": True, "filter": {"group": GONE}})
    assert purged.json()["succeeded"] == 1
    assert listed(door) == []


def test_pages_of_groups(door: House) -> None:
    """The last page has no more."""
    first = door.client.get(GROUPS, params={"limit": 1}).json()
    assert ([g["fingerprint"] for g in first["groups"]], first["next_cursor"]) == ([GONE], "1")
    last = door.client.get(GROUPS, params={"limit": 1, "cursor": first["next_cursor"]}).json()
    assert ([g["fingerprint"] for g in last["groups"]], last["next_cursor"]) == ([SLOW], None)
    refused(door.client.get(GROUPS, params={"cursor": "x"}), 400, "invalid_request")


def test_a_letter_names_its_group(door: House) -> None:
    """And the list of letters takes it as a filter."""
    found = door.client.get(LETTERS, params={"group": SLOW}).json()["jobs"]
    assert [job["id"] for job in found] == ["j-1", "j-2", "j-3", "j-4"]
    assert {job["metadata"]["fingerprint"] for job in found} == {SLOW}
    assert door.client.get(f"{LETTERS}/stats", params={"group": GONE}).json()["total"] == 1


def test_whom_a_group_hurts(door: House) -> None:
    """The values of its letters' arguments are counted."""
    found = door.client.get(f"{LETTERS}/by-argument", params={"group": SLOW}).json()
    assert (found["counted"], found["of"]) == (4, 4)
    assert all(one["one_value"] and one["values"][0]["count"] == 4 for one in found["arguments"])
    none = door.client.get(f"{LETTERS}/by-argument", params={"queue": "none"}).json()
    assert none == {"counted": 0, "of": 0, "arguments": []}
    refused(door.client.get(f"{LETTERS}/by-argument", params={"text": "x"}), 400, "invalid_request")


def test_what_is_refused(door: House) -> None:
    """A text that is no fingerprint names no group."""
    for unknown in ("x", "a" * 16):
        refused(door.client.post(f"{GROUPS}/{unknown}/mute", json={}), 404, "not_found")
        refused(door.client.post(f"{GROUPS}/{unknown}/resolve", json={}), 404, "not_found")
    refused(door.client.delete(f"{GROUPS}/x/mute"), 404, "not_found")
    refused(door.client.delete(f"{GROUPS}/x/resolve"), 404, "not_found")
    refused(door.client.get(GROUPS, params={"state": "new,bad"}), 400, "invalid_request")
    refused(door.client.get(GROUPS, params={"group": "x"}), 400, "invalid_request")
    refused(door.client.get(GROUPS, params={"order": "first"}), 400, "invalid_request")


def test_a_reader_mutes_nothing(door: House) -> None:
    """But sees the groups."""
    reader = client_at(door.bridge, Access(tokens_of(OPERATOR, READER)))
    assert reader.get(GROUPS, headers=with_token(READER)).status_code == 200
    refused(reader.post(f"{GROUPS}/{SLOW}/mute", json={}, headers=with_token(READER)), 403, "x_forbidden")
