"""`ojs-bridge audit`: who did what, and the system's user behind the command line."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ojs_bridge import Bridge
from tests.cli.running import run
from tests.http.doors import API, LETTERS, with_token
from tests.servers import eventually
from tests.servers.ports import free_port

TOKEN = "alices-own-secret-token"


@pytest.fixture
def done(bridge: Bridge, store: str) -> Bridge:
    """A store with four letters, two of which were deleted for a reason, and one without."""
    words = ("dead-letters", "delete", "j-0", "j-1", "--yes", "--reason", "ticket 12")
    assert run(*words, store=store, SUDO_USER="bob").code == 0
    assert run("dead-letters", "purge", "--queue", "slow", "--yes", store=store, SUDO_USER="").code == 0
    return bridge


@pytest.mark.usefixtures("done")
def test_the_commands_are_on_record(store: str) -> None:
    """The actor is the system's user, or the user who called sudo."""
    purged, *deleted = run("audit", "--json", store=store).json
    me = getpass.getuser()
    assert {(r["who"], r["via"], r["address"]) for r in deleted} == {
        ("bob", "cli", f"{me}@{socket.gethostname()}")
    }
    assert [(r["subject"]["ids"], r["reason"]) for r in deleted] == [
        (["j-1"], "ticket 12"),
        (["j-0"], "ticket 12"),
    ]
    assert (purged["who"], purged["count"], purged["outcome"]) == (me, 1, "done")
    told = run("audit", store=store).out
    assert "ticket 12" in told
    assert "filter queue=slow" in told


@pytest.mark.usefixtures("done")
def test_its_filters(store: str) -> None:
    assert len(run("audit", "--json", "--who", "b*", store=store).json) == 2
    assert (
        len(run("audit", "--json", "--action", "dead_letter.delete", "--since", "1h", store=store).json) == 3
    )
    assert run("audit", "--since", "2099-01-01", store=store).out == "no records\n"
    page = run("audit", "--json", "--limit", "1", store=store)
    cursor = page.err.removeprefix("there may be more: --cursor ").strip()
    rest = run("audit", "--json", "--cursor", cursor, store=store)
    assert (len(page.json), len(rest.json), rest.err) == (1, 2, "")
    wrong = run("audit", "--since", "soon", store=store)
    assert (wrong.code, wrong.err.startswith("ojs-bridge: since: 'soon' must be a time")) == (2, True)


@pytest.mark.usefixtures("bridge")
def test_a_server_with_named_tokens(store: str, tmp_path: Path) -> None:
    """OJS_BRIDGE_TOKENS names the tokens; a proxy may name the user, where the operator has asked for it."""
    port = free_port()
    words = ["serve", "--store", store, "--port", str(port), "--user-header", "X-Forwarded-User"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ojs_bridge.cli", *words],
        env={**os.environ, "OJS_BRIDGE_TOKENS": f"alice:operator:{TOKEN}"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(address).status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(answers, seconds=60)
        for number, more in enumerate(({}, {"X-Forwarded-User": "dora"})):
            headers = {**with_token(TOKEN), **more}
            assert httpx.delete(f"{address}{LETTERS}/j-{number}", headers=headers).status_code == 200
        assert httpx.get(f"{address}{API}/audit").status_code == 401
    finally:
        process.terminate()
        _, err = process.communicate(timeout=20)
    found = run("audit", "--json", store=store).json
    assert [(r["who"], r["via"], r["address"]) for r in found] == [
        ("dora", "http", "127.0.0.1"),
        ("alice", "http", "127.0.0.1"),
    ]
    assert "OJS_BRIDGE_TOKENS" not in err


def test_a_mark(bridge: Bridge, store: str) -> None:
    ran = run("mark", "v42", store=store, SUDO_USER="bob")
    assert (ran.code, ran.out.startswith("v42: marked at 20")) == (0, True)
    [old] = run("mark", "v41", "--at", "2h", "--json", store=store).json
    assert [mark.text for mark in bridge.operations.marks.list()] == ["v42", "v41"]
    assert (bridge.operations.marks.list()[0].by, old["text"]) == ("bob", "v41")
    assert run("mark", "", store=store).code == 2
