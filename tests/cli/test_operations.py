"""`operations`: replays and purges of many letters are seen, stopped and resumed from another terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from ojs_bridge.operations import operation, runner
from tests.cli.running import run, spawn
from tests.cli.test_apps import DRAMATIQ, dramatiq_message
from tests.forking import Forked, started
from tests.operations.test_operating import bury
from tests.servers import Valkey, eventually


def test_a_purge_is_listed_and_shown(bridge: Bridge, store: str) -> None:
    ran = run("dead-letters", "purge", "--type", "mail.*", "--yes", store=store)
    assert (ran.code, ran.out) == (0, "2 dead letters deleted\n")
    (done,) = bridge.operations.list()
    assert ran.err.splitlines() == [
        f"operation {done.id}; Ctrl-C stops it",
        f"within an hour: ojs-bridge undo {done.id}",
    ]
    listed = run("operations", "list", store=store).out
    assert [done.id, "purge", "done"] == [
        word for word in listed.split() if word in (done.id, "purge", "done")
    ]
    [shown] = run("operations", "show", done.id, "--json", store=store).json
    assert (shown["state"], shown["total"], shown["succeeded"], shown["kind"]["type"]) == (
        "done",
        2,
        2,
        "mail.*",
    )
    narrow = run("operations", "list", store=store, COLUMNS="80").out.splitlines()
    assert [line.split()[0] for line in narrow] == ["id", done.id]
    assert "done   2 of 2" in narrow[1]
    words = run("operations", "show", done.id, store=store).out
    assert words.startswith(f"id          {done.id}\naction      purge\n")
    assert "mail.*" in words
    again = run("operations", "stop", done.id, store=store)
    assert (again.code, again.out) == (0, f"{done.id}: done, 2 dead letters deleted\n")
    assert run("operations", "list", "--json", store=store).json == [shown]


def test_the_beginning_of_an_operations_id(bridge: Bridge, store: str) -> None:
    """It stands for the id if one operation alone has it; several are named, and nothing found is said."""
    begun = bridge.operations.begin("purge", queue="default")
    short = begun.id[:10]
    assert run("operations", "show", short, "--json", store=store).json[0]["id"] == begun.id
    assert run("operations", "stop", short, store=store).out.startswith(f"{begun.id}: stopping")
    asked, ledger = bridge.operations.get(begun.id), operation.Ledger(bridge.engine.context)
    assert ledger.save(replace(asked, state="stopped", revision=asked.revision + 1))
    assert run("operations", "resume", short, store=store).err.startswith(f"operation {begun.id};")
    assert run("undo", short, store=store).out.endswith(" back\n")
    missing = run("operations", "show", "op-none", store=store)
    assert (missing.code, missing.err) == (1, "ojs-bridge: there is no operation 'op-none'\n")
    twin = replace(bridge.operations.get(begun.id), id=f"{short}zz", revision=1)
    assert ledger.save(twin)
    several = run("operations", "stop", short, store=store)
    assert several.code == 2
    assert f"id: {short!r} begins several: " in several.err
    assert {begun.id, twin.id} == {*several.err.strip().rpartition(": ")[2].split(", ")}


def test_an_interrupted_purge_is_resumed(bridge: Bridge, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = bridge.operations.begin("purge", queue="default")
    refused = run("operations", "resume", begun.id, store=store)
    assert (refused.code, refused.err) == (
        2,
        f"ojs-bridge: operation {begun.id!r} is running, and cannot be resumed\n",
    )
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    assert "interrupted" in run("operations", "list", store=store).out
    monkeypatch.setattr(runner, "SAVED", 60)
    ran = run("operations", "resume", begun.id, store=store)
    assert (ran.code, ran.out) == (0, "3 dead letters deleted\n")
    assert len(bridge.dead_letters.list().letters) == 1


@pytest.mark.usefixtures("bridge")
def test_an_unknown_operation(store: str) -> None:
    for verb in ("show", "stop", "resume"):
        ran = run("operations", verb, "op-1", store=store)
        assert (ran.code, ran.err) == (1, "ojs-bridge: there is no operation 'op-1'\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--newest"], "newest: True needs a limit; without one all letters go, the oldest first"),
        (["--limit", "0"], "limit: 0 must be an integer from 1 to 10000"),
        (["--stop-if-failing", "50%"], "stop-if-failing: it goes with --rate"),
        (
            ["--stop-if-failing", "half", "--rate", "1"],
            "stop-if-failing: 'half' must be a share from 0% to 99%",
        ),
    ],
)
@pytest.mark.usefixtures("bridge")
def test_a_share_that_cannot_be(store: str, words: list[str], told: str) -> None:
    ran = run("dead-letters", "replay", "--all", *words, store=store)
    assert (ran.code, ran.err) == (2, f"ojs-bridge: {told}\n")


def test_a_replay_stops_and_goes_on(tmp_path: Path, valkey: Valkey, valkey_url: str) -> None:
    """The first stop is Ctrl-C, the second comes from another terminal; each letter is replayed once."""
    (tmp_path / "actors.py").write_text(DRAMATIQ)
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge = Bridge(url)
    for n in range(12):
        message = dramatiq_message(f"j-{n}", n)
        bury(bridge, f"j-{n}", type="charge", framework="dramatiq", message=message)
    app = ("--app", "actors:broker")
    replay = ("dead-letters", "replay", "--all", "--rate", "2", "--stop-if-failing", "90%", "--yes", *app)
    for words, ask in ((replay, interrupt), (("operations", "resume", "{id}", *app), stop)):
        named = [word.format(id=bridge.operations.list()[0].id) if "{id}" in word else word for word in words]
        gone = len(bridge.dead_letters.list().letters)
        variables, errors = {**os.environ, "BROKER_URL": valkey.url}, tmp_path / f"{named[0]}.err"
        log = tmp_path / "log"
        process = started(["ojs-bridge", *named], env=variables, log=log, errors=errors, cwd=tmp_path)
        eventually(lambda gone=gone: len(bridge.dead_letters.list().letters) < gone, seconds=30)
        ask(process, bridge, url)
        status, err = process.wait(90), errors.read_text()
        assert status == 1, err
        [operation] = bridge.operations.list()
        assert operation.state == "stopped"
        assert f"go on with: ojs-bridge operations resume {operation.id}" in err
        for shown in (["list"], ["show", operation.id]):
            words_shown = run("operations", *shown, store=url).out.split()
            assert ("replay" in words_shown, "retry" in words_shown) == (True, False)
    left = len(bridge.dead_letters.list().letters)
    assert 0 < left < 12
    ran = spawn("operations", "resume", operation.id, *app, cwd=tmp_path, BROKER_URL=valkey.url)
    assert (ran.code, ran.out) == (0, "12 dead letters replayed (12 not begun)\n"), ran.err
    assert bridge.dead_letters.list().letters == ()


def test_a_probe_says_how_its_rest_is_sent(tmp_path: Path, valkey: Valkey, valkey_url: str) -> None:
    (tmp_path / "actors.py").write_text(DRAMATIQ)
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    for n in range(7):
        message = dramatiq_message(f"j-{n}", n)
        bury(bridge, f"j-{n}", type="charge", framework="dramatiq", message=message)
    probe = ("dead-letters", "replay", "--all", "--limit", "2", "--newest", "--yes")
    where = {"cwd": tmp_path, "BROKER_URL": valkey.url}
    ran = spawn(*probe, "--app", "actors:broker", **where)
    assert (ran.code, ran.out) == (0, "2 dead letters replayed (2 not begun)\n"), ran.err
    [done] = bridge.operations.list()
    assert f"5 dead letters are left; send them: ojs-bridge operations rest {done.id}\n" in ran.err
    rest = spawn("operations", "rest", done.id, "--app", "actors:broker", **where)
    assert (rest.code, rest.out) == (0, "5 dead letters replayed (5 not begun)\n"), rest.err
    again = spawn("operations", "rest", done.id, "--app", "actors:broker", **where)
    assert (again.code, "was begun before" in again.err) == (2, True)


def interrupt(process: Forked, bridge: Bridge, url: str) -> None:
    """Press Ctrl-C."""
    process.send_signal(signal.SIGINT)


def stop(process: Forked, bridge: Bridge, url: str) -> None:
    """Stop the operation from another terminal."""
    [operation] = bridge.operations.list()
    assert run("operations", "stop", operation.id, store=url).code == 0


def test_a_search_shows_how_far_it_is_on_a_terminal(bridge: Bridge, store: str) -> None:
    """To count letters with a text takes its time in a large store."""
    assert bridge.dead_letters.stats().total == 4
    reader, terminal = os.openpty()
    try:
        words = ("dead-letters", "purge", "--text", "no answer", "--dry-run", "--store", store)
        command = [sys.executable, "-m", "ojs_bridge", *words]
        done = subprocess.run(
            command, stderr=terminal, stdout=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}, check=True
        )
        told = os.read(reader, 65_536)
    finally:
        os.close(reader)
        os.close(terminal)
    assert done.stdout.startswith(b"4 dead letters")
    assert b"counting" in told
    assert b"4/4" in told


def test_an_undo_of_a_deletion(bridge: Bridge, store: str) -> None:
    ids = sorted(letter.id for letter in bridge.dead_letters.list().letters)
    ran = run("dead-letters", "purge", "--type", "mail.*", "--yes", store=store)
    [purge] = bridge.operations.list()
    assert f"within an hour: ojs-bridge undo {purge.id}\n" in ran.err
    assert run("undo", purge.id, store=store).out == "2 dead letters back\n"
    run("dead-letters", "delete", ids[0], "--yes", store=store)
    [record, *_] = bridge.audit.list().records
    assert f"undo {record.id}, until " in run("audit", store=store, COLUMNS="250").out
    several = run("undo", "act-", store=store)
    assert (several.code, "'act-' begins several: act-" in several.err) == (2, True)
    [undone] = run("undo", record.id[:-1], "--json", store=store).json
    assert undone == {"restored": 1, "stayed": 0, "errors": []}
    assert sorted(letter.id for letter in bridge.dead_letters.list().letters) == ids
    again = run("undo", record.id, store=store)
    assert (again.code, "is in the bin" in again.err) == (2, True)
    run("dead-letters", "delete", ids[0], "--forever", "--yes", store=store)
    assert run("undo", bridge.audit.list().records[0].id, store=store).code == 2
