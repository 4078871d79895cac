"""`ojs-bridge audit`: who did what, and the system's user behind the command line."""

from __future__ import annotations

import getpass
import socket

import pytest

from ojs_bridge import Bridge
from tests.cli.running import run

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
    narrow = run("audit", store=store, COLUMNS="80").out.splitlines()
    assert len(narrow) == 4
    assert all(len(line) <= 80 for line in narrow)
    assert [line.split()[2:4] for line in narrow[2:]] == [["bob", "dead_letter.delete"]] * 2


@pytest.mark.usefixtures("done")
def test_its_filters(store: str) -> None:
    assert len(run("audit", "--json", "--who", "b*", store=store).json) == 2
    assert (
        len(run("audit", "--json", "--action", "dead_letter.delete", "--since", "1h", store=store).json) == 3
    )
    assert run("audit", "--since", "2099-01-01", store=store).out == "no records\n"
    assert run("audit", "--until", "1h", store=store).out == "no records\n"
    page = run("audit", "--json", "--limit", "1", store=store)
    cursor = page.err.removeprefix("there may be more: --cursor ").strip()
    rest = run("audit", "--json", "--cursor", cursor, store=store)
    assert (len(page.json), len(rest.json), rest.err) == (1, 2, "")
    wrong = run("audit", "--since", "soon", store=store)
    assert (wrong.code, wrong.err.startswith("ojs-bridge: since: 'soon' must be a time")) == (2, True)


def test_a_mark(bridge: Bridge, store: str) -> None:
    ran = run("mark", "v42", store=store, SUDO_USER="bob")
    assert (ran.code, ran.out.startswith("v42: marked at 20")) == (0, True)
    [old] = run("mark", "v41", "--at", "2h", "--json", store=store).json
    assert [mark.text for mark in bridge.marks.list()] == ["v42", "v41"]
    assert (bridge.marks.list()[0].by, old["text"]) == ("bob", "v41")
    assert run("mark", "", store=store).code == 2
