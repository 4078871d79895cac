"""The parked retries' routes."""

from __future__ import annotations

from typing import Any

import pytest

from ojs_bridge.rules.job import parse_time
from tests.conftest import store_url
from tests.http.doors import RETRIES, House, house
from tests.http.test_letters import refused
from tests.http.test_operations import OPERATIONS, begin, ended
from tests.lives import FRAMEWORK
from tests.operations.test_bulk_retries import due, fill


@pytest.fixture
def door(tmp_path: Any) -> House:
    """A door to an empty SQLite store."""
    return house(f"sqlite:///{tmp_path}/ojs.db")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_a_round_through_all_routes(kind: str, request: pytest.FixtureRequest) -> None:
    """Retries of every store are listed in pages, filtered, got, run now and cancelled."""
    door = house(store_url(kind, request))
    for name, queue in (("j-1", "a"), ("j-2", "b"), ("x/run", "b")):
        door.park(name, queue=queue)
    ask = door.client
    first = ask.get(RETRIES, params={"limit": 2}).json()
    assert [job["state"] for job in first["jobs"]] == ["retryable", "retryable"]
    told = first["pagination"]
    assert (told["total"], told["limit"], told["has_more"]) == (3, 2, True)
    rest = ask.get(RETRIES, params={"limit": 2, "cursor": told["next_cursor"]}).json()
    assert len({job["id"] for job in (*first["jobs"], *rest["jobs"])}) == 3
    assert [job["id"] for job in ask.get(RETRIES, params={"queue": "a"}).json()["jobs"]] == ["j-1"]
    assert len(ask.get(RETRIES, params={"type": "billing.*", "offset": 2}).json()["jobs"]) == 1
    parked = door.bridge.retries.get("j-1").to_ojs()
    assert (parked["state"], parked["attempt"]) == ("retryable", 2)
    assert ask.get(f"{RETRIES}/j-1").json() == {**parked, "parameters": []}
    job = ask.post(f"{RETRIES}/j-1/run").json()["job"]
    assert parse_time(job["next_retry_at"]) <= door.bridge.engine.now()
    assert door.bridge.retries.get("j-1").next_retry_at <= door.bridge.engine.now()
    assert job == {**parked, "next_retry_at": job["next_retry_at"]}
    assert ask.delete(f"{RETRIES}/x%2Frun").json() == {"deleted": True, "job_id": "x/run"}
    assert door.bridge.retries.count() == 2


def test_what_is_not_there(door: House) -> None:
    """The job is unknown."""
    for method, path in (("GET", "x"), ("DELETE", "x"), ("POST", "x/run")):
        answer = door.client.request(method, f"{RETRIES}/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["details"] == {"resource_type": "parked_retry", "resource_id": "x"}


def test_one_that_is_being_published(door: House) -> None:
    """The answer is a conflict."""
    door.park("j-1", next_retry_at=door.bridge.engine.now())
    assert door.bridge.store is not None
    now = door.bridge.engine.now()
    door.bridge.store.parked.claim_due(FRAMEWORK, now=now, until=now.replace(year=now.year + 1), limit=1)
    for method, path in (("DELETE", "j-1"), ("POST", "j-1/run")):
        answer = door.client.request(method, f"{RETRIES}/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "x_conflict")


@pytest.mark.parametrize(
    "query", ["limit=0", "cursor=made-up", "text=a&offset=1", "offset=-1", "group=0123456789abcdef"]
)
def test_a_query_that_is_wrong(door: House, query: str) -> None:
    assert door.client.get(f"{RETRIES}?{query}").status_code == 400


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_many_are_found_run_and_cancelled(kind: str, request: pytest.FixtureRequest) -> None:
    door = house(store_url(kind, request))
    fill(door.bridge)
    listed = door.client.get(RETRIES, params={"text": "no answer 3"}).json()
    assert ([job["id"] for job in listed["jobs"]], listed["pagination"]["total"]) == (["r-3"], None)
    asked = {"action": "run", "filter": {"error_type": "auth.*"}}
    counted = refused(door.client.post(OPERATIONS, json=asked), 400, "invalid_request")
    assert (counted["details"]["matched"], "5 waiting jobs" in counted["message"]) == (5, True)
    assert sum(counted["details"]["by_type"].values()) == 5
    assert ended(door, begin(door, **asked)["id"])["succeeded"] == 5
    assert due(door.bridge) == {f"r-{n}" for n in (1, 3, 5, 7, 9)}
    assert ended(door, begin(door, action="cancel", ids=["r-0", "r-1"])["id"])["succeeded"] == 2
    assert door.bridge.retries.count() == 8
