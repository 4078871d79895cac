"""The server itself, in a process of its own."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest

from ojs_bridge import Letter
from ojs_bridge.engine.runs import Override
from ojs_bridge.http.app import guarded
from ojs_bridge.rules.job import Header
from tests.http.doors import (
    API,
    LETTERS,
    OPERATOR,
    OWN,
    House,
    listening,
    served,
    unlimited,
    with_token,
)
from tests.lives import FRAMEWORK, Outbox
from tests.servers.process import eventually


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


FORGED = {"X-Forwarded-For": "203.0.113.9"}


@pytest.mark.parametrize(
    ("trusted", "addresses"),
    [
        ("", {"127.0.0.1"}),
        ("trusted_proxies='127.0.0.1'", {"127.0.0.1", "203.0.113.9", "Z" * 200}),
        ("trusted_proxies='192.0.2.1'", {"127.0.0.1"}),
    ],
    ids=["none", "this one", "another"],
)
def test_the_address_of_the_audit(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, trusted: str, addresses: set[str]
) -> None:
    """It is that of the peer, unless a proxy is trusted, and short; a variable of uvicorn changes nothing."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with served(f"sqlite:///{tmp_path}/ojs.db", trusted) as address, httpx.Client(headers=OWN) as client:
        for headers in ({}, FORGED, {"X-Forwarded-For": "Z" * 20_000}):
            client.post(f"{address}{API}/marks", json={"text": "x"}, headers=headers, timeout=30)
        records = client.get(f"{address}{API}/audit", timeout=30).json()["records"]
    assert len(records) == 3
    assert {record["address"] for record in records} == addresses


def test_a_request_whose_head_does_not_come_in_time_ends(tmp_path: Any) -> None:
    """A first one, one that trickles in, and one on a connection that has had an answer."""
    with served(f"sqlite:///{tmp_path}/ojs.db") as address:
        port = int(address.rpartition(":")[2])
        half = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        for n, connection in enumerate(half):
            if n % 3 == 2:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                answer = b""
                while b"</html>" not in answer:
                    answer += connection.recv(65_536)
            if n % 3:
                connection.sendall(b"POST /ojs/v1/marks HTTP/1.1\r\nHost: x\r\nX-A: ")
        trickling = half[1]

        def open_ones() -> int:
            with suppress(OSError):
                trickling.sendall(b"a")
            return sum(not has_ended(connection) for connection in half)

        eventually(lambda: open_ones() == 0, seconds=60, what="the end of half requests")
        # A request that is served in time is not broken off.
        assert httpx.get(address + LETTERS, headers=OWN, timeout=30).status_code == 200
        for connection in half:
            connection.close()


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


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
