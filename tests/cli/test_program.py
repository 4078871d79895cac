"""The program itself: its help, its processes, a terminal, missing packages."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from ojs_bridge import Bridge, JobNotFound, cli
from ojs_bridge.cli.program import IN_THE_ORDER_OF_USE
from tests.cli.running import environment, run, spawn
from tests.lives import bridge_with_outbox
from tests.operations.test_operating import bury
from tests.servers import eventually, free_port
from tests.store.test_parked import parked
from tests.store.test_store import entry


@pytest.mark.parametrize("group", [[], ["dead-letters"], ["retries"], ["policy"]])
def test_help_tells_the_exit_codes(group: list[str]) -> None:
    """The epilogue has them, as the package's docstring does; that of the program says what to begin with."""
    told = " ".join(run(*group, "--help", COLUMNS="100").out.split())
    for code in (
        "0 done",
        "1 some of it could not be done",
        "2 wrong usage, or refused",
        "3 the store or the",
    ):
        assert code in told
        assert code in " ".join(str(cli.__doc__).split())


def test_all_commands_are_there() -> None:
    told = run("dead-letters", "--help").out
    assert tuple(re.findall(r"^│ (\w+) ", told, re.MULTILINE)) == IN_THE_ORDER_OF_USE
    told = run("--help").out
    panels = {
        "Before you install": ("plan", "policy"),
        "Failed jobs": ("job", "undo", "dead-letters", "retries", "operations"),
        "Running": (
            *("now", "rates", "report", "pause", "resume", "holds", "limit", "limits", "serve"),
            *("health", "audit", "mark", "waiting", "scheduled"),
        ),
    }
    for panel, names in panels.items():
        told = told.partition(f"─ {panel} ─")[2]
        listed = told.partition("╰")[0]
        assert [
            line.split()[1] for line in listed.splitlines() if line.startswith("│ ") and line[2] != " "
        ] == [*names]


@pytest.mark.parametrize("name", ["list", "show", "replay"])
def test_a_command_on_dead_letters_may_be_typed_alone(name: str) -> None:
    told = run("dead-letters", name, "--help").out
    assert told.replace("ojs-bridge dead-letters", "ojs-bridge").split() == run(name, "--help").out.split()


@pytest.mark.parametrize(
    "words", [[], ["serve"], ["dead-letters"], ["dead-letters", "replay"], ["retries", "cancel"], ["policy"]]
)
def test_h_is_help_everywhere(words: list[str]) -> None:
    """A flag has no type in it."""
    told = run(*words, "-h", COLUMNS="100")
    assert (told.code, told.out) == (0, run(*words, "--help", COLUMNS="100").out)
    assert "Show this message and exit." in told.out
    assert "bool" not in told.out


@pytest.mark.parametrize(
    "words", [["retries", "drain"], ["dead-letters", "groups"], ["dead-letters", "export"], ["plan"]]
)
def test_a_paragraph_of_help_fills_its_lines(words: list[str]) -> None:
    """A line that ends early has no room for the next word, or ends its paragraph."""
    told = run(*words, "--help", COLUMNS="80").out.split("╭", 1)[0]
    lines = [line.strip() for line in told.splitlines()[2:]]
    assert max(map(len, lines)) <= 80
    for line, following in pairwise(lines):
        assert not line or not following or len(f"{line} {following.split()[0]}") > 78, told


def test_the_page_is_the_only_page() -> None:
    """The help has one word for the page in a browser, and no other use of that word."""
    assert "Show the page in a browser" in run("serve", "-h").out
    for words in (("dead-letters",), ("dead-letters", "list"), ("retries", "list"), ("plan",)):
        assert "page" not in run(*words, "-h").out


def test_the_version() -> None:
    """The version is that of the installed package."""
    told = run("--version")
    assert (told.code, told.out) == (0, f"ojs-bridge {metadata.version('ojs-bridge')}\n")


@pytest.mark.usefixtures("bridge")
def test_with_a_store_no_app_of_the_environment_is_imported(store: str) -> None:
    """The variable counts without --store, and for the commands that need the app."""
    app = {"OJS_BRIDGE_APP": "nowhere_to_be_found"}
    assert run("dead-letters", "list", "--store", store, **app).code == 0
    assert run("dead-letters", "replay", "j-0", "--dry-run", "--store", store, **app).code == 0
    without = run("dead-letters", "list", store=store, **app)
    assert (without.code, "'nowhere_to_be_found' cannot be imported" in without.err) == (2, True)
    for words in (("dead-letters", "replay", "j-0"), ("retries", "drain", "--yes")):
        ran = run(*words, "--store", store, **app)
        told = "ojs-bridge: store: the app's bridge has its own: leave --store out\n"
        assert (ran.code, ran.err) == (2, told)


def test_as_a_process(tmp_path: Path, bridge: Bridge, store: str) -> None:
    """`python -m ojs_bridge` runs in a pipe."""
    words = ("dead-letters", "list", "--json", "--store", store)
    ran = spawn(*words, cwd=tmp_path, program=("ojs_bridge",))
    assert (ran.code, ran.err) == (0, "")
    assert [letter["id"] for letter in ran.json] == ["j-0", "j-1", "j-2", "j-3"]


def test_a_pipe_that_ends_early(tmp_path: Path, bridge: Bridge, store: str) -> None:
    """A pipe as to `head` shows no traceback."""
    command = f"{sys.executable} -m ojs_bridge dead-letters list --json --all --store {store} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("answer", "left", "code"), [("y", 0, 0), ("n", 4, 2)])
