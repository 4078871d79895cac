"""The route of rates."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge.store import BOUNDS, Rate
from tests.conftest import store_url
from tests.http.doors import API, house
from tests.http.test_letters import refused
from tests.store.test_rates import record

RATES = f"{API}/rates"


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_rates(kind: str, request: pytest.FixtureRequest) -> None:
    """The answer has a number for each step; filters choose, and bad ones are refused."""
    door = house(store_url(kind, request))
    assert door.client.get(RATES).json()["by_type"] == {}
    at = datetime.now(timezone.utc) - timedelta(minutes=5)
    store = door.bridge.store
    assert store is not None
    for type_, outcome in (("a.b", "completed"), ("a.b", "retried"), ("c", "completed")):
        record(store, [Rate(at, type_, "q", outcome, (2, *[0] * len(BOUNDS)))])
    asked: dict[str, Any] = {"since": (at - timedelta(minutes=3)).isoformat(), "type": "a.*", "queue": "q"}
    found = door.client.get(RATES, params=asked).json()
    assert found["step_seconds"] == 60
    assert {name: sum(series) for name, series in found["by_type"]["a.b"].items()} == {
        "completed": 2,
        "retried": 2,
    }
    assert found["seconds"]["completed"]["p50"].count(0.005) == 1
    assert set(found["by_type"]) == {"a.b"}
    refused(door.client.get(RATES, params={"typ": "a"}), 400, "invalid_request")
