"""Every snippet of the README runs: its modules with real workers, its commands in a shell."""

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
from tests.servers import eventually
from tests.servers.ports import free_port

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def readme() -> str:
    """Return the README's text."""
    return (ROOT / "README.md").read_text()


@pytest.fixture
def shop(readme: str, tmp_path: Path, valkey_url: str) -> tuple[Path, dict[str, str]]:
    """Write every snippet as the module it names; return the folder and the snippets' environment."""
    for snippet in SNIPPET.finditer(readme):
        (tmp_path / snippet["name"]).write_text(snippet["code"])
    return tmp_path, {**os.environ, "BROKER_URL": valkey_url, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_every_python_snippet_names_its_module(readme: str) -> None:
    """The tests would not run a snippet without a name."""
    names = [snippet["name"] for snippet in SNIPPET.finditer(readme)]
    assert len(names) == readme.count("```python") == len(set(names))


@pytest.mark.parametrize("name", ["actors", "tasks", "fleet", "handlers", "policy"])
def test_a_module_of_the_readme_imports(shop: tuple[Path, dict[str, str]], name: str) -> None:
    """Each snippet is a module that works as it stands."""
    folder, environment = shop
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_from_sending_to_replaying(shop: tuple[Path, dict[str, str]]) -> None:
    """The workers run the jobs of send.py; the fleet's job dies, and replay.py sends it back."""
    folder, environment = shop
    store = Bridge(f"sqlite:///{folder}/ojs.db").dead_letters
    with _workers(folder, environment) as log:
        _python(folder, environment, "send.py")
        eventually(lambda: log("actors").count("charged 7") == 1, seconds=30, what="Dramatiq's charge")
        eventually(lambda: log("tasks").count("charged 7") == 1, seconds=30, what="Celery's charge")
        _python(folder, environment, "-c", "import fleet; fleet.sync_crm.delay('acme')")
        eventually(lambda: store.stats().total == 1, seconds=30, what="the fleet's dead letter")
        (letter,) = store.list().letters
        assert (letter.error_type, letter.attempt) == ("external.unreachable", 2)
        assert letter.id in _python(folder, environment, "replay.py")
        eventually(lambda: store.stats().total == 1, seconds=30, what="the second death")
    assert store.get(letter.id).replay_count == 1
    assert [error["attempt"] for error in store.get(letter.id).errors] == [1, 2, 1, 2]


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
        _python(folder, environment, "-m", "ojs_bridge.cli", *command)
    command = [sys.executable, "-m", "ojs_bridge.cli", serve, "--port", str(port), *options]
    server = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        eventually(lambda: _answers(f"http://127.0.0.1:{port}/"), seconds=30, what="the page")
    finally:
        server.terminate()
        server.wait(30)


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


def _python(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def _workers(folder: Path, environment: dict[str, str]) -> Iterator[object]:
    """Run the README's three workers; yield a function that reads a worker's output."""
    commands = {
        "actors": ["dramatiq", "actors", "--processes", "1", "--threads", "2"],
        "tasks": [
            "celery",
            "-A",
            "tasks",
            "worker",
            "-P",
            "solo",
            "-l",
            "INFO",
            "-Q",
            "celery",
            "-n",
            "tasks",
        ],
        "fleet": [
            "celery",
            "-A",
            "fleet",
            "worker",
            "-P",
            "solo",
            "-l",
            "INFO",
            "-Q",
            "fleet",
            "-n",
            "fleet",
        ],
    }
    # Two apps on one broker would take each other's jobs from the default queue.
    (folder / "fleet.py").write_text(
        (folder / "fleet.py").read_text() + "\napp.conf.task_default_queue = 'fleet'\n"
    )
    with ExitStack() as stack:
        for name, command in commands.items():
            output = stack.enter_context((folder / f"{name}.log").open("w"))
            worker = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=output, stderr=output
            )
            stack.callback(worker.wait, 20)
            stack.callback(worker.terminate)
        yield lambda name: (folder / f"{name}.log").read_text()
