"""The routes of bulk operations: an operation goes on without its client, and is stopped by any."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx
import pytest

from ojs_bridge.http.app import guarded
from ojs_bridge.http.operations import MAX_RUNNING
from tests.conftest import store_url
from tests.http.doors import API, House, house, listening, unlimited
from tests.http.test_letters import refused
from tests.servers import eventually

OPERATIONS = f"{API}/operations"


def begin(door: House, **asked: Any) -> dict[str, Any]:
    answer = door.client.post(OPERATIONS, json={"confirm": True, **asked})
    assert answer.status_code == 200, answer.text
    begun: dict[str, Any] = answer.json()
    return begun


def ended(door: House, operation_id: str) -> dict[str, Any]:
    """Return an operation when it has ended."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(door.client.get(f"{OPERATIONS}/{operation_id}").json())
        return found["state"] not in ("running", "stopping")

    eventually(has_ended, seconds=30, what="the end of the operation")
    return found


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
@pytest.mark.parametrize("action", ["retry", "purge"])
def test_a_round_through_all_routes(kind: str, action: str, request: pytest.FixtureRequest) -> None:
    door = house(store_url(kind, request))
    for n in range(30):
        door.bury(f"j-{n}", type="a.b" if n % 2 else "c")
    asked = {"action": action, "filter": {"type": "a.*"}}
    counted = refused(door.client.post(OPERATIONS, json=asked), 400, "invalid_request")
    told = counted["details"]
    assert (told["matched"], told["by_type"], told["filter"]["type"]) == (15, {"a.b": 15}, "a.*")
    searched = refused(
        door.client.post(OPERATIONS, json={"action": action, "filter": {"text": "SLOW"}}),
        400,
        "invalid_request",
    )
    assert searched["details"]["by_type"] == {"a.b": 15, "c": 15}
    # What dies after the question is not among its letters.
    door.bury("late", type="a.b", discarded_at=door.bridge.engine.now() + timedelta(seconds=1))
    asked["filter"] = told["filter"]
    assert door.client.get(OPERATIONS).json() == {"operations": []}
    begun = begin(door, **asked)
    assert (begun["state"], begun["total"], begun["kind"]["type"]) == ("running", 15, "a.*")
    done = ended(door, begun["id"])
    assert (done["state"], done["succeeded"], done["failed"]) == ("done", 15, 0)
    selected = begin(door, action=action, ids=["j-0", "j-2", "gone"])
    assert ended(door, selected["id"])["succeeded"] == 2
    assert (len(door.ids()), "late" in door.ids()) == (14, True)
    assert len(door.outbox.published) == (17 if action == "retry" else 0)
    listed = door.client.get(OPERATIONS, params={"limit": 1}).json()["operations"]
    assert [found["id"] for found in listed] == [selected["id"]]


def test_seven_hundred_selected_letters_are_a_single_request(door: House) -> None:
    ids = [f"j-{n}" for n in range(700)]
    for letter_id in ids:
        door.bury(letter_id)
    assert ended(door, begin(door, action="retry", ids=ids)["id"])["succeeded"] == 700


def test_it_is_stopped_and_resumed(door: House) -> None:
    """The stop says how many letters went; the others stay until the operation is resumed."""
    for n in range(40):
        door.bury(f"j-{n}")
    begun = begin(door, action="retry", rate=10, stop_if_failing=0.5)
    at = f"{OPERATIONS}/{begun['id']}"
    refused(door.client.post(f"{at}/resume"), 409, "x_conflict")
    eventually(lambda: door.outbox.published, what="the first replay")
    assert door.client.delete(at).json()["state"] == "stopping"
    stopped = ended(door, begun["id"])
    assert (stopped["state"], stopped["why"]) == ("stopped", "an operator stopped it")
    assert stopped["succeeded"] == len(door.outbox.published) == 40 - len(door.ids())
    assert door.client.post(f"{at}/resume").json()["state"] == "running"
    done = ended(door, begun["id"])
    assert (done["state"], done["succeeded"], door.ids()) == ("done", 40, [])
    refused(door.client.post(f"{at}/resume"), 409, "x_conflict")
    assert door.client.delete(at).json() == done


