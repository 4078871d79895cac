"""`ojs-bridge dead-letters watch`, as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from tests.cli.running import run
from tests.operations.test_operating import bury
from tests.servers import Valkey, eventually


class Watcher:
    """A watch that runs, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self._folder = process, folder

    def out(self) -> str:
        """Return the lines of stdout until now."""
        return (self._folder / "out").read_text()

    def err(self) -> str:
        """Return the lines of stderr until now."""
        return (self._folder / "err").read_text()


@contextmanager
def watching(folder: Path, store: str, *words: str) -> Iterator[Watcher]:
    """Start a watch, and end it by Ctrl-C, which is no error."""
    asked = f"dead-letters watch --store {store} --every 0.1".split()
    command = [sys.executable, "-m", "ojs_bridge", *asked, *words]
    with (
        (folder / "out").open("w") as out,
        (folder / "err").open("w") as err,
        subprocess.Popen(command, stdout=out, stderr=err) as process,
    ):
        watcher = Watcher(process, folder)
        try:
            yield watcher
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0, watcher.err()
    assert "Traceback" not in watcher.err()


def test_new_letters_are_printed_as_they_arrive(tmp_path: Path, url: str) -> None:
    """On every store: each once, with its error; neither those of before, nor those the filter leaves out."""
    bridge = Bridge(url)
    bury(bridge, "before", discarded_at=bridge.engine.now())
    with watching(tmp_path, url, "--type", "billing.*") as watcher:
        eventually(lambda: "until Ctrl-C" in watcher.err(), what="the first look")
        bury(bridge, "beacon", discarded_at=bridge.engine.now() + timedelta(hours=1))
        eventually(lambda: "beacon" in watcher.out(), what="the first line")
        bury(bridge, "other", type="mail.send", discarded_at=bridge.engine.now())
        bury(bridge, "late", discarded_at=bridge.engine.now() - timedelta(seconds=30))
        eventually(lambda: "late" in watcher.out(), what="the late letter")
        bury(bridge, "late", discarded_at=bridge.engine.now())
        eventually(lambda: watcher.out().count("late ") == 2, what="its second death")
    lines = watcher.out().splitlines()
    assert [line.split()[0] for line in lines] == ["beacon", "late", "late"]
    assert all("billing.charge" in line and "external.timeout: slow" in line for line in lines)


@pytest.mark.usefixtures("bridge")
def test_those_since_a_time_come_first(tmp_path: Path, store: str) -> None:
    """In JSON, one letter a line, the oldest first."""
    with watching(tmp_path, store, "--since", "150m", "--json") as watcher:
        eventually(lambda: watcher.out().count("\n") == 3, what="the letters")
    assert [json.loads(line)["id"] for line in watcher.out().splitlines()] == ["j-2", "j-1", "j-0"]


def test_a_store_that_goes_away_meanwhile(tmp_path: Path) -> None:
    """The command tells of the outage once; when the store is back, it prints the letters."""
    with Valkey() as server, watching(tmp_path, server.url) as watcher:
        bridge = Bridge(server.url)
        eventually(lambda: "until Ctrl-C" in watcher.err(), what="the first look")
        bury(bridge, "first", discarded_at=bridge.engine.now())
        eventually(lambda: "first" in watcher.out(), what="the first letter")
        server.stop()
        eventually(lambda: "asking again every 0.1 s" in watcher.err(), what="the outage")
        server.start()
        bury(bridge, "second", discarded_at=bridge.engine.now())
        eventually(lambda: "second" in watcher.out(), what="the letter after the outage")
    assert [line.split()[0] for line in watcher.out().splitlines()] == ["first", "second"]
    assert watcher.err().count("asking again") == 1


@pytest.mark.usefixtures("bridge")
def test_what_cannot_be_watched(store: str) -> None:
    """A time in the past has no new letters; a store that is not there ends the command."""
    ran = run("dead-letters", "watch", "--until", "1h", store=store)
    assert (ran.code, ran.out) == (2, "")
    assert "--until does not go with letters" in ran.err
    assert run("dead-letters", "watch", store="sqlite:///typo.db").code == 3
