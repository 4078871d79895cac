"""Fresh environments, and the first jobs that run in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.servers import eventually, free_port

TASK = """
import os
from pathlib import Path
from ojs_bridge import Bridge
bridge = Bridge(os.environ.get("STORE_URL"))
POLICY = {"max_attempts": 2, "initial_interval": "PT0.1S", "on_exhaustion": "dead_letter"}
"""
WORK = """
def first(name):
    with Path(f"{name}.ran").open("a") as ran:
        ran.write("ran ")
    if name == "dies" or Path(f"{name}.ran").read_text() == "ran ":
        raise OSError("down")
"""
APPS = {
    "celery": f"""{TASK}
from celery import Celery
from ojs_bridge.celery import install, ojs_task
app = Celery("app", broker=os.environ["BROKER_URL"])
install(app, bridge, policies={{}})
@ojs_task(app, retry=POLICY)
{WORK}
""",
    "dramatiq": f"""{TASK}
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from ojs_bridge.dramatiq import OJSRetries
broker = RedisBroker(url=os.environ["BROKER_URL"])
broker.add_middleware(OJSRetries(bridge))
dramatiq.set_broker(broker)
@dramatiq.actor(ojs_retry=POLICY)
{WORK}
""",
}
WORKERS = {
    "celery": ["celery", "-A", "app_celery", "worker", "-P", "solo"],
    "dramatiq": ["dramatiq", "app_dramatiq", "--processes", "1", "--threads", "1"],
}
SENDING = {"celery": "delay", "dramatiq": "send"}
#: The extras that need no worker: what each of them must be able to do alone.
ALONE = {
    "cli": "-m ojs_bridge policy show",
    "http": "-c 'import ojs_bridge.http'",
    "otel": "-c 'import ojs_bridge.instrumentation.opentelemetry'",
    "prometheus": "-c 'import ojs_bridge.instrumentation.prometheus'",
    "sentry": "-c 'import ojs_bridge.instrumentation.sentry'",
}


class Environment:
    """A fresh environment in a folder, and the processes that run with its Python."""

    def __init__(self, folder: Path, python: str, **variables: str) -> None:
        self.folder = folder
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
        # No variable of the tests' own environment, and nothing of its path but the shell's tools.
        self.variables = {"PATH": f"{folder}/.venv/bin:{os.defpath}", "HOME": os.environ["HOME"], **variables}

    @property
    def python(self) -> str:
        """The environment's own Python."""
        return str(self.folder / ".venv" / "bin" / "python")

    def run(self, command: str) -> str:
        """Run a command of a shell in the folder; return its output."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, *words: str) -> Iterator[Path]:
        """Run a program of this environment; yield the file that its output goes to."""
        log = self.folder / f"{words[0]}.log"
        with log.open("w") as output:
            program: Any = subprocess.Popen(
                [self.python, "-m", *words], cwd=self.folder, env=self.variables, stdout=output, stderr=output
            )
            try:
                yield log
            finally:
                program.terminate()
                program.wait(90)

    def first_jobs(self, framework: str) -> None:
        """Run a job that fails once and a job that dies, with a real worker."""
        (self.folder / f"app_{framework}.py").write_text(APPS[framework])
        sending = "; ".join(f"app.first.{SENDING[framework]}({name!r})" for name in ("fails", "dies"))
        with self.running(*WORKERS[framework]) as log:
            self.run(f'python -c "import app_{framework} as app; {sending}"')
            try:
                eventually(lambda: self._ran("fails") == self._ran("dies") == "ran ran ", seconds=60)
            except TimeoutError as error:
                raise AssertionError(log.read_text()) from error
            if "STORE_URL" in self.variables:
                eventually(lambda: framework in self._dead(framework), seconds=30, what="the dead letter")

    def _ran(self, name: str) -> str:
        noted = self.folder / f"{name}.ran"
        return noted.read_text() if noted.exists() else ""

    def _dead(self, framework: str) -> str:
        listing = "print([letter.framework for letter in app.bridge.dead_letters.list().letters])"
        return self.run(f'python -c "import app_{framework} as app; {listing}"')

    def shows_the_page(self, framework: str) -> None:
        """Serve the page of the app's bridge, and open it."""
        url = f"http://127.0.0.1:{(port := free_port())}/"
        with self.running("ojs_bridge", "serve", "--app", f"app_{framework}", "--port", str(port)):
            eventually(lambda: _shows_the_page(url), seconds=30, what="the page")


def _shows_the_page(url: str) -> bool:
    try:
        return "<title>ojs-bridge</title>" in httpx.get(url).text
    except httpx.TransportError:
        return False
