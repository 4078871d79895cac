"""The official clients of the specification, request by request: the SDK for Python, the CLI, the admin UI.

Each test names the vectors of the conformance suite for which it stands.
"""

from __future__ import annotations

from datetime import timedelta
from email.message import Message
from importlib import metadata
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from ojs_bridge.http import app_for
from ojs_bridge.http.app import document
from ojs_bridge.http.guarding import Access, tokens_of
from ojs_bridge.operations.health import Beat
from ojs_bridge.rules.job import format_time
from ojs_bridge.store import BOUNDS, Rate
from tests.conftest import store_url
from tests.http.doors import (
    API,
    LETTERS,
    OPERATOR,
    READER,
    WAITING,
    House,
    client_at,
    house,
    unlimited,
    with_token,
)
from tests.http.test_letters import refused
from tests.lives import FRAMEWORK
from tests.servers import eventually
from tests.store.test_rates import record

ADMIN = f"{API}/admin"
OJS, JSON = "application/openjobspec+json", "application/json"
#: The header has the text of both types: the SDK for Python looks for the second one in it.
TOLD = {OJS: f'{OJS}; also="{JSON}"', JSON: JSON}
#: What the CLI and the admin UI send with each request.
CLI = {"Content-Type": OJS, "Accept": OJS}
UI = {"Content-Type": JSON, "Accept": "*/*"}


