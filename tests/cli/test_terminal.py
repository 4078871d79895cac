"""A producer chooses ids, queues, types, errors and arguments: no command lets a terminal obey them."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ojs_bridge.cli.program import program
from tests.cli.running import environment
from tests.http.doors import house
from tests.operations.test_operating import celery_message
from tests.store.test_store import entry

#: A new title of the window, colours, a text from right to left, and a line that looks like ours.
EVIL = "\x1b]0;owned\x07\x1b[35;44m\u202e\x9b1m\r\nojs-bridge: all letters were deleted"
RAW = ("\x1b]0", "\x07", "\x1b[35;44m", "\u202e", "\x9b", "\rojs-bridge: all", "\nojs-bridge: all")
#: What a terminal is told by ourselves: colours, and the cursor of a progress bar.
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

APP = f"""
from celery import Celery
app = Celery("shop")
app.task(name={f"shop.{EVIL}"!r})(lambda: None)
"""

#: Runs the commands that the first argument holds, one after the other; `watch` and `serve` are broken off.
RUN = """
import json, signal, sys
from ojs_bridge.cli.program import run
def ends(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, ends)
for words in json.loads(sys.argv[1]):
    print("%%", *(word for word in words[:2] if word.isprintable()), flush=True)
    sys.argv = ["ojs-bridge", *words]
    signal.alarm(8 if words[1:2] == ["watch"] else 60)
    try:
        run()
    except (SystemExit, KeyboardInterrupt):
        pass
    sys.stdout.flush()
