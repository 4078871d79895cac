"""The routes of what waits: parked retries and scheduled jobs, in the specification's words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge.rules.job import parse_time
from tests.conftest import store_url
from tests.http.doors import API, JOBS, WAITING, House, house
from tests.http.test_letters import refused
from tests.http.test_operations import OPERATIONS, begin, ended
from tests.lives import FRAMEWORK
from tests.operations.test_bulk_retries import due, fill


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_a_round_through_all_routes(kind: str, request: pytest.FixtureRequest) -> None:
    """Retries of every store are listed in pages, filtered, got, run now and cancelled."""
    door = house(store_url(kind, request))
    for name, queue in (("j-1", "a"), ("j-2", "b"), ("x/run", "b")):
        door.park(name, queue=queue)
    ask = door.client
    first = ask.get(WAITING, params={"limit": 2}).json()
    assert [job["state"] for job in first["jobs"]] == ["retryable", "retryable"]
    told = first["pagination"]
    assert (told["total"], told["limit"], told["has_more"]) == (3, 2, True)
    rest = ask.get(WAITING, params={"limit": 2, "cursor": told["next_cursor"]}).json()
    assert len({job["id"] for job in (*first["jobs"], *rest["jobs"])}) == 3
    assert [job["id"] for job in ask.get(WAITING, params={"queue": "a"}).json()["jobs"]] == ["j-1"]
    assert len(ask.get(WAITING, params={"type": "billing.*", "offset": 2}).json()["jobs"]) == 1
    parked = door.bridge.retries.get("j-1").to_ojs()
    assert (parked["state"], parked["attempt"]) == ("retryable", 2)
    assert ask.get(f"{JOBS}/j-1").json()["job"].items() >= {**parked, "parameters": []}.items()
    job = ask.post(f"{WAITING}/j-1/run").json()["job"]
    assert parse_time(job["next_retry_at"]) <= door.bridge.engine.now()
    assert door.bridge.retries.get("j-1").next_retry_at <= door.bridge.engine.now()
    assert job == {**parked, "next_retry_at": job["next_retry_at"]}
    told = ask.delete(f"{JOBS}/x%2Frun").json()["job"]
    assert (told["id"], told["state"], "cancelled_at" in told) == ("x/run", "cancelled", True)
    assert door.bridge.retries.count() == 2


def test_what_is_not_there(door: House) -> None:
    """The job is unknown."""
    for method, path in (
        ("GET", f"{JOBS}/x"),
        ("DELETE", f"{JOBS}/x"),
        ("POST", f"{WAITING}/x/run"),
        ("POST", f"{API}/admin/jobs/x/cancel"),
    ):
        answer = door.client.request(method, path)
        assert answer.status_code == 404
        assert answer.json()["error"]["details"] == {"resource_type": "job", "resource_id": "x"}


def test_one_that_is_being_published(door: House) -> None:
    """The answer is a conflict."""
    door.park("j-1", next_retry_at=door.bridge.engine.now())
    assert door.bridge.store is not None
    now = door.bridge.engine.now()
    door.bridge.store.parked.claim_due(FRAMEWORK, now=now, until=now.replace(year=now.year + 1), limit=1)
    for method, path in (("DELETE", f"{JOBS}/j-1"), ("POST", f"{WAITING}/j-1/run")):
        answer = door.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "x_conflict")


@pytest.mark.parametrize(
    "query",
    ["limit=0", "cursor=made-up", "text=a&offset=1", "offset=-1", "group=0123456789abcdef", "kind=kept"],
)
def test_a_query_that_is_wrong(door: House, query: str) -> None:
    assert door.client.get(f"{WAITING}?{query}").status_code == 400


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_many_are_found_run_and_cancelled(kind: str, request: pytest.FixtureRequest) -> None:
    door = house(store_url(kind, request))
    fill(door.bridge)
    listed = door.client.get(WAITING, params={"text": "no answer 3"}).json()
    assert ([job["id"] for job in listed["jobs"]], listed["pagination"]["total"]) == (["r-3"], None)
    asked = {"action": "run", "filter": {"error_type": "auth.*"}}
    counted = refused(door.client.post(OPERATIONS, json=asked), 400, "invalid_request")
    assert (counted["details"]["matched"], "5 waiting jobs" in counted["message"]) == (5, True)
    assert sum(counted["details"]["by_type"].values()) == 5
    assert ended(door, begin(door, **asked)["id"])["succeeded"] == 5
    assert due(door.bridge) == {f"r-{n}" for n in (1, 3, 5, 7, 9)}
    assert ended(door, begin(door, action="cancel", ids=["r-0", "r-1"])["id"])["succeeded"] == 2
    assert door.bridge.retries.count() == 8


def test_a_scheduled_job_is_seen_and_steered(door: House) -> None:
    """Its state and its time have the specification's words (core 6, http 7.7 and 7.9, adm 7.3)."""
    door.park("r-1")
    for name in ("s-1", "s-2", "s-3"):
        door.park(name, kind="scheduled", attempt=1, fence=0, state={"v": 1, "attempt": 1})
    ask = door.client
    for kind, count, state in (("retry", 1, "retryable"), ("scheduled", 3, "scheduled")):
        listed = ask.get(WAITING, params={"kind": kind}).json()
        assert (listed["total"], {job["state"] for job in listed["jobs"]}) == (count, {state})
    job = ask.get(f"{JOBS}/s-1").json()["job"]
    assert (job["state"], job["attempt"], "next_retry_at" in job) == ("scheduled", 1, False)
    assert ask.get(f"{API}/admin/jobs/s-1").json() == job
    moved = ask.post(f"{WAITING}/s-1/move", json={"at": "2030-01-01T00:00:00+01:00"}).json()["job"]
    assert moved == {
        **{name: job[name] for name in moved if name != "scheduled_at"},
        "scheduled_at": "2029-12-31T23:00:00.000Z",
    }
    assert door.bridge.scheduled.get("s-1").next_retry_at == parse_time(moved["scheduled_at"])
    past = ask.post(f"{WAITING}/s-2/move", json={"at": "1999-01-01T00:00:00Z"}).json()["job"]
    assert abs((parse_time(past["scheduled_at"]) - door.bridge.engine.now()).total_seconds()) < 60
    for cancel in (lambda: ask.delete(f"{JOBS}/s-2"), lambda: ask.post(f"{API}/admin/jobs/s-3/cancel")):
        assert cancel().json()["job"]["state"] == "cancelled"
    assert [found.id for found in door.bridge.waiting.list().jobs] == ["r-1", "s-1"]


