"""The README is short, and its snippets run, with those of two pages: with real workers, in a shell."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from ojs_bridge import Bridge
from tests.forking import Forked, ended, started
from tests.servers import eventually
from tests.servers.ports import free_port

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)
DIFF = re.compile(r"```diff\n # (?P<name>\w+\.py)\n(?P<lines>.*?)```", re.DOTALL)
WAITS = """
import pathlib, time

@{decorator}
def charge(order_id):
    print(f"charges {{order_id}}", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
"""
RUNS_ONCE = """
@{decorator}
def charge(order_id):
    print(f"charges {{order_id}}", flush=True)
"""
#: What a reader has in the module of each diff, and of each block for production.
HAS = {
    "shop.py": WAITS.format(decorator="app.task"),
    "actors.py": WAITS.format(decorator='dramatiq.actor(queue_name="QUEUE")'),
    "celery_shop.py": RUNS_ONCE.format(decorator="app.task"),
    "one_celery.py": WAITS.format(decorator="app.task"),
    "one_dramatiq.py": WAITS.format(decorator='dramatiq.actor(queue_name="QUEUE")'),
    "dramatiq_shop.py": RUNS_ONCE.format(decorator='dramatiq.actor(queue_name="QUEUE")'),
}


class Shop(NamedTuple):
    """A folder with the modules of the README, the environment of its commands, and the URL of its store."""

    folder: Path
    environment: dict[str, str]
    store: str

    def says(self, *words: str) -> str:
        """Run a command in the folder, and return what it prints."""
        done = ended(words, env=self.environment, cwd=self.folder)
        assert done.status == 0, done.err
        return done.out


@pytest.fixture(scope="module")
def readme() -> str:
    """Return the README's text."""
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def pages(readme: str) -> str:
    """Return the README with the pages whose snippets go on from it."""
    return readme + "".join(
        (ROOT / "docs" / "how-to" / f"{name}.md").read_text()
        for name in ("policies", "errors", "production", "one-task")
    )


@pytest.fixture
def shop(
    pages: str, tmp_path: Path, valkey_url: str, rabbitmq_url: str, postgres_store_url: str, unique: str
) -> Shop:
    """Write every snippet as the module it names, and apply every diff, with the URLs of real servers."""
    real = {
        "redis://redis:6379/0": valkey_url,
        "amqp://rabbitmq": rabbitmq_url,
        "postgresql://shop@db/shop": postgres_store_url,
    }
    for shown, url in real.items():
        pages = pages.replace(shown, url)
    texts = {snippet["name"]: snippet["code"] for snippet in SNIPPET.finditer(pages)}
    for diff in DIFF.finditer(pages):
        lines = diff["lines"].splitlines(keepends=True)
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        texts[diff["name"]] = after
    for name, text in texts.items():
        (tmp_path / name).write_text(text + HAS.get(name, "").replace("QUEUE", unique))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OJS_BRIDGE_")},
        "BROKER_URL": valkey_url,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PYTHONUNBUFFERED": "1",
    }
    return Shop(tmp_path, environment, postgres_store_url)


def test_the_readme_is_short(readme: str) -> None:
    """It is a door, and what it leads to has pages of its own."""
    assert len(readme.splitlines()) <= 120


def test_every_python_snippet_names_its_module(pages: str) -> None:
    """The tests would not run a snippet without a name."""
    names = [snippet["name"] for snippet in SNIPPET.finditer(pages)]
    assert len(names) == pages.count("```python") == len(set(names))
    assert {diff["name"] for diff in DIFF.finditer(pages)} == {"shop.py", "actors.py"}
    assert pages.count("```diff") == 2


@pytest.mark.parametrize(
    "name",
    [
        "shop",
        "actors",
        "tasks",
        "celery_shop",
        "dramatiq_shop",
        "one_celery",
        "handlers",
        "policy",
        "waits",
        "errors",
    ],
)
def test_a_module_of_the_readme_imports(shop: Shop, name: str) -> None:
    """Each snippet is a module that works as it stands."""
    # In a process of its own, where no other module has imported what this one forgets.
    subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=shop.folder, env=shop.environment, check=True
    )


#: The commands of a worker and of a job, and what the log says of the killed run and its retry.
DIFFS = {
    "shop": (
        "celery -A shop worker -l INFO -c 1 --without-mingle",
        "shop.charge.delay(7)",
        r"attempt 1 of 4 failed with visibility_timeout; retry 1 in 180\.000 s",
    ),
    "actors": (
        "dramatiq actors --processes 1 --threads 2",
        "actors.charge.send(7)",
        r"attempt 1 of 21 failed with visibility_timeout; retry 1 in (1[5-9]|2\d|30)\.\d+ s",
    ),
}
#: Those of the page that moves one task: its policy says the wait.
ONE_TASK = {
    "one_celery": (
        "celery -A one_celery worker -l INFO -c 1 --without-mingle",
        "one_celery.charge.delay(7)",
        r"attempt 1 of 5 failed with visibility_timeout; retry 1 in [2-7]\.\d+ s",
    ),
    "one_dramatiq": (
        "dramatiq one_dramatiq --processes 1 --threads 2",
        "one_dramatiq.charge.send(7)",
        r"attempt 1 of 5 failed with visibility_timeout; retry 1 in [2-7]\.\d+ s",
    ),
}


