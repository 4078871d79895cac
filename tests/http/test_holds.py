"""The routes of holds; that a paused job does not run stands in tests/contract."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from ojs_bridge.http.guarding import Access, tokens_of
from ojs_bridge.rules.job import format_time
from tests.conftest import store_url
from tests.http.doors import API, OPERATOR, READER, WAITING, House, client_at, house, unlimited, with_token
from tests.http.test_letters import refused

HOLDS, QUEUES = f"{API}/holds", f"{API}/queues"


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_a_round_through_all_routes(kind: str, request: pytest.FixtureRequest) -> None:
    door = house(store_url(kind, request))
    for n in range(3):
        door.park(f"h-{n}", kind="held", type="billing.charge", queue="a" if n else "b")
    ask, until = door.client, format_time(door.bridge.engine.now() + timedelta(hours=1))
    asked = {"type": "billing.*", "queue": "a", "until": until, "reason": "the bank is down"}
    paused = ask.post(HOLDS, json=asked).json()
    assert paused.items() >= {**asked, "held": 2, "error_type": None}.items() - {("reason", asked["reason"])}
    assert (paused["why"], paused["by"]) == ("the bank is down", door.bridge.audit.list().records[0].who)
    assert ask.post(HOLDS, json={"error_type": "a.*"}).json()["id"] == "pause:error_type=a.*"
    [first, second] = ask.get(HOLDS).json()["holds"]
    assert (first, second["held"]) == (paused, 3)
    path = f"{HOLDS}/{quote(paused['id'], safe='')}"
    assert ask.get(path).json() == paused
    assert len(ask.get(WAITING, params={"kind": "held", "queue": "a"}).json()["jobs"]) == 2
    ended = ask.post(f"{path}/resume", json={"rate": 50, "reason": "it is back"}).json()
    assert (ended["rate"], ended["ended_at"] > ended["since"]) == (50, True)
    assert [hold["id"] for hold in ask.get(HOLDS).json()["holds"]] == [second["id"]]
    records = [(record.action, record.via, record.reason) for record in door.bridge.audit.list().records]
    assert records == [
        ("hold.resume", "http", "it is back"),
        ("hold.pause", "http", ""),
        ("hold.pause", "http", "the bank is down"),
    ]


@pytest.mark.parametrize("queues", [QUEUES, f"{API}/admin/queues"])
def test_a_queue_is_paused_and_resumed(door: House, queues: str) -> None:
    """The answers are those of L4-PAUSE-001 and -002, of EXT-ADM-003, and of http 11.3 and 11.4."""
    paused = door.client.post(f"{queues}/pause-test/pause", json={}).json()
    assert paused["queue"] == {"name": "pause-test", "paused": True}
    assert (paused["name"], paused["paused"], paused["status"]) == ("pause-test", True, "paused")
    [hold] = door.client.get(HOLDS).json()["holds"]
    assert (hold["queue"], hold["since"]) == ("pause-test", paused["paused_at"])
    resumed = door.client.post(f"{queues}/pause-test/resume", json={"rate": 5}).json()
    assert resumed["queue"] == {"name": "pause-test", "paused": False}
    assert (resumed["name"], resumed["paused"], resumed["status"]) == ("pause-test", False, "active")
    assert resumed["resumed_at"] >= paused["paused_at"]
    assert door.client.get(HOLDS).json() == {"holds": []}


def test_the_queues_are_listed_with_their_status_and_numbers(door: House) -> None:
    """In the words of http 11.1, and of EXT-ADM-002; a pause of some jobs does not pause their queue."""
    assert door.client.get(QUEUES).json()["queues"] == []
    door.bury("j-1", queue="mail")
    door.park("h-1", kind="held", queue="slow")
    door.outbox.waiting = {"default": 5, "slow": 2}
    door.bridge.pause(queue="slow")
    door.bridge.pause("billing.*", queue="default")
    client = client_at(door.bridge, unlimited())
    listed = client.get(QUEUES).json()
    found = {queue["name"]: queue["status"] for queue in listed["queues"]}
    assert found == {"default": "active", "mail": "active", "slow": "paused"}
    assert listed["pagination"] == {"total": 3, "limit": 3, "offset": 0, "has_more": False}
    page = client.get(f"{API}/admin/queues", params={"per_page": 2, "page": 2}).json()
    assert page["pagination"] == {"total": 3, "page": 2, "per_page": 2}
    [slow] = page["items"]
    assert (slow["name"], slow["state"], slow["paused"]) == ("slow", "paused", True)
    counts = {name: count for name, count in slow["counts"].items() if count}
    assert counts == {"available": 2, "pending": 1}
    assert client.get(f"{API}/admin/queues").json()["items"][1]["counts"]["discarded"] == 1


def test_what_is_not_there(door: House) -> None:
    door.bridge.pause("on")
    for method, path, what, name in (
        ("GET", f"{HOLDS}/x", "hold", "x"),
        ("POST", f"{HOLDS}/x/resume", "hold", "x"),
        ("POST", f"{QUEUES}/a%2Fb/resume", "paused_queue", "a/b"),
        ("POST", f"{API}/admin/queues/x/resume", "paused_queue", "x"),
    ):
        told = refused(door.client.request(method, path), 404, "not_found")
        assert told["details"] == {"resource_type": what, "resource_id": name}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (HOLDS, {}, "type: a pause needs one of type, queue, error_type, dependency"),
        (HOLDS, {"type": ""}, "type: '': String should have at least 1 character"),
        (HOLDS, {"type": "a", "kind": "x"}, "kind: 'x': Extra inputs are not permitted"),
        (HOLDS, {"type": "a", "until": "2020-01-01T00:00:00Z"}, "until: 2020-01-01 00:00:00+00:00 is in the"),
        (HOLDS, {"type": "a", "until": "soon"}, "until: 'soon': must be a time such as"),
        (HOLDS, {"type": "a", "reason": "x" * 1001}, "reason: "),
        (f"{HOLDS}/pause:type=on/resume", {"rate": 0}, "rate: 0: Input should be greater than or equal"),
        (f"{HOLDS}/pause:type=on/resume", {"rate": "50/s"}, "rate: '50/s': Input should be a valid number"),
        (f"{QUEUES}/a/pause", {"until": "2020-01-01T00:00:00Z"}, "is in the past"),
        (f"{QUEUES}/a/pause", {"queue": "b"}, "queue: 'b': Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be(door: House, path: str, body: dict[str, Any], said: str) -> None:
    """The refusal names the field, the value and the rule, and nothing has changed."""
    door.bridge.pause("on")
    assert said in refused(door.client.post(path, json=body), 400, "invalid_request")["message"]
    assert [hold["id"] for hold in door.client.get(HOLDS).json()["holds"]] == ["pause:type=on"]


def test_a_reader_sees_pauses_and_changes_none(door: House) -> None:
    client = client_at(door.bridge, Access(tokens_of(OPERATOR, READER)))
    reads, writes = with_token(READER), with_token(OPERATOR)
    assert client.post(HOLDS, json={"type": "on"}, headers=writes).status_code == 200
    assert [hold["type"] for hold in client.get(HOLDS, headers=reads).json()["holds"]] == ["on"]
    for path in (HOLDS, f"{HOLDS}/pause:type=on/resume", f"{QUEUES}/a/pause", f"{QUEUES}/a/resume"):
        assert client.post(path, json={}, headers=reads).status_code == 403
    assert client.get(HOLDS).status_code == 401
