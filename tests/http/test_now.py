"""The moment over HTTP."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ojs_bridge.operations import now
from tests.http.doors import API, House
from tests.operations.test_now import died, lives
from tests.store.test_rates import record


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no slow store."""
    monkeypatch.setattr(now, "SECONDS", 60.0)


def test_the_moment(door: House) -> None:
    """It has all the parts that the page shows; a reader sees at once what dies."""
    store, at = door.bridge.store, door.bridge.engine.now()
    assert store is not None
    lives(store, at)
    record(store, died("billing.charge", dict.fromkeys(range(1, 6), 40), at))
    door.bury("j-1", type="billing.charge", discarded_at=at - timedelta(seconds=5))
    door.bridge.marks.add("v42", at=at - timedelta(minutes=6))
    answer = door.client.get(f"{API}/admin/now")
    told = answer.json()
    assert (answer.status_code, told["verdict"]["level"]) == (200, "bad")
    assert set(told) == {
        "at", "verdict", "pulse", "hill", "groups", "steady", "operations", "queues", "workers", "holds",
        "note",
    }  # fmt: skip
    assert told["verdict"]["sentence"].startswith("billing.charge: ")
    assert (told["verdict"]["about"]["kind"], told["verdict"]["about"]["type"]) == (
        "bleeds",
        "billing.charge",
    )
    assert (len(told["hill"]["deaths"]), sum(told["hill"]["deaths"]), told["hill"]["usual"]) == (
        60,
        200,
        None,
    )
    assert [mark["text"] for mark in told["hill"]["marks"]] == ["v42"]
    assert [group["sample_id"] for group in told["groups"]] == ["j-1"]
    assert told["pulse"]["dead_letters"] == 1
    assert [worker["running"] for worker in told["workers"]] == [[]]