@pytest.mark.parametrize("modules", [DIFFS, ONE_TASK], ids=["the README's diffs", "one task"])
def test_a_job_of_each_module_outlives_its_worker(
    shop: Shop, modules: dict[str, tuple[str, str, str]]
) -> None:
    """Its worker is killed: the attempt counts, and the retry waits as long as the page says."""
    with ExitStack() as stack:
        workers = {
            name: _worker(stack, shop, command, f"{name}-1") for name, (command, *_) in modules.items()
        }
        for name, (_, job, _) in modules.items():
            shop.says("python", "-c", f"import {name}; {job}")
        for name, worker in workers.items():
            eventually(lambda name=name: "charges 7" in _log(shop, f"{name}-1"), seconds=60, what=name)
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(30)
        for name, (command, *_) in modules.items():
            _worker(stack, shop, command, f"{name}-2")
        for name, (*_, said) in modules.items():
            told = re.compile(said)
            eventually(
                lambda name=name, told=told: told.search(_log(shop, f"{name}-2")), seconds=60, what=said
            )


def test_the_blocks_for_production_run(shop: Shop) -> None:
    """A worker of each runs a job, and misses nothing."""
    blocks = {
        "celery_shop": ("celery -A celery_shop worker -l INFO -c 1", "charge.delay(7)"),
        "dramatiq_shop": ("dramatiq dramatiq_shop --worker-shutdown-timeout 20000", "charge.send(7)"),
    }
    with ExitStack() as stack:
        for name, (command, job) in blocks.items():
            _worker(stack, shop, command, name)
            shop.says("python", "-c", f"import {name}; {name}.{job}")
        for name in blocks:
            eventually(lambda name=name: "charges 7" in _log(shop, name), seconds=60, what=name)
            for missed in ("no store", "SQLite", "acks_late is off", "visibility_timeout is"):
                assert missed not in _log(shop, name)


def test_the_readme_from_sending_to_replaying(readme: str, shop: Shop) -> None:
    """The job of the third door dies; the README's own command sends it back."""
    store = Bridge(shop.store).dead_letters
    with ExitStack() as stack:
        _worker(stack, shop, "celery -A tasks worker -P solo -l INFO", "tasks")
        shop.says("python", "-c", "import tasks; tasks.charge.delay(7)")
        eventually(lambda: store.stats().total == 1, seconds=60, what="a dead letter")
        (letter,) = store.list().letters
        assert (letter.type, letter.attempt) == ("tasks.charge", 3)
        (replay,) = [line for line in COMMAND.findall(readme) if "replay" in line]
        shop.says("ojs-bridge", *shlex.split(replay))
        eventually(lambda: store.stats().total == 1, seconds=60, what="the second death")
    assert store.get(letter.id).replay_count == 1
    assert [error["attempt"] for error in store.get(letter.id).errors] == [1, 2, 3, 1, 2, 3]


def test_a_policy_for_one_job(shop: Shop) -> None:
    """The producers of both frameworks send it with their job, and refuse an invalid one."""
    shop.says("python", "send.py")


#: A line of a console, without its comment, or code in a sentence.
COMMAND = re.compile(r"(?:^\$ |`)ojs-bridge ([^`\n]*?)(?: +#.*)?(?:`|$)", re.MULTILINE)


def test_the_commands_of_the_readme(readme: str, shop: Shop) -> None:
    """The commands run one after the other, in the folder of the snippets; the server answers."""
    port = free_port()
    Bridge(shop.store).store.prepare()  # type: ignore[union-attr]
    commands = [shlex.split(line) for line in COMMAND.findall(readme)]
    assert [command[0] for command in commands] == [*("plan", "serve", "dead-letters", "retries")]
    for command in commands:
        if command[0] != "serve":
            shop.says("ojs-bridge", *command)
    (serve,) = [command for command in commands if command[0] == "serve"]
    command = ["ojs-bridge", *serve, "--port", str(port)]
    server = started(command, env=shop.environment, log=shop.folder / "server.log", cwd=shop.folder)
    try:
        eventually(lambda: _answers(f"http://127.0.0.1:{port}/"), seconds=30, what="the page")
    finally:
        server.terminate()
        server.wait(90)


def _answers(url: str) -> bool:
    try:
        return "<title>ojs-bridge</title>" in httpx.get(url).text
    except httpx.TransportError:
        return False


def test_the_two_commands_stand_beside_the_plan(readme: str) -> None:
    """A newcomer finds both under one heading, and the Makefile has them."""
    headings = re.findall(r"^## (.+)$", readme, re.MULTILINE)
    assert headings[1:3] == ["Look first", "See it run"]
    seen = readme.partition("## See it run")[2].partition("\n## ")[0]
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"$ make {command}" in seen
        assert f"\n{command}:" in makefile


def _log(shop: Shop, name: str) -> str:
    return (shop.folder / f"{name}.log").read_text()


def _worker(stack: ExitStack, shop: Shop, command: str, name: str) -> Forked:
    """Start a worker that leads its process group; it is killed in the end."""
    log = shop.folder / f"{name}.log"
    worker = started(command.split(), env=shop.environment, log=log, cwd=shop.folder, leads=True)

    def end() -> None:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(30)

    stack.callback(end)
    return worker