"""


def commands(group: Any, *names: str) -> Iterator[str]:
    """Yield the names of all commands."""
    for name, inner in group.commands.items():
        yield from commands(inner, *names, name) if hasattr(inner, "commands") else [" ".join((*names, name))]


def test_every_command_escapes_what_others_say(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/ojs.db"
    door = house(store)
    errors = (entry(1, type=f"a.{EVIL}", message=EVIL, details={EVIL: EVIL}, backtrace=[EVIL]),)
    for n in range(4):
        job = {"type": f"b.{EVIL}", "queue": f"q{EVIL}", "errors": errors, "reason": EVIL}
        door.bury(f"evil{n}{EVIL}", message=celery_message(EVIL, to=EVIL), **job)
        door.park(f"park{n}{EVIL}", reason=EVIL)
    [group] = door.bridge.dead_letters.groups.list()
    operation = door.bridge.operations.begin("purge", ids=["none"])
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "p.json").write_text(json.dumps({"policies": {EVIL: {"max_attempts": 2, EVIL: EVIL}}}))
    (tmp_path / "damaged.jsonl").write_text(EVIL)
    lines = [
        ["dead-letters", "list"],
        ["dead-letters", "list", "--json"],
        ["dead-letters", "show", "evil0"],
        ["dead-letters", "stats"],
        ["dead-letters", "groups"],
        ["dead-letters", "arguments"],
        ["dead-letters", "mute", group.group.fingerprint],
        ["dead-letters", "unmute", group.group.fingerprint],
        ["dead-letters", "resolve", group.group.fingerprint, "--mark", EVIL],
        ["dead-letters", "unresolve", group.group.fingerprint],
        ["dead-letters", "watch", "--since", "2h"],
        ["dead-letters", "export"],
        ["dead-letters", "export", f"none/{EVIL}"],
        ["dead-letters", "import", "damaged.jsonl"],
        ["dead-letters", "replay", "evil0", "--yes"],
        ["dead-letters", "replay", "--all", "--dry-run"],
        ["dead-letters", "prune", "--max-age", "P1D"],
        ["dead-letters", "show", f"none{EVIL}"],
        ["list"],
        ["show", f"none{EVIL}"],
        ["replay", f"none{EVIL}", "--yes"],
        ["dead-letters", "show", "evil"],
        ["retries", "list"],
        ["retries", "show", "park0"],
        ["retries", "run", "park0", f"none{EVIL}"],
        ["retries", "move", "park2", "--to", EVIL],
        ["retries", "cancel", "park1", "--yes"],
        ["retries", "drain", "--dry-run"],
        ["retries", "due", "--queue", f"q{EVIL}"],
        ["waiting", "list"],
        ["waiting", "show", "park2"],
        ["waiting", "run", f"none{EVIL}"],
        ["waiting", "move", "park2", f"none{EVIL}", "--to", "2h"],
        ["waiting", "cancel", f"none{EVIL}", "--yes"],
        ["waiting", "drain", "--dry-run"],
        ["waiting", "due", "--within", EVIL],
        ["scheduled", "list"],
        ["scheduled", "show", f"none{EVIL}"],
        ["scheduled", "run", f"none{EVIL}"],
        ["scheduled", "move", f"none{EVIL}", "--to", "2h"],
        ["scheduled", "cancel", f"none{EVIL}", "--yes"],
        ["scheduled", "due", "--type", EVIL],
        ["dead-letters", "replay", "--all", "--dry-run", "--remove", f"none{EVIL}"],
        ["operations", "list"],
        ["operations", "show", operation.id],
        ["operations", "stop", f"none{EVIL}"],
        ["operations", "resume", operation.id],
        ["operations", "rest", f"none{EVIL}"],
        ["undo", f"none{EVIL}"],
        ["job", "evil3"],
        ["job", "park3"],
        ["job", f"none{EVIL}"],
        ["mark", f"v1{EVIL}"],
        ["pause", f"b.{EVIL}", "--queue", f"q{EVIL}", "--reason", EVIL],
        ["holds"],
        ["limit", f"none{EVIL}", "--concurrency", "0"],
        ["limits"],
        ["resume", f"none{EVIL}"],
        ["audit"],
        ["health"],
        ["now"],
        ["rates"],
        ["report"],
        ["dead-letters", "delete", "evil1", "evil2", f"none{EVIL}", "--yes"],
        ["dead-letters", "purge", "--queue", EVIL],
        ["dead-letters", "purge", "--all", "--yes"],
        ["policy", "check", "p.json"],
        ["policy", "show", "p.json"],
        ["policy", "explain", "--policy", json.dumps({"max_attempts": 2}), "--error", EVIL],
        ["plan", "--app", "shop"],
        ["serve", "--host", f"no{EVIL}"],
    ]
    assert {*commands(typer.main.get_command(program))} <= {
        " ".join(words[:n]) for words in lines for n in (1, 2)
    }
    said = on_a_terminal(lines, tmp_path, OJS_BRIDGE_STORE=store)
    shown = [(part.partition("\r\n")[0], STYLES.sub("", part)) for part in said.split("%% ")[1:]]
    assert len(shown) == len(lines)
    assert [(name, raw) for name, part in shown for raw in RAW if raw in part] == []
    loud = {name for name, part in shown if "x1b]0;owned" in part}
    assert {f"dead-letters {name}" for name in ("list", "show", "stats", "watch", "replay", "delete")} <= loud
    assert {
        "retries list",
        "retries run",
        "retries cancel",
        "mark",
        "pause",
        "holds",
        "resume",
        "audit",
        "policy check",
        "serve --host",
    } <= loud


def on_a_terminal(lines: list[list[str]], cwd: Path, **env: str) -> str:
    """Return what commands write to a terminal, which is wide enough for an id."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, json.dumps(lines)]
    env = {**environment(), "COLUMNS": "600", "TERM": "xterm", "PYTHONPATH": str(Path.cwd()), **env}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=env) as process:
        os.close(theirs)
        said = b""
        try:
            while more := os.read(ours, 65_536):
                said += more
        except OSError:
            pass  # Linux says so that all writers have gone.
        process.wait(60)
    os.close(ours)
    return said.decode("utf-8", "surrogateescape")
