"""migrating.md and going-back.md, word by word on both shops: real workers, and orders all the time."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest
import redis
from packaging.requirements import Requirement

from ojs_bridge import open_store
from ojs_bridge.store import Filter, Store
from tests.forking import Forked, ended, started
from tests.servers import Valkey, eventually

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("migrating", "going-back")]
GUIDE = "".join(page.read_text() for page in PAGES)
SHOPS = {"Celery": ROOT / "examples" / "celery_shop", "Dramatiq": ROOT / "examples" / "dramatiq_shop"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOR_ONE = re.compile(r"# (Celery|Dramatiq)$")
FILE = re.compile(r"# (?P<name>\w+\.\w+), (?P<framework>Celery|Dramatiq)(?P<at_the_end>, at the end)?\n")
#: The guide's programs that are Python's, and those that are the shell's.
PROGRAMS = {"celery", "dramatiq", "ojs-bridge", "python"}
PLAIN = {"rm", "sed", "touch"}
WORKER = re.compile(r"celery -A \w+ worker|dramatiq \w+")
READY = {"Celery": " ready.", "Dramatiq": "Worker process is ready for action."}
#: The brokers' keys of messages that wait, are delayed, or are being worked on; an empty one is gone.
QUEUES = {"Celery": ("celery", "unacked"), "Dramatiq": ("dramatiq:default.msgs", "dramatiq:default.DQ.msgs")}
#: The commands to repeat until they show the guide's output: parked retries and dead letters take time.
ASKED = ("ojs-bridge retries list", "ojs-bridge dead-letters list")
#: Orders that come in while workers are replaced.
MEANWHILE = 2
EFFECTS = ("charged order", "sent the receipt of order", "the CRM knows order", "booked order")
DONE = re.compile(rf"({'|'.join(EFFECTS)}) (\d+)")
#: The end of a run in a Celery worker's log: when, of which job, and after how many seconds it is retried.
RUN = re.compile(
    r"^\[(.{23}): .*Task \S+\[(\S+)\] (?:retry: Retry in ([\d.]+)s|succeeded|raised)", re.MULTILINE
)
#: The seconds without a beginning that are a pause, back from now and on from now.
QUIET = 0.15
#: The errors that jobs die of under the bridge, with the attempt: a stolen card is asked for once.
DEAD = {("outside.CardStolen", 1), ("outside.Declined", 1), ("builtins.OSError", 1)}
CARDS = runpy.run_path(str(SHOPS["Celery"] / "outside.py"))["CARDS"]


@dataclass(frozen=True)
class Step:
    """A command of the guide with its output, or a file to write; for one framework or for both."""

    text: str
    shown: str = ""
    frameworks: tuple[str, ...] = tuple(SHOPS)
    file: str = ""
    at_the_end: bool = False


def steps() -> Iterator[Step]:
    """Yield the steps of the guide in order; fail for a block that no step would run."""
    for language, text in BLOCK.findall(GUIDE):
        if language == "console":
            yield from _commands(text)
            continue
        found = FILE.match(text)
        assert found, f"a {language} block does not say which file it is: {text}"
        frameworks = (found["framework"],)
        yield Step(text[found.end() :], "", frameworks, found["name"], bool(found["at_the_end"]))


def _commands(text: str) -> Iterator[Step]:
    assert text.startswith("$ ")
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        one = FOR_ONE.search(line)
        words = line[: one.start()] if one else line
        yield Step(words.strip(), shown, (one[1],) if one else tuple(SHOPS))


def pattern_of(shown: str) -> re.Pattern[str]:
    """Return a pattern for what is shown: a line `…` stands for any lines, in a line it stands for anything.

    A figure stands for any, and blanks for as many as there are.
    """
    lines = [r"(.*\n)*?" if line == "…" else _pattern_of_line(line) + r"\n" for line in shown.splitlines()]
    return re.compile("".join(lines))


def _pattern_of_line(line: str) -> str:
    tokens = re.split(r"(…|\d+|─+| +)", line)
    return "".join(_ANY.get(token[:1], re.escape(token)) for token in tokens)


_ANY = {"…": ".*", "─": "─+", " ": " +", **dict.fromkeys("0123456789", r"\d+")}


def test_nothing_in_the_guide_is_skipped() -> None:
    """Every fence and every prompt is a step."""
    found = [*steps()]
    files = [step for step in found if step.file]
    assert len(files) == len(BLOCK.findall(GUIDE)) - GUIDE.count("```console")
    assert len(found) - len(files) == len(re.findall(r"^\$ ", GUIDE, re.MULTILINE))
    assert GUIDE.count("```") == 2 * len(BLOCK.findall(GUIDE))


@dataclass
class Workers:
    """The workers of one deployment."""

    process: Forked
    log: Path

    def is_ready(self, framework: str) -> bool:
        """Return whether the workers take jobs; fail when they have ended."""
        text = self.log.read_text(errors="replace")
        assert self.process.poll() is None, text
        return READY[framework] in text

    def end(self) -> None:
        """End them as a deployment does, and return when they have ended."""
        self.process.terminate()
        self.process.wait(90)

    def kill(self) -> None:
        """Leave none of their processes behind."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(90)