def test_a_server_that_ends_stops_its_operations(tmp_path: Any) -> None:
    """No letter stays whose job was sent: resuming the operation would send it again."""
    door = house(f"sqlite:///{tmp_path}/ojs.db")
    for n in range(200):
        door.bury(f"j-{n}")
    asked = {"action": "retry", "rate": 50, "confirm": True}
    with listening(guarded(door.bridge, unlimited())) as address:
        begun = httpx.post(f"{address}{OPERATIONS}", json=asked).json()
        eventually(lambda: len(door.outbox.published) > 20, what="some replays")
    found = door.bridge.operations.get(begun["id"])
    assert (found.state, found.succeeded) == ("stopped", len(door.outbox.published))
    assert {letter.id for letter, _ in door.outbox.published}.isdisjoint(door.ids())


def test_a_few_run_at_a_time(door: House) -> None:
    for n in range(50):
        door.bury(f"j-{n}", queue=f"q-{n % 5}")
    slow = [begin(door, action="retry", rate=0.1, filter={"queue": f"q-{n}"}) for n in range(MAX_RUNNING)]
    late = door.client.post(OPERATIONS, json={"action": "purge", "confirm": True})
    refused(late, 429, "rate_limited")
    for running in slow:
        door.client.delete(f"{OPERATIONS}/{running['id']}")
    assert {ended(door, running["id"])["state"] for running in slow} == {"stopped"}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "action: "),
        ({"action": "burn"}, "action: 'burn': "),
        ({"action": "retry", "ids": []}, "ids: []: "),
        ({"action": "retry", "ids": ["a"], "filter": {"type": "b"}}, "ids: either ids or a filter, not both"),
        ({"action": "retry", "stop_if_failing": 0.5}, "stop_if_failing: 0.5 needs a rate"),
        ({"action": "retry", "rate": 0}, "rate: 0"),
        ({"action": "retry", "limit": 0}, "limit: 0"),
        ({"action": "purge", "limit": 1}, "limit: 1: goes with a replay, and this is a purge"),
        ({"action": "retry", "newest": True}, "newest: True needs a limit"),
        ({"action": "purge", "rate": 1}, "action: a purge has no override, no rate"),
        ({"action": "retry", "override": {"colour": 1}}, "override.colour: "),
        ({"action": "retry", "changes": {"drop": ["a"]}}, "changes.drop: "),
        ({"action": "retry", "changes": {"rename": {"a": ""}}}, "changes.rename.a: '': "),
        (
            {"action": "retry", "changes": {"set": {"a": 1}, "remove": ["a"]}},
            "remove: 'a' must stand in one edit only",
        ),
        ({"action": "purge", "changes": {"remove": ["a"]}}, "action: a purge has no override, no rate"),
        (
            {"action": "retry", "changes": {"remove": ["a"]}, "override": {"args": []}},
            "changes: args and kwargs are replaced already",
        ),
    ],
)
def test_an_operation_that_cannot_be(door: House, asked: dict[str, Any], told: str) -> None:
    answer = door.client.post(OPERATIONS, json={"confirm": True, **asked})
    assert told in refused(answer, 400, "invalid_request")["message"]


def test_ten_letters_before_and_after_and_then_all(door: House) -> None:
    for n in range(12):
        door.bury(f"j-{n}", type="a", message={"args": [n], "kwargs": {"zip": n}, "parameters": ["user"]})
    door.bury("odd", type="b", message={"encoded": "?", "encoding": "utf-8"})
    changes = {"set": {"country": "CH"}, "rename": {"zip": "code"}, "remove": ["user"]}
    asked = {"action": "retry", "filter": {"type": "a"}, "changes": changes}
    [told, *others] = door.client.post(f"{OPERATIONS}/preview", json=asked).json()["letters"]
    n = int(told["id"].removeprefix("j-"))
    assert (told["before"], told["after"]) == (
        {"args": [n], "kwargs": {"zip": n}},
        {"args": [], "kwargs": {"code": n, "country": "CH"}},
    )
    assert (told["parameters"], told["error"], len(others)) == (["user"], None, 9)
    [odd] = door.client.post(
        f"{OPERATIONS}/preview", json={"ids": ["odd", "none"], "changes": changes}
    ).json()["letters"]
    assert (odd["id"], odd["after"]) == ("odd", None)
    assert odd["error"].startswith("args: those of dead letter 'odd' cannot be changed")
    begun = begin(door, **asked)
    assert begun["changes"] == ["remove user", "rename zip", "set country"]
    assert ended(door, begun["id"])["succeeded"] == 12
    assert {(*override.args, *override.kwargs) for override in door.outbox.overrides} == {("code", "country")}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "changes: "),
        ({"changes": {}, "action": "purge"}, "action: 'purge': "),
        ({"changes": {"remove": "a"}}, "changes.remove: 'a': "),
        ({"changes": {}, "ids": ["a"], "filter": {}}, "ids: either ids or a filter, not both"),
    ],
)
def test_a_preview_that_cannot_be(door: House, asked: dict[str, Any], told: str) -> None:
    answer = door.client.post(f"{OPERATIONS}/preview", json=asked)
    assert told in refused(answer, 400, "invalid_request")["message"]