@pytest.mark.parametrize(
    ("accept", "told"),
    [
        (OJS, OJS),
        (OJS.upper(), OJS),
        (f"{JSON}, {OJS}", OJS),
        (f"{JSON};q=0.5, {OJS}", OJS),
        (f"{OJS}; charset=utf-8", OJS),
        (JSON, JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("", JSON),
        ("text/html", JSON),
        (f"{OJS};q=0.5, {JSON}", JSON),
        (f"{OJS};q=0", JSON),
        (f"{OJS};q=0.000", JSON),
        (f"text/html, {OJS} ; v=1 ; q=0.2, {JSON};q=0.1", OJS),
        (f"{OJS}x", JSON),
    ],
)
def test_the_content_type_follows_accept(door: House, accept: str, told: str) -> None:
    """The OJS type is for a client that asks for it, in answers and in errors."""
    door.bury("j-1")
    for path, status in ((LETTERS, 200), (f"{LETTERS}/j-1", 200), (f"{LETTERS}/x", 404), ("/ojs/v1/x", 404)):
        answer = door.client.get(path, headers={"Accept": accept})
        assert (answer.status_code, answer.headers["content-type"]) == (status, TOLD[told])
    answer = door.client.post(f"{LETTERS}/j-1/retry", headers={"Accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, TOLD[told])


def test_the_type_of_an_answer_is_read_by_parsers_and_by_a_search(door: House) -> None:
    """As RFC 9110, section 8.3.1, writes a type and its parameter."""
    header = door.client.get(LETTERS, headers=CLI).headers["content-type"]
    assert JSON in header
    parsed = Message()
    parsed["Content-Type"] = header
    assert (parsed.get_content_type(), parsed.get_param("also")) == (OJS, JSON)


def test_a_list_has_its_total_and_a_letter_its_death_at_the_top(door: House) -> None:
    """`ojs dead-letter` of the CLI prints both (vectors L1-DLQ-001 and L1-DLQ-003)."""
    died = {name: format_time(door.bury(name).discarded_at) for name in ("j-1", "j-2")}
    door.park("r-1")
    listed = door.client.get(LETTERS, params={"limit": 1}, headers=CLI).json()
    assert (listed["total"], listed["pagination"]["total"], len(listed["jobs"])) == (2, 2, 1)
    jobs = door.client.get(LETTERS, headers=CLI).json()["jobs"]
    assert {job["id"]: job["discarded_at"] for job in jobs} == died
    assert door.client.get(f"{LETTERS}/j-1", headers=CLI).json()["discarded_at"] == died["j-1"]
    assert door.client.get(WAITING, headers=CLI).json()["total"] == 1


def test_the_manifest(door: House) -> None:
    """The SDK and the admin UI ask for it first (vector L0-OPS-019). It claims what is there, and no more."""
    for accept in (OJS, JSON):
        answer = door.client.get("/ojs/manifest", headers={"Accept": accept})
        assert (answer.status_code, answer.headers["content-type"]) == (200, TOLD[accept])
        told = answer.json()
        assert (told["specversion"], told["ojs_version"], told["protocols"]) == ("1.0", "1.0", ["http"])
        assert told["implementation"] == {
            "name": "ojs-bridge", "version": metadata.version("ojs-bridge"), "language": "python",
        }  # fmt: skip
        assert (told["conformance_level"], told["backend"]) == (0, "sql")
        assert (told["capabilities"], told["extensions"]) == ({"dead_letter": True}, [])
    assert door.client.get("/ojs/manifest", params={"x": 1}).status_code == 400
    app = Starlette(routes=[Mount("/jobs", app_for(door.bridge, open_to_all=True))])
    assert TestClient(app).get("/jobs/ojs/manifest").json() == told


def test_the_health(door: House) -> None:
    """`ojs health` of the CLI and `health()` of the SDK (vector L0-OPS-020)."""
    # A busy machine may not answer within the three seconds of a check.
    eventually(lambda: door.client.get(f"{API}/health", headers=CLI).status_code == 200)
    assert door.client.get(f"{API}/health", headers=CLI).json()["status"] == "degraded"


def test_the_sdk(door: House) -> None:
    """It reads an answer as JSON if its content type says so (vectors L1-DLQ-002, L1-DLQ-004)."""
    for name in ("a/1", "b"):
        door.bury(name, queue="q", message={"args": [1]})
    sdk = {"Content-Type": OJS, "Accept": JSON, "OJS-Version": "1.0", "X-Request-ID": "1-2"}
    listed = door.client.get(LETTERS, params={"limit": 50, "offset": 0, "queue": "q"}, headers=sdk)
    assert JSON in listed.headers["content-type"]
    assert {job["id"] for job in listed.json()["jobs"]} == {"a/1", "b"}
    retried = door.client.post(f"{LETTERS}/a%2F1/retry", headers=sdk)
    assert JSON in retried.headers["content-type"]
    job = retried.json()["job"]
    assert (job["id"], job["state"], job["attempt"]) == ("a/1", "available", 0)
    deleted = door.client.delete(f"{LETTERS}/b", headers=sdk)
    assert (deleted.status_code, deleted.json()) == (200, {"deleted": True, "job_id": "b"})
    assert JSON in deleted.headers["content-type"]
    assert door.ids() == []
    assert door.client.get(f"{LETTERS}/b", headers=sdk).status_code == 404


def test_the_cli_purges_by_age(door: House) -> None:
    """`ojs dead-letter -purge -older-than 7d` sends no body and no confirm, and reads `deleted`."""
    now = door.bridge.engine.now()
    for days in range(12):
        door.bury(f"j-{days:02}", discarded_at=now - timedelta(days=days, minutes=1))

    def purged(age: str) -> int:
        answer = door.client.post(f"{LETTERS}/purge?older_than={age}", headers=CLI)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["action"], told["matched"], told["failed"]) == ("purge", told["deleted"], 0)
        return int(told["deleted"])

    assert [purged(age) for age in ("99999w", "P9999Y", "7d", "168h", "P5D")] == [0, 0, 5, 0, 2]
    assert purged(format_time(now - timedelta(days=4))) == 1
    assert door.ids() == ["j-00", "j-01", "j-02", "j-03"]
    [record, *_] = door.client.get(f"{API}/audit", params={"action": "dead_letter.delete"}).json()["records"]
    assert record["count"] == 1


@pytest.mark.parametrize("age", [None, "0d", "PT0S", "2200-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
@pytest.mark.parametrize("path", ["/dead-letter/purge", "/admin/dead-letter"])
def test_a_purge_of_all_needs_the_confirmation(door: House, path: str, age: str | None) -> None:
    """An age that every letter has is no filter. The number is told, as for every other purge."""
    door.bury("j-1")
    method = "DELETE" if "admin" in path else "POST"
    asked = {"older_than": age} if age else {}
    error = refused(door.client.request(method, API + path, params=asked), 400, "invalid_request")
    assert error["details"]["matched"] == 1
    error = refused(door.client.request(method, API + path, json=asked), 400, "invalid_request")
    assert (error["details"]["matched"], door.ids()) == (1, ["j-1"])
    done = door.client.request(method, API + path, json={**asked, "confirm": True})
    assert (done.json()["deleted"], door.ids()) == (1, [])


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        ({"older_than": "week"}, {}),
        ({"older_than": "-7d"}, {}),
        ({"older_than": "1.5d"}, {}),
        ({"older_than": ""}, {}),
        ({"older_than": "2026-11-21T10:00:00"}, {}),
        ({"older_then": "7d"}, {}),
        ({"older_than": "7d", "queue": "q"}, {}),
        ({"older_than": "7d"}, {"older_than": "7d"}),
        ({"older_than": "7d"}, {"confirm": True}),
        ({"confirm": "yes"}, {}),
        ({}, {"confirm": "true"}),
        ({}, {"older_than": 7}),
        ({}, {"filter": {"queue": "q"}, "confirm": True}),
    ],
)
def test_a_purge_that_is_wrong(door: House, asked: dict[str, str], body: dict[str, Any]) -> None:
    """A misspelt age, and a filter that the route does not know, purge nothing."""
    door.bury("j-1", discarded_at=door.bridge.engine.now() - timedelta(days=30))
    for method, path in (("POST", "/dead-letter/purge"), ("DELETE", "/admin/dead-letter")):
        answer = door.client.request(method, API + path, params=asked, json=body)
        error = refused(answer, 400, "invalid_request")
        assert "matched" not in error["details"]
    assert door.ids() == ["j-1"]


def test_an_age_alone_is_no_consent_to_the_admin_api(door: House) -> None:
    """The admin API wants `confirm: true` of each purge (adm 11.3)."""
    door.bury("old", discarded_at=door.bridge.engine.now() - timedelta(days=30))
    door.bury("new")
    age = {"older_than": format_time(door.bridge.engine.now() - timedelta(days=7))}
    error = refused(door.client.request("DELETE", f"{ADMIN}/dead-letter", json=age), 400, "invalid_request")
    assert error["details"]["matched"] == 1
    done = door.client.request("DELETE", f"{ADMIN}/dead-letter", json={**age, "confirm": True})
    assert (done.status_code, done.json()["deleted"], door.ids()) == (200, 1, ["new"])


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_the_admin_ui_lists_dead_letters(kind: str, request: pytest.FixtureRequest) -> None:
    """By numbered pages, whose total is a number whatever the filter (vectors EXT-DLQ-001 and -002)."""
    door = house(store_url(kind, request))
    assert door.client.get(f"{ADMIN}/dead-letter", headers=UI).json() == {
        "items": [], "pagination": {"total": 0, "page": 1, "per_page": 20},
    }  # fmt: skip
    now = door.bridge.engine.now()
    for n in range(7):
        died = now - timedelta(seconds=100 - n)
        door.bury(f"j-{n}", type="a.b" if n % 2 else "c", queue="q", discarded_at=died, created_at=died)

    def listed(**asked: Any) -> tuple[list[str], dict[str, int]]:
        answer = door.client.get(f"{ADMIN}/dead-letter", params=asked, headers=UI).json()
        return [item["id"] for item in answer["items"]], answer["pagination"]

    assert listed(page=1, per_page=3) == (["j-6", "j-5", "j-4"], {"total": 7, "page": 1, "per_page": 3})
    assert listed(page=3, per_page=3) == (["j-0"], {"total": 7, "page": 3, "per_page": 3})
    assert listed(page=4, per_page=3) == ([], {"total": 7, "page": 4, "per_page": 3})
    some = {"queue": "q", "type": "a.*", "state": "discarded", "per_page": 2}
    assert listed(**some) == (["j-5", "j-3"], {"total": 3, "page": 1, "per_page": 2})
    assert listed(since=format_time(now - timedelta(seconds=95)), per_page=1)[1]["total"] == 2
    [item] = door.client.get(f"{ADMIN}/dead-letter", params={"per_page": 1}, headers=UI).json()["items"]
    assert item["created_at"] == item["discarded_at"] == format_time(now - timedelta(seconds=94))
    assert (item["state"], item["queue"], item["type"]) == ("discarded", "q", "c")
    told = door.client.get(f"{ADMIN}/dead-letter/stats", headers=UI)
    assert told.json() == door.client.get(f"{LETTERS}/stats").json()
    assert (told.json()["total"], told.json()["by_queue"]) == (7, {"q": 7})
    for wrong in ({"page": 0}, {"per_page": 101}, {"page": 500, "per_page": 100}, {"state": "active"},
                  {"sort": "type"}, {"limit": 5}):  # fmt: skip
        answer = door.client.get(f"{ADMIN}/dead-letter", params=wrong, headers=UI)
        error = refused(answer, 400, "invalid_request")
        assert next(iter(wrong)) in error["message"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_the_admin_ui_lists_jobs(kind: str, request: pytest.FixtureRequest) -> None:
    """By state, queue and type, over the end of what waits and into the dead letters (ADM-003)."""
    door = house(store_url(kind, request))
    now = door.bridge.engine.now()
    for n in range(3):
        due, wish = now + timedelta(hours=n + 1), {"v": 1, "attempt": 1, "created_at": format_time(now)}
        door.park(f"r-{n}", queue="q", type="a.b", next_retry_at=due)
        door.park(f"s-{n}", kind="scheduled", attempt=1, fence=0, state=wish, type="c", next_retry_at=due)
        door.bury(f"d-{n}", queue="q", type="a.b" if n else "c", discarded_at=now - timedelta(seconds=n))

    def listed(**asked: Any) -> tuple[list[str], dict[str, int]]:
        answer = door.client.get(f"{ADMIN}/jobs", params=asked, headers=UI).json()
        return [item["id"] for item in answer["items"]], answer["pagination"]

    retries, delays, dead = ([f"{letter}-{n}" for n in range(3)] for letter in "rsd")
    soonest_first = {"state": "scheduled", "sort": "scheduled_at", "order": "asc"}
    assert listed(**soonest_first) == (delays, {"total": 3, "page": 1, "per_page": 20})
    assert listed(state="retryable", per_page=2, page=2) == (
        retries[2:],
        {"total": 3, "page": 2, "per_page": 2},
    )
    assert listed(state="discarded", type="a.*", per_page=1)[1]["total"] == 2
    assert (listed(queue="q")[0], listed(type="c", per_page=3)[0]) == (retries + dead, delays)
    pages = [listed(per_page=4, page=page) for page in (1, 2, 3, 4)]
    assert [len(ids) for ids, _ in pages] == [4, 4, 1, 0]
    assert {place["total"] for _, place in pages} == {9}
    jobs = [job for ids, _ in pages for job in ids]
    assert (sorted(jobs[:6]), jobs[6:]) == (retries + delays, dead)
    [job] = door.client.get(f"{ADMIN}/jobs", params={**soonest_first, "per_page": 1}).json()["items"]
    assert job == door.client.get(f"{ADMIN}/jobs/s-0").json()
    assert (job["created_at"], job["state"]) == (format_time(now), "scheduled")
    door.park("h-1", kind="held")
    assert listed(state="pending")[0] == ["h-1"]


def test_a_state_that_the_store_does_not_know(door: House) -> None:
    """The list is empty and says why; what the specification does not know is refused."""
    door.park("r-1")
    for state in ("available", "active", "completed", "cancelled"):
        answer = door.client.get(f"{ADMIN}/jobs", params={"state": state}, headers=UI).json()
        assert (answer["items"], answer["pagination"]["total"], state in answer["note"]) == ([], 0, True)
    assert "note" not in door.client.get(f"{ADMIN}/jobs", params={"state": "discarded"}).json()
    for wrong in ({"state": "dead"}, {"sort": "priority"}, {"order": "desc"}, {"page": 502}, {"since": "x"}):
        error = refused(door.client.get(f"{ADMIN}/jobs", params=wrong), 400, "invalid_request")
        assert next(iter(wrong)) in error["message"]


def test_the_admin_ui_shows_a_job(door: House) -> None:
    """A dead letter or a parked retry (vector EXT-ADM-004); the UI reads each of these fields."""
    policy = {"max_attempts": 3}
    buried = door.bury("a/1", type="t", queue="q", message={"args": [1]}, policy=policy, retry=policy)
    door.bury("bare", message={"encoded": "?", "encoding": "utf-8"}, errors=())
    door.park("r-1")
    job = door.client.get(f"{ADMIN}/jobs/a%2F1", headers=UI).json()
    assert (job["id"], job["type"], job["queue"], job["args"]) == ("a/1", "t", "q", [1])
    assert (job["state"], job["specversion"], job["retry_policy"]) == ("discarded", "1.0", policy)
    assert job["discarded_at"] == job["metadata"]["discarded_at"] == format_time(buried.discarded_at)
    assert {"attempt", "message", "type", "occurred_at"} <= set(job["errors"][-1])
    bare = door.client.get(f"{ADMIN}/jobs/bare", headers=UI).json()
    assert (bare["args"], bare["meta"], bare["errors"]) == (None, {}, [])
    assert "retry_policy" not in bare
    parked = door.client.get(f"{ADMIN}/jobs/r-1", headers=UI).json()
    assert (parked["id"], parked["state"], parked["meta"]) == ("r-1", "retryable", {})
    assert parked["next_retry_at"]
    refused(door.client.get(f"{ADMIN}/jobs/x", headers=UI), 404, "not_found")


def test_the_admin_ui_replays_and_deletes(door: House) -> None:
    """One in the list, one in its details, one for good, and all (EXT-DLQ-003, -004 and EXT-ADM-006)."""
    for name in ("listed", "shown", "deleted", "rest"):
        door.bury(name)
    for path in ("dead-letter/listed", "jobs/shown"):
        job = door.client.post(f"{ADMIN}/{path}/retry", headers=UI).json()["job"]
        assert (job["state"], job["attempt"]) == ("available", 0)
    answer = door.client.delete(f"{ADMIN}/dead-letter/deleted", headers=UI)
    assert (answer.status_code, answer.content, "content-type" in answer.headers) == (204, b"", False)
    assert door.ids() == ["rest"]
    refused(door.client.delete(f"{ADMIN}/dead-letter/deleted", headers=UI), 404, "not_found")
    for asked in ({"filter": {}}, {"filter": {}, "confirm": False}):
        refused(door.client.post(f"{ADMIN}/dead-letter/retry", json=asked), 400, "invalid_request")
    done = door.client.post(f"{ADMIN}/dead-letter/retry", json={"filter": {}, "confirm": True}).json()
    assert done == {"action": "retry", "matched": 1, "succeeded": 1, "failed": 0, "errors": []}
    assert [letter.id for letter, _ in door.outbox.published] == ["listed", "shown", "rest"]


def test_the_admin_ui_counts(door: House) -> None:
    """Every number is a number (vector EXT-ADM-001), also where nobody knows it."""
    counts = ("available", "active", "pending", "scheduled", "retryable", "completed", "discarded",
              "cancelled")  # fmt: skip
    assert door.client.get(f"{ADMIN}/stats", headers=UI).json() == {
        "queues": 0, "workers": 0, "jobs": dict.fromkeys(counts, 0),
        "throughput": {"processed_per_minute": 0, "failed_per_minute": 0},
    }  # fmt: skip
    door.bury("j-1")
    for name in ("r-1", "r-2"):
        door.park(name)
    door.park("s-1", kind="scheduled")
    door.outbox.waiting = {"q": 5}
    Beat(door.bridge.engine.context, FRAMEWORK, lambda: ["q", "r"]).tell()
    store = door.bridge.store
    assert store is not None
    now = door.bridge.engine.now()
    for ago, outcome, runs in ((5, "completed", 60), (5, "retried", 30), (5, "recovered", 9),
                               (5, "dead_lettered", 30), (300, "completed", 40)):  # fmt: skip
        record(store, [Rate(now - timedelta(minutes=ago), "t", "q", outcome, (runs, *[0] * len(BOUNDS)))])
    client = client_at(door.bridge, unlimited())
    assert client.get(f"{ADMIN}/stats", headers=UI).json() == {
        "queues": 2, "workers": 1,
        "jobs": {
            **dict.fromkeys(counts, 0), "available": 5, "retryable": 2, "scheduled": 1, "completed": 100,
            "discarded": 1,
        },
        "throughput": {"processed_per_minute": 2, "failed_per_minute": 1},
    }  # fmt: skip
    refused(client.get(f"{ADMIN}/stats", params={"queue": "q"}), 400, "invalid_request")


#: The routes that this test guards, and the id that stands for each.
GUARDED = [
    (method.upper(), path.replace("{id}", "j-1"))
    for path, methods in document()["paths"].items()
    for method in methods
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_every_route_is_guarded(door: House, method: str, path: str) -> None:
    """No route is open without a token but the health; a reader writes nothing; nor does a foreign page."""
    door.bury("j-1", discarded_at=door.bridge.engine.now() - timedelta(days=30))
    door.park("j-1")
    client = client_at(door.bridge, Access(tokens_of(OPERATOR, READER)))
    query = "?older_than=7d" if path.endswith("/purge") else ""
    anonymous = client.request(method, path + query)
    assert anonymous.status_code == (200 if path == f"{API}/health" else 401)
    reader = client.request(method, path + query, headers=with_token(READER))
    assert (reader.status_code == 403) is (method != "GET")
    foreign = {"Content-Type": "text/plain", "X-OJS-Bridge": ""}
    strange = [foreign, {**UI, "Origin": "http://evil.example"}, {**UI, "Sec-Fetch-Site": "cross-site"}]
    for headers in strange if method != "GET" else ():
        refused(door.client.request(method, path + query, headers=headers), 403, "x_forbidden")
    refused(door.client.request(method, path, headers={"Host": "evil.example"}), 403, "x_forbidden")
    assert (door.ids(), door.bridge.retries.count(), door.outbox.published) == (["j-1"], 1, [])