@dataclass
class Walk:
    """The way of one framework through the guide."""

    framework: str
    folder: Path
    server: str
    environment: dict[str, str]
    deployed: list[Workers] = field(default_factory=list)
    #: The orders that only came to be charged.
    charged_only: set[int] = field(default_factory=set)

    def take(self, step: Step) -> None:
        """Carry out a step, and check that it shows the output of the guide."""
        began = time.monotonic()
        if step.file:
            self._write(step)
        else:
            self._command(step)
        print(f"{time.monotonic() - began:5.1f} s  {step.file or step.text}")

    def _write(self, step: Step) -> None:
        with (self.folder / step.file).open("a" if step.at_the_end else "w") as file:
            file.write("\n" * step.at_the_end + step.text)

    def _command(self, step: Step) -> None:
        words = shlex.split(step.text.replace("redis://localhost:6379", self.server), comments=True)
        given = {}
        while "=" in words[0] and words[0].partition("=")[0].isupper():
            name, _, given[name] = words.pop(0).partition("=")
        match words:
            case ["export", *settings]:
                self.environment.update(setting.split("=", 1) for setting in settings)
            case ["pip", "install", *packages]:
                assert all(_is_installed(Requirement(package)) for package in packages)
            case _ if WORKER.match(" ".join(words)):
                self._deploy(words, given)
            case _:
                self._run(words, step)
        if words == ["python", "sell_one.py"]:
            self.charged_only.add(self.orders())

    def _run(self, words: list[str], step: Step) -> None:
        """Run a command until it shows the guide's output; a command that changes something runs once."""
        pattern, said = pattern_of(step.shown), []

        def is_shown() -> bool:
            said[:] = [self._said(words).strip("\n") + "\n"]
            return not step.shown or bool(pattern.fullmatch(said[0]))

        try:
            eventually(is_shown, seconds=45 if step.text.startswith(ASKED) else 0, what=step.text)
        except TimeoutError:
            pytest.fail(f"$ {step.text}\n{said[0]}\nis not what the guide shows:\n{step.shown}")

    def _said(self, words: list[str]) -> str:
        if words[0] in PROGRAMS:
            done = ended(words, env=self.environment, cwd=self.folder)
            assert done.status == 0, f"{words}: {done.out}{done.err}"
            return done.out + done.err
        assert words[0] in PLAIN
        return subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def _deploy(self, words: list[str], given: dict[str, str]) -> None:
        """Start new workers and end the old ones, while orders come in."""
        old, log = self.deployed[-1:], self.folder / f"workers-{len(self.deployed)}.log"
        environment = {**self.environment, **given}
        new = started(words, env=environment, log=log, cwd=self.folder, leads=True)
        self.deployed.append(Workers(new, log))
        if old:
            self._said(["python", "sell.py", str(MEANWHILE)])
        eventually(lambda: self.deployed[-1].is_ready(self.framework), seconds=50, what="new workers")
        eventually(self.is_calm, seconds=50, what="a moment in which no job begins")
        for workers in old:
            workers.end()

    def served(self) -> Counter[tuple[str, int]]:
        """Return the effects for each order that the workers' logs show."""
        logs = (workers.log.read_text(errors="replace") for workers in self.deployed)
        return Counter((what, int(order)) for log in logs for what, order in DONE.findall(log))

    def is_calm(self) -> bool:
        """Return whether no Celery job begins in this moment, as far as the logs tell.

        Celery itself gives back a job that begins when its worker is told to stop. A worker without the
        bridge runs such a job again.
        """
        now = datetime.now()
        logs = [workers.log for workers in self.deployed]
        runs = sorted(run for log in logs for run in RUN.findall(log.read_text(errors="replace")))
        last = {job: (datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f"), delay) for at, job, delay in runs}
        due = [at + timedelta(seconds=float(delay)) for at, delay in last.values() if delay]
        newest = max(datetime.fromtimestamp(log.stat().st_mtime) for log in logs)
        pause = timedelta(seconds=QUIET)
        return newest < now - pause and not any(now - pause < each < now + pause for each in due)

    def ordered(self) -> Counter[tuple[str, int]]:
        """Return the effects that each order must have, once each: not every card can be charged."""
        everything = {*range(1, self.orders() + 1)}
        payable = {order for order in everything if CARDS[order % len(CARDS)] in ("good", "busy")}
        rest = everything - self.charged_only
        return Counter((what, n) for what in EFFECTS for n in (payable if what == EFFECTS[0] else rest))

    @property
    def store(self) -> Store:
        """The store of the bridge."""
        return open_store(self.environment["OJS_BRIDGE_STORE"])

    def left(self) -> int:
        """Return how many queues of the broker hold a message, plus how many retries are parked."""
        with redis.Redis.from_url(self.environment["BROKER_URL"]) as client:
            return client.exists(*QUEUES[self.framework]) + self.store.parked.count()

    def orders(self) -> int:
        """Return how many orders were placed."""
        return len([*self.folder.glob("order-*-placed")])


def _is_installed(package: Requirement) -> bool:
    """Return whether a package is installed, with the extras that are asked for."""
    return package.extras <= set(metadata.metadata(package.name).get_all("Provides-Extra") or ())


@pytest.fixture(params=SHOPS)
def walk(request: pytest.FixtureRequest, tmp_path: Path, valkey: Valkey, valkey_url: str) -> Iterator[Walk]:
    """A copy of a shop, before anything is moved."""
    folder = tmp_path / "shop"
    ignored = shutil.ignore_patterns("__pycache__", "*.db", "order-*")
    shutil.copytree(SHOPS[request.param], folder, ignore=ignored)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OJS_BRIDGE_") and k != "COLUMNS"}
    environment |= {"PYTHONUNBUFFERED": "1"}
    walk = Walk(request.param, folder, valkey_url.rpartition("/")[0], environment)
    yield walk
    for workers in walk.deployed:
        workers.kill()
        print(workers.log.read_text(errors="replace")[-5_000:])


@pytest.mark.timeout(400)
def test_the_guide(walk: Walk) -> None:
    """The test runs all commands, from the plan to the way back; every order is served once."""
    for step in steps():
        if walk.framework in step.frameworks:
            walk.take(step)
    assert walk.orders() >= 40
    eventually(lambda: walk.served() >= walk.ordered(), seconds=55, what="all orders")
    eventually(lambda: not walk.left(), what="an empty broker and no parked retries")
    assert walk.served() == walk.ordered()
    letters = walk.store.letters.list(Filter(), limit=100, cursor=None).letters
    dead = {(letter.error_type, letter.attempt) for letter in letters}
    assert dead
    assert dead <= DEAD
    assert sum("canary: under the bridge are" in workers.log.read_text() for workers in walk.deployed) == 2
