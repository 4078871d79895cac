"""The page before a real fleet: workers of both frameworks, whose jobs die, are mended and are replayed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis
from playwright.sync_api import Browser, expect

from examples.demo.workers import WORKERS, environment
from ojs_bridge import Bridge, open_store
from tests.forking import ended, started
from tests.http.desks import browser
from tests.servers import Valkey, eventually
from tests.servers.ports import free_port

__all__ = ["browser"]

ROOT = Path(__file__).parents[2]
REPLAYED = "exhausts, is dead-lettered"
DYING = {"hits auth.*": None, "says DeadLetter": None, REPLAYED: {"on_exhaustion": "dead_letter"}}
SEND = """
import json, sys
import celery_app, dramatiq_app
for name, retry in json.loads(sys.argv[1]).items():
    retry = retry or {"on_exhaustion": "dead_letter"}
    celery_app.demo.apply_async((name,), ojs_retry=retry)
    dramatiq_app.demo.send_with_options(args=(name,), ojs_retry=retry)
"""
SERVE = """
import sys
import celery_app, dramatiq_app
from project import bridge
from ojs_bridge.http import serve
serve(bridge, port=int(sys.argv[1]), operator_token=sys.argv[2] or None)
"""


class Door:
    """A server of the page over one store, and the fleet of its letters."""

    def __init__(self, store: str, valkey_url: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.store = open_store(store)
        self.valkey = redis.Redis.from_url(valkey_url, decode_responses=True)
        self.environment = {**environment(valkey_url, store), "C_FORCE_ROOT": "1"}

    def python(self, code: str, *words: str) -> list[str]:
        """Return the command that runs some code with words."""
        return ["python", "-c", code, *words]

    def ids(self) -> list[str]:
        """Return the ids of the dead letters."""
        return [found.id for found in Bridge(self.store).dead_letters.list(limit=1000).letters]


def await_door(door: Door) -> None:
    """Wait until a server answers."""

    def answers() -> bool:
        try:
            return httpx.get(door.url).status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers, seconds=90)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Workers of both frameworks, with jobs that have died, and the page's server."""
    folder = tmp_path_factory.mktemp("page")
    with Valkey() as valkey, ExitStack() as stack:
        found = Door(f"sqlite:///{folder}/ojs.db", valkey.url)

        def start(command: list[str], log: str) -> None:
            process = started(command, env=found.environment, log=folder / log, cwd=ROOT)
            stack.callback(lambda: (process.terminate(), process.wait(90)))

        for name, command in WORKERS.items():
            start(["python", "-m", *command], name)
        sent = ended(found.python(SEND, json.dumps(DYING)), env=found.environment, cwd=ROOT)
        assert sent.status == 0, sent.err
        start(found.python(SERVE, str(found.port), ""), "server")
        eventually(lambda: len(found.ids()) == 2 * len(DYING), seconds=60)
        await_door(found)
        yield found


def test_a_fleet_is_mended(browser: Browser, door: Door) -> None:
    """A letter is replayed with other arguments, and the letters of a group are, from Now on by clicks."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{door.url}#letters?queue=celery&error_type=payment.fraud")
    page.locator("#letters [data-row] a").click()
    field = page.get_by_label("name", exact=True)
    expect(field).to_have_value("says DeadLetter")
    field.fill("succeeds at once")
    page.get_by_role("button", name="Replay with 1 change").click()
    with page.expect_request("**/retry") as sent:
        page.locator("#question [type=submit]").click()
    assert sent.value.post_data_json == {"override": {"args": ["succeeds at once"]}}
    eventually(lambda: door.valkey.get("demo:runs:celery:succeeds at once") == "1", seconds=60)
    door.valkey.set("demo:mended", 1)
    page.goto(f"{door.url}#now")
    expect(page.locator(".groups [data-row]")).to_have_count(3)
    page.goto(f"{door.url}#letters?error_type=external.*")
    letters = page.locator("#letters [data-row]")
    expect(letters).to_have_count(2)
    for box in letters.locator(".pick").all():
        box.check()
    page.locator(".bar").get_by_role("button", name=re.compile("^Replay")).click()
    expect(page.locator("#question-title")).to_have_text("Replay 2 dead letters?")
    page.locator("#question [type=submit]").click()
    expect(letters).to_have_count(0)
    runs = [f"demo:runs:{framework}:{REPLAYED}" for framework in WORKERS]
    eventually(lambda: [door.valkey.get(name) for name in runs] == ["4", "4"], seconds=60)
    page.close()
