"""The web examples: a shop's web server and its worker, as its README starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.forking import Forked, ended, started
from tests.servers import Server, eventually

EXAMPLES = Path(__file__).parent.parent / "examples"
#: The words by which a web server is told its port, by its program.
PORTS = {"python": "--noreload {}", "flask": "--port {}", "uvicorn": "--port {}"}


def told_by(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the commands in a shop's README, after the installation."""
    block = (EXAMPLES / name / "README.md").read_text("utf-8").split("```")[1]
    lines = [line.strip(" $\n") for line in re.split(r"&&?|\n", block.removeprefix("console"))]
    exported = [word for line in lines if line.startswith("export ") for word in line.split()[1:]]
    commands = [line for line in lines if line and not line.startswith(("export ", "pip "))]
    return dict(word.split("=", 1) for word in exported), commands


class Shop(Server):
    """A copy of an example in a folder of its own, with one worker and one web server.

    They are forked, and end with this process, not with the thread that started them.
    """

    def __init__(self, name: str, broker_url: str) -> None:
        super().__init__()
        variables, (*self._prepare, self._worker, web) = told_by(name)
        self._web = f"{web} {PORTS[web.split()[0]]}"
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("OJS_BRIDGE_", "DJANGO_"))}
        self._environment = {
            **ours,
            "BROKER_URL": broker_url,
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        if (EXAMPLES / name / "manage.py").exists():
            self._environment["DJANGO_SETTINGS_MODULE"] = "shop.settings"
        left_out = shutil.ignore_patterns("__pycache__", "*.db", "order-*")
        shutil.copytree(EXAMPLES / name, self.folder, ignore=left_out, dirs_exist_ok=True)

    @property
    def url(self) -> str:
        """The URL at which customers order."""
        return f"http://127.0.0.1:{self.port}"

    def _launch(self) -> None:
        for command in self._prepare:
            self.run(command)
        self._children += map(self._begin, (self._worker, self._web))

    def _answers(self) -> bool:
        try:
            self.dead_letters()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def replace_worker(self) -> None:
        """Kill the worker, with all its processes, and start another one."""
        os.killpg(self._children[0].pid, signal.SIGKILL)
        self._children[0].wait(30)
        self._children[0] = self._begin(self._worker)

    def _begin(self, command: str) -> Forked:
        words, log = command.format(self.port).split(), self.folder / "log"
        return started(words, env=self._environment, log=log, cwd=self.folder, leads=True)

    def run(self, command: str) -> str:
        """Run a command of the shop's; return its output."""
        done = ended(command.format(self.port).split(), env=self._environment, cwd=self.folder)
        assert done.status == 0, done.err
        return done.out

    def log(self) -> str:
        """Return the output of the worker and of the web server."""
        return (self.folder / "log").read_text(errors="replace")

    def ask(self, path: str, form: str | None = None) -> Any:
        """Return the web server's answer."""
        data = None if form is None else form.encode()
        with urllib.request.urlopen(self.url + path, data, timeout=30) as answer:
            return json.load(answer)

    def dead_letters(self) -> list[str]:
        """Return the shop's list of its dead letters."""
        return [*self.ask("/dead-letters").values()]

    def sells(self, *, order: str, task: str) -> None:
        """Place two orders; the first is charged at the second attempt, the second becomes a dead letter.

        `order` is the path of an order: of its number and its card.
        """
        numbers = [
            self.ask(order.format(number=n, card=card), f"card={card}")["order"]
            for n, card in enumerate(("good", "stolen"), start=1)
        ]
        assert numbers == [1, 2]
        said = "retrying: attempt 1 of 5 failed with external.timeout; retry 1 in "
        eventually(lambda: said in self.log(), seconds=40, what="the retry")
        eventually(lambda: "charged order 1" in self.log(), seconds=30, what="the second attempt")
        buried = f"{task}: attempt 1 of 5 failed with payment.card_stolen, and the handler said DEAD_LETTER"
        eventually(lambda: self.dead_letters() == [buried], seconds=30, what="the dead letter")
        assert self.log().count("charged order ") == 1
