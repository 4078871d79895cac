"""The server itself, in a process of its own."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from ojs_bridge import Letter
from ojs_bridge.engine.runs import Override
from ojs_bridge.http.app import guarded
from ojs_bridge.operations.replaying import Bulk
from ojs_bridge.rules.job import Header
from tests.http.doors import LETTERS, OPERATOR, OWN, House, house, listening, served, unlimited, with_token
from tests.lives import FRAMEWORK, Outbox
from tests.servers.process import eventually


@pytest.fixture
def door(tmp_path: Any) -> House:
    """A door to an empty SQLite store."""
    return house(f"sqlite:///{tmp_path}/ojs.db")


def test_a_server_without_tokens(door: House, tmp_path: Any) -> None:
    """A server on loopback reads and deletes; it refuses a replay of a framework that it does not serve."""
    door.bury("j-1")
    with served(f"sqlite:///{tmp_path}/ojs.db") as address, httpx.Client(headers=OWN, timeout=30) as client:
        assert [job["id"] for job in client.get(address + LETTERS).json()["jobs"]] == ["j-1"]
        assert client.get(address + LETTERS, headers={"Host": "evil.example"}).status_code == 403
        assert client.post(f"{address}{LETTERS}/j-1/retry").status_code == 422
        assert client.delete(f"{address}{LETTERS}/j-1").json() == {"deleted": True, "job_id": "j-1"}
        assert "server" not in client.get(address).headers


def test_a_server_with_a_token(tmp_path: Any) -> None:
    """The server asks for the token."""
    with served(f"sqlite:///{tmp_path}/ojs.db", f"operator_token={OPERATOR!r}") as address:
        assert httpx.get(address + LETTERS, timeout=30).status_code == 401
        answer = httpx.get(address + LETTERS, headers=with_token(OPERATOR), timeout=30)
        assert answer.json()["jobs"] == []


def test_who_goes_away_ends_a_replay(door: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay ends after a batch; the rest stays, and can be replayed later."""
    letters, ended = door.bridge.dead_letters, threading.Event()
    replay_all = letters.replay_all

    def told_when_it_ends(*args: Any, **kind: Any) -> Bulk:
        try:
            return replay_all(*args, **kind)
        finally:
            ended.set()

    monkeypatch.setattr(letters, "replay_all", told_when_it_ends)
    for n in range(3):
        door.bury(f"j-{n}")
    with listening(guarded(door.bridge, unlimited())) as address:
        # A batch is of one, and the server has ten seconds to see who has gone.
        asked = {"json": {"confirm": True, "rate": 0.1}, "timeout": 60}
        headers = {**OWN, "Accept": "application/x-ndjson"}
        with httpx.stream("POST", f"{address}{LETTERS}/retry", headers=headers, **asked) as answer:
            assert json.loads(next(answer.iter_lines())) == {"done": 1}
        assert ended.wait(90)
        before = len(door.ids())
        assert len(door.outbox.published) == 3 - before <= 2
        body = {"confirm": True}
        done = httpx.post(f"{address}{LETTERS}/retry", json=body, headers=OWN, timeout=60).json()
        assert (done["succeeded"], door.ids()) == (before, [])


class Slow(Outbox):
    """A publisher that stays in the middle of publishing until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish, slowly."""
        assert self.go.wait(90)
        super().republish(letter, header, override)


def test_so_many_replays_at_a_time(door: House) -> None:
    """The server refuses more than four for now; reads go on meanwhile."""
    slow = door.bridge.engine.context.publishers[FRAMEWORK] = Slow()
    for n in range(12):
        door.bury(f"j-{n}", queue=f"q-{n}")
        door.bury(f"k-{n}", queue=f"q-{n}")
    with listening(guarded(door.bridge, unlimited())) as address:

        def replay(queue: str) -> None:
            body = {"confirm": True, "filter": {"queue": queue}}
            answers.append(
                httpx.post(f"{address}{LETTERS}/retry", json=body, headers=OWN, timeout=90).status_code
            )

        answers: list[int] = []
        threads = [threading.Thread(target=replay, args=[f"q-{n}"]) for n in range(6)]
        for thread in threads:
            thread.start()
        eventually(lambda: answers.count(429) == 2)
        assert httpx.get(address + LETTERS, timeout=30).status_code == 200
        slow.go.set()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [200] * 4 + [429] * 2
