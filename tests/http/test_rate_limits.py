"""The routes of limits; that they hold stands in tests/contract."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, Dependency
from ojs_bridge.engine.runs import Held
from ojs_bridge.http.guarding import Access, tokens_of
from ojs_bridge.rules.job import Job, format_time
from tests.conftest import store_url
from tests.engine.test_limits import begin, begun
from tests.http.doors import API, OPERATOR, READER, House, client_at, house, with_token
from tests.http.test_letters import refused

LIMITS, HOLDS = f"{API}/rate-limits", f"{API}/holds"
BANK = Dependency("bank", jobs=["act"], rate="100/m", concurrency=5)
SHOP = Dependency("shop", jobs=["sync"], concurrency=2, key="account")
DOWN = Dependency("down", errors=["external.down.*"], jobs=["mail"])


@pytest.fixture
def door(tmp_path: Path) -> House:
    """A door to a fleet with two limits, and a dependency that has none."""
    return house(f"sqlite:///{tmp_path}/ojs.db", dependencies=[BANK, SHOP, DOWN])


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_a_limit_is_changed_for_a_while_and_taken_back(kind: str, request: pytest.FixtureRequest) -> None:
    """The brake of an incident, in the specification's words (section rl 10.2)."""
    door = house(store_url(kind, request), dependencies=[BANK])
    door.park("h-1", kind="held", type="act")
    ask, ends = door.client, format_time(door.bridge.engine.now() + timedelta(hours=1))
    before = ask.get(f"{LIMITS}/bank").json()
    assert before == {
        "key": "bank",
        "concurrency": {"limit": 5, "active": 0, "available": 5},
        "rate": {"limit": 100, "period": "PT1M", "next_allowed_at": None},
        "argument": None,
        "waiting_count": 1,
        "override": None,
    }
    stopped = ask.put(
        f"{LIMITS}/bank", json={"concurrency": 0, "expires_at": ends, "reason": "it is down"}
    ).json()
    assert stopped["concurrency"] == {"limit": 0, "active": 0, "available": 0}
    override = stopped["override"]
    assert (override["id"], override["why"], override["expires_at"]) == ("limit:bank", "it is down", ends)
    rate = {"limit": 12, "period": "PT1M"}
    slow = ask.put(f"{LIMITS}/bank", json={"rate": {"limit": 9, "period": "PT1S"}, "throttle": rate}).json()
    assert slow["rate"] == {**rate, "next_allowed_at": None}
    assert (slow["concurrency"], slow["override"]["expires_at"]) == (before["concurrency"], None)
    [hold] = ask.get(HOLDS).json()["holds"]
    assert (hold["id"], hold["limit_rate"], hold["limit_concurrency"], hold["held"]) == (
        "limit:bank",
        0.2,
        None,
        1,
    )
    assert ask.post(f"{HOLDS}/limit:bank/resume", json={"reason": "it is back"}).status_code == 200
    assert ask.get(f"{LIMITS}/bank").json() == before
    records = [(record.action, record.via, record.reason) for record in door.bridge.audit.list().records]
    assert records == [
        ("hold.resume", "http", "it is back"),
        ("hold.limit", "http", ""),
        ("hold.limit", "http", "it is down"),
    ]


def test_a_limit_says_who_runs_and_who_waits(door: House) -> None:
    """Vector EXT-RL-002: the answer has the key; a value of an argument is a key of its own."""
    bridge = door.bridge
    begun(bridge, "j-0")
    assert isinstance(begin(bridge, "j-9"), Held)
    bank = door.client.get(f"{LIMITS}/bank").json()
    assert (bank["key"], bank["concurrency"]["active"], bank["waiting_count"]) == ("bank", 1, 1)
    assert bank["rate"]["next_allowed_at"] > format_time(bridge.engine.now())


def test_each_value_of_an_argument_has_a_state(door: House) -> None:
    bridge = door.bridge
    for n in range(4):
        of_type(bridge, f"a-{n}", account="a")
    of_type(bridge, "b-0", account=7)
    whole, a, b, c = (door.client.get(f"{LIMITS}/shop{of}").json() for of in ("", ":a", ":7", ":c"))
    assert [one["key"] for one in (whole, a, b, c)] == ["shop", "shop:a", "shop:7", "shop:c"]
    assert [one["concurrency"]["active"] for one in (whole, a, b, c)] == [3, 2, 1, 0]
    assert [one["concurrency"]["available"] for one in (whole, a, b, c)] == [None, 0, 1, 2]
    assert [one["waiting_count"] for one in (whole, a, b, c)] == [2, 2, 0, 0]
    assert [one["argument"] for one in (whole, a)] == ["account", None]


