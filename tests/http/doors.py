"""Doors to knock at: the app on a bridge with an outbox, in this process or behind a real server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ojs_bridge import Bridge, Letter
from ojs_bridge.http.app import guarded
from ojs_bridge.http.guarding import LOOPBACK, Access, Bucket
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.servers.ports import free_port
from tests.servers.process import eventually
from tests.store.test_parked import parked
from tests.store.test_store import letter

OPERATOR = "the-operators-own-token"
REPLAYER = "the-replayers-own-token"
READER = "the-readers-own-token"
API = "/ojs/v1"
LETTERS = f"{API}/dead-letter"
WAITING, JOBS = f"{API}/waiting", f"{API}/jobs"
OWN = {"X-OJS-Bridge": "1"}


@dataclass
class House:
    """A bridge, its framework's publisher, and a client at its door on a loopback address."""

    bridge: Bridge
    outbox: Outbox
    client: TestClient

    def bury(self, letter_id: str, **fields: Any) -> Letter:
        """Bury a letter of the outbox, a minute old."""
        assert self.bridge.store is not None
        known = {"discarded_at": self.bridge.engine.now() - timedelta(seconds=60), "framework": FRAMEWORK}
        found = letter(letter_id, **{**known, **fields})
        self.bridge.store.letters.bury(found)
        return found

    def park(self, job_id: str, **fields: Any) -> None:
        """Park a retry, or a scheduled job, that is due in an hour."""
        assert self.bridge.store is not None
        due = self.bridge.engine.now() + timedelta(hours=1)
        self.bridge.store.parked.park(
            parked(job_id, **{"next_retry_at": due, "framework": FRAMEWORK, **fields})
        )

    def ids(self) -> list[str]:
        """Return the ids of the dead letters, the newest first."""
        return [found.id for found in self.bridge.dead_letters.list().letters]


def house(url: str, **options: Any) -> House:
    """Open a door without tokens on a store."""
    bridge, outbox = bridge_with_outbox(url, **options)
    return House(bridge, outbox, client_at(bridge, Access(hosts=LOOPBACK)))


def client_at(bridge: Bridge, access: Access) -> TestClient:
    """Return a client that speaks to a loopback address, without a limit but its own."""
    return TestClient(guarded(bridge, access), base_url="http://127.0.0.1:8787", headers=OWN)


def unlimited() -> Access:
    """Return an access without tokens, as often as a test asks."""
    return Access(hosts=LOOPBACK, reads=Bucket(10**6, 10**6), writes=Bucket(10**6, 10**6))


def with_token(token: str) -> dict[str, str]:
    """Return the header that has a token."""
    return {"Authorization": f"Bearer {token}"}


@contextmanager
def listening(app: Starlette) -> Iterator[str]:
    """Serve an app from a thread of this process; yield its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(90)


@contextmanager
def served(url: str, arguments: str = "") -> Iterator[str]:
    """Run `serve` in a process of its own; yield its address."""
    port = free_port()
    code = f"from ojs_bridge import Bridge; from ojs_bridge.http import serve; \
serve(Bridge({url!r}), port={port}, {arguments})"
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            eventually(lambda: _answers(address), seconds=60)
            yield address
        finally:
            process.terminate()
            process.wait(90)


def _answers(address: str) -> bool:
    try:
        return httpx.get(address).status_code == 200
    except httpx.TransportError:
        return False
