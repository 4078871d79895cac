"""The README is short, and its snippets run, with those of two pages: with real workers, in a shell."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from ojs_bridge import Bridge
from tests.forking import ended, started
from tests.servers import eventually
from tests.servers.ports import free_port

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def readme() -> str:
    """Return the README's text."""
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def pages(readme: str) -> str:
    """Return the README with the pages whose snippets go on from it."""
    return readme + "".join(
        (ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("policies", "errors")
    )


@pytest.fixture
def shop(pages: str, tmp_path: Path, valkey_url: str) -> tuple[Path, dict[str, str]]:
    """Write every snippet as the module it names; return the folder and the snippets' environment."""
    for snippet in SNIPPET.finditer(pages):
        (tmp_path / snippet["name"]).write_text(snippet["code"])
    return tmp_path, {**os.environ, "BROKER_URL": valkey_url, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_the_readme_is_short(readme: str) -> None:
    """It is a door, and what it leads to has pages of its own."""
    assert len(readme.splitlines()) <= 150


def test_every_python_snippet_names_its_module(pages: str) -> None:
    """The tests would not run a snippet without a name."""
    names = [snippet["name"] for snippet in SNIPPET.finditer(pages)]
    assert len(names) == pages.count("```python") == len(set(names))


@pytest.mark.parametrize("name", ["actors", "tasks", "fleet", "handlers", "policy", "waits", "errors"])
def test_a_module_of_the_readme_imports(shop: tuple[Path, dict[str, str]], name: str) -> None:
    """Each snippet is a module that works as it stands."""
    folder, environment = shop
    # In a process of its own, where no other module has imported what this one forgets.
    subprocess.run([sys.executable, "-c", f"import {name}"], cwd=folder, env=environment, check=True)


def test_the_readme_from_sending_to_replaying(readme: str, shop: tuple[Path, dict[str, str]]) -> None:
    """The jobs of the three doors die; the README's own command sends the fleet's back."""
    folder, environment = shop
    store = Bridge(f"sqlite:///{folder}/ojs.db").dead_letters
    with _workers(folder, environment):
        for job in (
            "actors; actors.charge.send(7)",
            "tasks; tasks.charge.delay(7)",
            "fleet; fleet.sync_crm.delay('a')",
        ):
            _said(folder, environment, "python", "-c", f"import {job}")
        eventually(lambda: store.stats().total == 3, seconds=60, what="three dead letters")
        letters = {letter.type: letter for letter in store.list().letters}
        assert {name: letter.attempt for name, letter in letters.items()} == {
            "charge": 3,
            "tasks.charge": 3,
            "billing.sync_crm": 3,
        }
        (replay,) = [line for line in COMMAND.findall(readme) if "replay" in line]
        _said(folder, environment, "ojs-bridge", *shlex.split(replay))
        letter_id = letters["billing.sync_crm"].id
        eventually(lambda: store.stats().total == 3, seconds=60, what="the second death")
    assert store.get(letter_id).replay_count == 1
    assert [error["attempt"] for error in store.get(letter_id).errors] == [1, 2, 3, 1, 2, 3]


def test_a_policy_for_one_job(shop: tuple[Path, dict[str, str]]) -> None:
    """The producers of both frameworks send it with their job, and refuse an invalid one."""
    folder, environment = shop
    _said(folder, environment, "python", "send.py")


COMMAND = re.compile(r"^\$ ojs-bridge (.*)$", re.MULTILINE)


def test_the_commands_of_the_readme(readme: str, shop: tuple[Path, dict[str, str]]) -> None:
    """The commands run one after the other, in the folder of the snippets; the server answers."""
    folder, environment = shop
    port = free_port()
    Bridge(f"sqlite:///{folder}/ojs.db").store.prepare()  # type: ignore[union-attr]
    commands = [shlex.split(line) for line in COMMAND.findall(readme)]
    assert len(commands) == 4
    *ending, (serve, *options) = commands
    for command in ending:
        _said(folder, environment, "ojs-bridge", *command)
    command = ["ojs-bridge", serve, "--port", str(port), *options]
    server = started(command, env=environment, log=folder / "server.log", cwd=folder)
    try:
        eventually(lambda: _answers(f"http://127.0.0.1:{port}/"), seconds=30, what="the page")
    finally:
        server.terminate()
        server.wait(90)


def _answers(url: str) -> bool:
    try:
        return "Dead letters" in httpx.get(url).text
    except httpx.TransportError:
        return False


def test_the_two_commands_stand_at_the_top(readme: str) -> None:
    """A newcomer finds both on the first screen, and the Makefile has them."""
    top = "\n".join(readme.splitlines()[:20])
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"$ make {command}" in top
        assert f"\n{command}:" in makefile


def _said(folder: Path, environment: dict[str, str], *words: str) -> str:
    done = ended(words, env=environment, cwd=folder)
    assert done.status == 0, done.err
    return done.out


@contextmanager
def _workers(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run the README's three workers."""
    commands = {
        "actors": "dramatiq actors --processes 1 --threads 2",
        "tasks": "celery -A tasks worker -P solo -l INFO -Q celery -n tasks",
        "fleet": "celery -A fleet worker -P solo -l INFO -Q fleet -n fleet",
    }
    # Two apps on one broker would take each other's jobs from the default queue.
    (folder / "fleet.py").write_text(
        (folder / "fleet.py").read_text() + "\napp.conf.task_default_queue = 'fleet'\n"
    )
    with ExitStack() as stack:
        for name, command in commands.items():
            worker = started(command.split(), env=environment, log=folder / f"{name}.log", cwd=folder)
            stack.callback(worker.wait, 20)
            stack.callback(worker.terminate)
        yield