@pytest.mark.parametrize(("method", "rest"), [("GET", ""), ("DELETE", ""), ("POST", "/resume")])
def test_an_unknown_operation(door: House, method: str, rest: str) -> None:
    answer = door.client.request(method, f"{OPERATIONS}/op-1{rest}")
    assert refused(answer, 404, "not_found")["details"]["resource_type"] == "operation"


def test_a_probe_and_its_rest(door: House) -> None:
    """The rest goes once; what matches nothing is no operation."""
    for n in range(12):
        door.bury(f"j-{n}", type="a.b")
    probe = begin(door, action="retry", filter={"type": "a.*"}, limit=3, newest=True, rate=100)
    at = f"{OPERATIONS}/{probe['id']}"
    done = ended(door, probe["id"])
    assert (done["limit"], done["newest"], done["succeeded"], done["rest"]) == (3, True, 3, 9)
    rest = door.client.post(f"{at}/rest").json()
    assert (rest["rest_of"], rest["total"], rest["rate"]) == (probe["id"], 9, 100)
    again = refused(door.client.post(f"{at}/rest"), 409, "x_conflict")
    assert again["message"] == f"the rest of operation {probe['id']!r} was begun before, as {rest['id']!r}"
    assert ended(door, rest["id"])["succeeded"] == 9
    assert door.client.get(at).json()["rest_operation"] == rest["id"]
    refused(door.client.post(f"{OPERATIONS}/{rest['id']}/rest"), 409, "x_conflict")
    refused(door.client.post(f"{OPERATIONS}/op-1/rest"), 404, "not_found")
    asked = {"action": "retry", "filter": {"type": "a.*"}, "confirm": True}
    nothing = refused(door.client.post(OPERATIONS, json=asked), 404, "not_found")
    assert nothing["message"] == "no dead letters match, so nothing was begun"
    assert len(door.client.get(OPERATIONS).json()["operations"]) == 2


def test_what_was_deleted_comes_back(door: House) -> None:
    """By the record of a deletion, and by the operation of a purge; what was deleted for ever does not."""
    for n in range(6):
        door.bury(f"j-{n}")
    assert door.client.delete(f"{API}/dead-letter/j-0").json()["deleted"] is True
    assert door.client.delete(f"{API}/dead-letter/j-1", params={"forever": "true"}).status_code == 200
    purged = ended(door, begin(door, action="purge", ids=["j-2", "j-3"])["id"])
    gone = door.client.delete(f"{API}/dead-letter", params={"confirm": "true", "forever": "true"}).json()
    assert (purged["succeeded"], gone["succeeded"], door.ids()) == (2, 2, [])
    records = door.client.get(f"{API}/audit").json()["records"]
    undone = [door.client.post(f"{API}/audit/{record['id']}/undo") for record in records]
    assert [answer.status_code for answer in undone] == [409, 200, 409, 200]
    assert undone[1].json() == {"restored": 2, "stayed": 0, "errors": []}
    assert sorted(door.ids()) == ["j-0", "j-2", "j-3"]
    again = refused(door.client.post(f"{OPERATIONS}/{purged['id']}/undo"), 409, "x_conflict")
    assert "is in the bin" in again["message"]
    refused(door.client.post(f"{OPERATIONS}/op-1/undo"), 404, "not_found")