def test_a_terminal_is_asked(bridge: Bridge, store: str, answer: str, left: int, code: int) -> None:
    """The command shows the letters first, and takes no for an answer."""
    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "ojs_bridge",
        "dead-letters",
        "purge",
        "--all",
        "--store",
        store,
        "--json",
    ]
    with subprocess.Popen(command, stdin=slave, stderr=slave, stdout=subprocess.PIPE, text=True) as process:
        os.close(slave)
        seen = read_until(master, "[y/N]")
        os.write(master, f"{answer}\n".encode())
        assert process.stdout is not None
        out = process.stdout.read()
        read_until(master, "never said")
    os.close(master)
    assert "billing.charge" in seen
    assert "external.timeout" in seen
    assert "To keep them first: ojs-bridge dead-letters export FILE" in " ".join(seen.split())
    assert f"Delete 4 dead letters from {store}?" in " ".join(seen.split())
    assert process.returncode == code
    assert bridge.dead_letters.stats().total == left
    assert ('"succeeded": 4' in out) == (answer == "y")


def test_a_terminal_sees_the_progress_of_an_export(bridge: Bridge, store: str) -> None:
    """The lines go to the pipe, the progress to the terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ojs_bridge", "dead-letters", "export", "--store", store]
    with subprocess.Popen(command, stderr=slave, stdout=subprocess.PIPE, text=True) as process:
        os.close(slave)
        seen = read_until(master, "never said")
        assert process.stdout is not None
        assert len(process.stdout.read().splitlines()) == 4
    os.close(master)
    assert "exporting" in seen
    assert "4/4" in seen


def test_the_page_is_served(tmp_path: Path, bridge: Bridge, store: str) -> None:
    """The server runs until it is ended."""
    pytest.importorskip("uvicorn")
    port = free_port()
    command = [sys.executable, "-m", "ojs_bridge", "serve", "--store", store, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: answers(port), seconds=30, what="the page")
        finally:
            process.terminate()


def answers(port: int) -> bool:
    """Return whether a port has a listener."""
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=10):
        return True
    return False


def read_until(terminal: int, words: str) -> str:
    """Return the output of a terminal until some words come, or until it is closed."""
    seen = ""
    while words not in seen:
        assert select.select([terminal], [], [], 90)[0], seen
        try:
            seen += os.read(terminal, 4096).decode()
        except OSError:  # Linux: the other side was closed
            break
    return seen


@pytest.mark.parametrize(
    ("absent", "words", "told"),
    [
        ("typer", ["policy", "show"], cli.MISSING),
        ("rich", ["policy", "show"], cli.MISSING),
        (
            "starlette",
            ["serve", "--store", "sqlite:///x.db"],
            "ojs-bridge: http: starlette is not installed: pip install 'ojs-bridge[http]'",
        ),
    ],
)
def test_what_is_not_installed(tmp_path: Path, absent: str, words: list[str], told: str) -> None:
    """The error is one line with the name of the extra."""
    lines = [
        "import sys",
        "class Absent:",
        "    def find_spec(self, name, *_):",
        f"        if name.partition('.')[0] == {absent!r}:",
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)",
        "sys.meta_path.insert(0, Absent())",
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    (tmp_path / "x.db").touch()
    # A forked process would have it imported.
    command = [sys.executable, "-m", "ojs_bridge", *words]
    variables = {**environment(), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"{told}\n")


def test_neither_framework_is_imported_for_nothing(tmp_path: Path, bridge: Bridge, store: str) -> None:
    """A policy, or a store without an app, needs none."""
    code = (
        "import sys; from tests.cli.running import run; "
        f"codes = run('policy', 'show').code, run('dead-letters', 'list', store={store!r}).code; "
        "print({'celery', 'dramatiq', 'starlette'} & set(sys.modules), *codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set() 0 0\n"


def test_a_job_is_asked_for_in_one_place(store: str) -> None:
    """A dead letter or a parked retry, by its id or the beginning of it; in Python, in words, in JSON."""
    bridge, _ = bridge_with_outbox(store)
    bury(bridge, "j-dead-1", errors=(entry(1, message="down"), entry(2, message="down again")))
    assert bridge.store is not None
    bridge.store.parked.park(parked("j-parked-1", state={"errors": [entry(1, message="slow")]}))
    dead, waits = bridge.jobs.get("j-dead-1"), bridge.jobs.get("j-parked-1")
    assert (dead.state, dead.attempts, len(dead.errors)) == ("discarded", 3, 2)
    assert (waits.state, waits.attempts, len(waits.errors)) == ("retryable", 1, 1)
    with pytest.raises(JobNotFound, match="no dead letter 'j-none', and no such job waits in the store"):
        bridge.jobs.get("j-none")
    for job, words in (
        ("j-dead", ("j-dead-1", "down again", "3 of 3")),
        ("j-parked", ("j-parked-1", "slow", "due")),
    ):
        told = run("job", job, store=store)
        assert told.code == 0
        assert all(word in told.out for word in words), told.out
    assert run("job", "j-parked-1", "--json", store=store).json[0]["state"] == "retryable"
    assert run("job", "j-none", store=store).code == 1
    several = run("job", "j-de", store=store)
    bury(bridge, "j-dead-2")
    assert run("job", "j-dead", store=store).code == 2
    assert several.code == 0