@pytest.mark.parametrize("name", ["http:shop", "shop:eu", "shop"])
def test_a_name_may_have_colons(tmp_path: Path, name: str) -> None:
    """The longest name counts, and a value may have colons, too."""
    ones = [
        Dependency(one, jobs=["sync"], concurrency=2, key="account") for one in dict.fromkeys(["shop", name])
    ]
    door = house(f"sqlite:///{tmp_path}/ojs.db", dependencies=ones)
    of_type(door.bridge, "a-0", account="a:b")
    found = door.client.get(f"{LIMITS}/{name}:a:b").json()
    assert (found["key"], found["concurrency"]["active"]) == (f"{name}:a:b", 1)


def of_type(bridge: Bridge, job_id: str, *, account: object) -> None:
    """Begin a job of the shop."""
    begin(bridge, Job(job_id, "sync", "default"), account=account)


def test_limits_are_listed_in_pages(door: House) -> None:
    """Those of operators, too, where the dependency has none of its own."""
    door.client.put(f"{LIMITS}/down", json={"concurrency": 3})
    listed = door.client.get(LIMITS).json()
    assert [item["key"] for item in listed["items"]] == ["bank", "shop", "down"]
    assert listed["pagination"] == {"total": 3, "page": 1, "per_page": 20}
    [last] = door.client.get(LIMITS, params={"page": 3, "per_page": 1}).json()["items"]
    assert (last["key"], last["concurrency"]["limit"]) == ("down", 3)


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("name", ["x", "bank:a", "shop%2Fa"])
def test_what_is_not_there(door: House, method: str, name: str) -> None:
    body = {"concurrency": 1} if method == "PUT" else None
    told = refused(door.client.request(method, f"{LIMITS}/{name}", json=body), 404, "not_found")
    assert told["details"]["resource_type"] == "rate_limit"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "concurrency: a limit needs a rate, a concurrency, or both"),
        ({"expires_at": "2099-01-01T00:00:00Z"}, "concurrency: a limit needs a rate"),
        ({"concurrency": -1}, "concurrency: -1: Input should be greater than or equal to 0"),
        ({"concurrency": True}, "concurrency: True: Input should be a valid integer"),
        (
            {"concurrency": 1, "expires_at": "2020-01-01T00:00:00Z"},
            "expires_at: 2020-01-01 00:00:00+00:00 is in",
        ),
        ({"rate": "9/s"}, "rate: '9/s': Input should be an object"),
        (
            {"rate": {"limit": 0, "period": "PT1S"}},
            "rate.limit: 0: Input should be greater than or equal to 1",
        ),
        ({"rate": {"limit": 1, "period": "1s"}}, "rate.period: '1s': is not an ISO 8601 duration"),
        (
            {"rate": {"limit": 1, "period": "PT0S"}},
            "rate.period: 'PT0S': must be an ISO 8601 duration that is",
        ),
        ({"rate": {"limit": 1, "period": "P1D"}}, "must be between '1/h' and '1,000,000/s'"),
        ({"concurrency": 1, "on_limit": "drop"}, "on_limit: 'drop': Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be(door: House, body: dict[str, Any], said: str) -> None:
    """The refusal names the field, the value and the rule, and nothing has changed."""
    assert said in refused(door.client.put(f"{LIMITS}/bank", json=body), 400, "invalid_request")["message"]
    assert door.client.get(HOLDS).json() == {"holds": []}


def test_a_reader_sees_limits_and_changes_none(door: House) -> None:
    client = client_at(door.bridge, Access(tokens_of(OPERATOR, READER)))
    assert client.get(LIMITS, headers=with_token(READER)).status_code == 200
    assert client.get(f"{LIMITS}/bank", headers=with_token(READER)).status_code == 200
    for token, status in ((READER, 403), (OPERATOR, 200)):
        body = {"concurrency": 0}
        assert client.put(f"{LIMITS}/bank", json=body, headers=with_token(token)).status_code == status
    assert client.get(LIMITS).status_code == 401
