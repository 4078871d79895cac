"""The official clients of the specification, request by request: the SDK for Python, the CLI, the admin UI.

Each test names the vectors of the conformance suite for which it stands.
"""

from __future__ import annotations

from typing import Any

import pytest

from ojs_bridge.spec.job import format_time
from tests.http.doors import LETTERS, RETRIES, House, house

OJS, JSON = "application/openjobspec+json", "application/json"
#: What the CLI sends with each request.
CLI = {"Content-Type": OJS, "Accept": OJS}


@pytest.fixture
def door(tmp_path: Any) -> House:
    """A door to an empty SQLite store."""
    return house(f"sqlite:///{tmp_path}/ojs.db")


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
        assert (answer.status_code, answer.headers["content-type"]) == (status, told)
    answer = door.client.post(f"{LETTERS}/j-1/retry", headers={"Accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, told)


def test_a_list_has_its_total_and_a_letter_its_death_at_the_top(door: House) -> None:
    """`ojs dead-letter` of the CLI prints both (vectors L1-DLQ-001 and L1-DLQ-003)."""
    died = {name: format_time(door.bury(name).discarded_at) for name in ("j-1", "j-2")}
    door.park("r-1")
    listed = door.client.get(LETTERS, params={"limit": 1}, headers=CLI).json()
    assert (listed["total"], listed["pagination"]["total"], len(listed["jobs"])) == (2, 2, 1)
    jobs = door.client.get(LETTERS, headers=CLI).json()["jobs"]
    assert {job["id"]: job["discarded_at"] for job in jobs} == died
    assert door.client.get(f"{LETTERS}/j-1", headers=CLI).json()["discarded_at"] == died["j-1"]
    assert door.client.get(RETRIES, headers=CLI).json()["total"] == 1
