"""The server itself, in a process of its own."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from ojs_bridge.http.app import guarded
from tests.http.doors import LETTERS, OPERATOR, OWN, House, house, listening, served, unlimited, with_token
from tests.servers.process import eventually


@pytest.fixture
def door(tmp_path: Any) -> House:
    """A door to an empty SQLite store."""
    return house(f"sqlite:///{tmp_path}/ojs.db")


def test_a_server_without_tokens(door: House, tmp_path: Any) -> None:
    """On loopback: reads and deletes; what it has no publisher for it does not replay."""
    door.bury("j-1")
    with served(f"sqlite:///{tmp_path}/ojs.db") as address, httpx.Client(headers=OWN) as client:
        assert [job["id"] for job in client.get(address + LETTERS).json()["jobs"]] == ["j-1"]
        assert client.get(address + LETTERS, headers={"Host": "evil.example"}).status_code == 403
        assert client.post(f"{address}{LETTERS}/j-1/retry").status_code == 422
        assert client.delete(f"{address}{LETTERS}/j-1").json() == {"deleted": True, "job_id": "j-1"}
        assert "server" not in client.get(address).headers


def test_a_server_with_a_token(tmp_path: Any) -> None:
    """It asks for it."""
    with served(f"sqlite:///{tmp_path}/ojs.db", f"operator_token={OPERATOR!r}") as address:
        assert httpx.get(address + LETTERS).status_code == 401
        assert httpx.get(address + LETTERS, headers=with_token(OPERATOR)).json()["jobs"] == []


def test_who_goes_away_ends_a_replay(door: House) -> None:
    """After a batch; the rest stays, and can be replayed later."""
    for n in range(30):
        door.bury(f"j-{n}")
    with listening(guarded(door.bridge, unlimited())) as address:
        body, headers = {"confirm": True, "rate": 10}, {**OWN, "Accept": "application/x-ndjson"}
        with httpx.stream("POST", f"{address}{LETTERS}/retry", json=body, headers=headers) as answer:
            assert json.loads(next(answer.iter_lines())) == {"done": 10}
        time.sleep(1.5)
        before = len(door.ids())
        assert len(door.outbox.published) == 30 - before <= 20
        done = httpx.post(f"{address}{LETTERS}/retry", json={"confirm": True}, headers=OWN).json()
        assert (done["succeeded"], door.ids()) == (before, [])


def test_so_many_replays_at_a_time(door: House) -> None:
    """More than four are refused for now, and reads go on meanwhile."""
    for n in range(12):
        door.bury(f"j-{n}", queue=f"q-{n}")
        door.bury(f"k-{n}", queue=f"q-{n}")
    with listening(guarded(door.bridge, unlimited())) as address:

        def replay(queue: str) -> None:
            body = {"confirm": True, "rate": 0.5, "filter": {"queue": queue}}
            answers.append(
                httpx.post(f"{address}{LETTERS}/retry", json=body, headers=OWN, timeout=30).status_code
            )

        answers: list[int] = []
        threads = [threading.Thread(target=replay, args=[f"q-{n}"]) for n in range(6)]
        for thread in threads:
            thread.start()
        eventually(lambda: answers.count(429) == 2)
        assert httpx.get(address + LETTERS).status_code == 200
        for thread in threads:
            thread.join()
    assert sorted(answers) == [200] * 4 + [429] * 2
