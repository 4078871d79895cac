"""The Python of the pages runs: all snippets of a page, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer

from ojs_bridge import Bridge
from ojs_bridge.cli.program import program as command_line
from tests.forking import ended
from tests.lives import bridge_with_outbox
from tests.operations.test_operating import bury, celery_message

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "README.md"
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
#: The pages whose snippets other tests run, or which show parts of a project of `examples`.
ELSEWHERE = {
    *("tutorial.md", "how-to/install.md", "how-to/testing.md", "how-to/policies.md", "how-to/errors.md"),
    *("how-to/migrating.md", "how-to/coming-from.md", "how-to/monitoring.md", "how-to/django.md"),
    *("how-to/flask.md", "how-to/fastapi.md", "how-to/production.md", "how-to/one-task.md"),
}
PAGES = {str(path.relative_to(DOCS)): path.read_text("utf-8") for path in DOCS.rglob("*.md")}
RUN = sorted(name for name, text in PAGES.items() if "```python" in text and name not in ELSEWHERE)
LETTER = "5d4f0c1e"


@pytest.mark.parametrize("name", RUN)
def test_the_snippets_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = prepared()
    for _, code in SNIPPET.findall(PAGES[name]):
        if "operations.begin" in code:
            bury_timeouts(names["bridge"])
        exec(compile(textwrap.dedent(code), name, "exec"), names)


#: The task of the shop on each page.
CHARGE = {"flask": "shop.charge", "fastapi": "charge"}


@pytest.mark.parametrize("name", CHARGE)
def test_the_shop_of_a_page_has_the_settings_of_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, because the shop sets the current app or the global broker."""
    pytest.importorskip(name)
    page = PAGES[f"how-to/{name}.md"]
    for file, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / file).write_text(text)
    for variable, value in re.findall(r"^\$ export (\w+)=(.+)$", page, re.MULTILINE):
        monkeypatch.setenv(variable, value.strip("'"))
    done = run_cli("policy", "explain", "--app", "shop", "--task", CHARGE[name], folder=tmp_path)
    assert "attempt 5 of 5" in done


COMMANDS = re.compile(r"^\$ (ojs-bridge (?!serve).*)$", re.MULTILINE)
MESSAGE = {"properties": {}, "exchange": "", "routing_key": "celery", "queue": "celery"}
SHOP = """\
from celery import Celery
from ojs_bridge import Bridge
from ojs_bridge.celery import install
app = Celery("shop", broker="memory://")
@app.task(name="billing.charge")
def charge(order): ...
install(app, Bridge("sqlite:///shop.db"))
"""


def test_the_commands_of_a_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the page on replays: its shop has dead letters, and they are sent back."""
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(SHOP)
    bridge = prepared()["bridge"]
    bridge.dead_letters.purge(confirm=True)
    for n in (1, 2):
        bury(
            bridge,
            f"{LETTER}{n}",
            framework="celery",
            type="billing.charge",
            message=MESSAGE | celery_message(n),
        )
    commands = COMMANDS.findall(PAGES["how-to/operating.md"])
    assert len(commands) == 4
    for command in commands:
        run_cli(*shlex.split(command.replace("5d4f", f"{LETTER}1"))[1:], folder=tmp_path)


def run_cli(*words: str, folder: Path) -> str:
    """Run a command of the command line in a folder; return its output."""
    done = ended(["ojs-bridge", *words], env=os.environ, cwd=folder)
    assert done.status == 0, done.err
    return done.out


#: A command at a prompt, or in a sentence, where it may go on in the next line.
COMMAND = re.compile(r"^ *\$ (?:\w+=\S+ )*ojs-bridge (.+)$|`ojs-bridge\s([^`]+)`", re.MULTILINE)
#: The words of a sentence for what a reader puts in their place.
PLACEHOLDERS = {"…", "...", "[OPTIONS]"}


def test_the_commands_of_all_pages_exist() -> None:
    """So do their options."""
    program = typer.main.get_command(command_line)
    pages = {"README.md": README.read_text("utf-8"), **PAGES}
    commands = [
        (name, match[1] or match[2]) for name, text in pages.items() for match in COMMAND.finditer(text)
    ]
    assert len(commands) > 40
    wrong = [(name, text) for name, text in commands if not exists(program, shlex.split(text, comments=True))]
    assert wrong == []


def exists(command: Any, words: list[str]) -> bool:
    """Return whether a command has these subcommands and options; `a|b` stands for two of them."""
    for place, word in enumerate(words):
        if not hasattr(command, "commands") or word.startswith("-") or word in PLACEHOLDERS:
            break
        found = [command.commands.get(name) for name in word.split("|")]
        if None in found:
            return False
        if len(found) > 1:
            return all(exists(one, words[place + 1 :]) for one in found)
        command = found[0]
    known = {"-h", "--help"} | {name for param in command.params for name in param.opts}
    return {word.partition("=")[0] for word in words if word.startswith("-")} <= known


def test_a_command_that_does_not_exist_is_found() -> None:
    program = typer.main.get_command(command_line)
    assert exists(program, ["retries", "run|cancel", "--all"])
    assert not exists(program, ["retries", "rum"])
    assert not exists(program, ["retries", "run|cancel", "--dry-run"])


def bury_timeouts(bridge: Bridge) -> None:
    """Bury more letters than a probe on the pages takes: the snippet before may have sent all back."""
    for n, letter_id in enumerate([LETTER, *(f"timeout-{n}" for n in range(12))]):
        errors = ({"attempt": 1, "type": "external.timeout", "message": "no answer"},)
        bury(bridge, letter_id, type="billing.charge", message=celery_message(n), errors=errors)


def prepared() -> dict[str, Any]:
    """Return what an operator has at hand: a bridge with dead letters."""
    bridge, _ = bridge_with_outbox("sqlite:///shop.db")
    for n, letter in enumerate((LETTER, "6e5f", "7f60")):
        bury(bridge, letter, type="billing.charge", message=celery_message(n))
    return {"__name__": "snippet", "Bridge": Bridge, "bridge": bridge}