def test_a_dead_letter_is_not_cancelled(door: House) -> None:
    """It is in a terminal state: a conflict (http 7.7)."""
    door.bury("j-1")
    assert door.client.get(f"{JOBS}/j-1").json()["job"]["state"] == "discarded"
    refused(door.client.delete(f"{JOBS}/j-1"), 409, "x_conflict")
    assert door.ids() == ["j-1"]


@pytest.mark.parametrize("at", ["tomorrow", "2030-01-01T00:00:00", 7, None])
def test_a_time_that_is_none(door: House, at: Any) -> None:
    door.park("r-1")
    error = refused(door.client.post(f"{WAITING}/r-1/move", json={"at": at}), 400, "invalid_request")
    assert error["message"].startswith("at: ")


def test_one_kind_is_moved_by_the_many(door: House) -> None:
    """Without consent their number is told; dead letters have no kind, and a run has no time."""
    door.park("r-1")
    door.park("s-1", kind="scheduled")
    at = "2030-01-01T00:00:00.000Z"
    asked = {"action": "move", "filter": {"kind": "scheduled"}, "at": at}
    counted = refused(door.client.post(OPERATIONS, json=asked), 400, "invalid_request")
    assert (counted["details"]["matched"], counted["details"]["filter"]["kind"]) == (1, "scheduled")
    done = ended(door, begin(door, **asked)["id"])
    assert (done["succeeded"], done["at"]) == (1, at)
    assert door.bridge.scheduled.get("s-1").next_retry_at == parse_time(at)
    for wrong in (
        {"action": "purge", "filter": {"kind": "retry"}},
        {"action": "run", "at": at},
        {"action": "move"},
    ):
        refused(door.client.post(OPERATIONS, json={**wrong, "confirm": True}), 400, "invalid_request")


def test_what_falls_due(door: House) -> None:
    """The next hour, or a longer time, by kind; what the store cannot tell is refused."""
    minute = timedelta(minutes=1)
    for n, kind in enumerate(("retry", "scheduled", "held")):
        door.park(f"j-{n}", kind=kind, next_retry_at=door.bridge.engine.now() + 30 * minute)
    hour = door.client.get(f"{WAITING}/due").json()
    assert (hour["late"], hour["step_seconds"]) == (0, 60)
    assert {kind: (len(counts), sum(counts)) for kind, counts in hour["by_kind"].items()} == {
        "retry": (60, 1),
        "scheduled": (60, 1),
    }
    week = door.client.get(f"{WAITING}/due", params={"within": "P7D", "kind": "scheduled"}).json()
    assert [len(week["by_kind"]["scheduled"]), *week["by_kind"]] == [84, "scheduled"]
    for wrong in ("within=PT2H", "kind=held", "text=x"):
        refused(door.client.get(f"{WAITING}/due?{wrong}"), 400, "invalid_request")
