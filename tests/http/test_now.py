"""The moment over HTTP."""

from __future__ import annotations

from tests.http.doors import API, House


def test_the_moment(door: House) -> None:
    """It has all the parts that the page shows, and an empty store is well."""
    answer = door.client.get(f"{API}/admin/now")
    told = answer.json()
    assert (answer.status_code, told["verdict"]["level"]) == (200, "well")
    assert set(told) == {
        "at", "verdict", "pulse", "hill", "groups", "operations", "queues", "workers", "holds", "note",
    }  # fmt: skip
    assert len(told["hill"]["deaths"]) == 60
