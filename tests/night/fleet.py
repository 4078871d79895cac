"""The house of a night: servers, three hosts, Prometheus with our rules, `ojs-bridge serve`, and a shop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.chaos.workers import Worker
from tests.night.celery_app import make_app
from tests.night.dramatiq_app import make_broker
from tests.night.settings import CELERY, DRAMATIQ, WORKER, Settings
from tests.servers import Postgres, Valkey, eventually, free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "examples" / "monitoring" / "alerts.yml"
HOSTS = ("alder", "birch", "cedar")
COMMANDS = {
    "celery": ["celery", "-A", "tests.night.celery_app", "worker", "-c", "2", "-l", "INFO"],
    "dramatiq": ["dramatiq", "tests.night.dramatiq_app", "--processes", "1", "--threads", "4"],
}
#: Jobs a second of each type.
RATES = {"billing.charge": 2.0, "mail.send": 2.0, "reports.build": 0.5, "images.scale": 1.0}
CONFIGURATION = """
global:
  scrape_interval: 5s
  scrape_timeout: 5s
  evaluation_interval: 5s
  external_labels: {{ojs_page: "{page}", ojs_docs: "https://docs.example.com"}}
rule_files: [{rules}]
scrape_configs:
  - {{job_name: workers, static_configs: [{{targets: {workers}}}]}}
  - {{job_name: ojs, static_configs: [{{targets: ["{serve}"]}}]}}
"""


class Bank:
    """The service that `billing.charge` calls: it answers 200, or 503 while it is down."""

    def __init__(self, port: int) -> None:
        self.is_down = False
        bank = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(503 if bank.is_down else 200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()


class Shop:
    """Sends jobs of every type at a steady pace, as a user's code does; counts those that no broker took."""

    def __init__(self, settings: Settings) -> None:
        self.sent: dict[str, str] = {}
        self.refused = 0
        self._bridge = settings.bridge()
        self._app = make_app(settings, self._bridge)
        self._broker = make_broker(settings, self._bridge)
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._sell, args=(type_,), daemon=True) for type_ in RATES]

    def open(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End."""
        self._ends.set()
        for thread in self._threads:
            thread.join(20)

    def send(self, type_: str, **order: str) -> None:
        """Send one job."""
        job = f"{type_}-{len(self.sent)}-{time.monotonic_ns() % 1_000_000}"
        order = {"image": f"{job}.png", "country": "CH", **order}
        try:
            if type_ in CELERY:
                self._app.tasks[type_].apply_async((job, order), task_id=job, retry=False)
            else:
                actor = self._broker.get_actor(type_)
                self._broker.enqueue(actor.message(job, order).copy(message_id=job))
        except Exception:
            self.refused += 1
        else:
            self.sent[job] = type_

    def dead(self) -> set[str]:
        """Return the jobs that are dead letters."""
        found: set[str] = set()
        cursor = None
        while True:
            page = self._bridge.dead_letters.list(limit=1000, cursor=cursor)
            found |= {letter.id for letter in page.letters}
            cursor = page.next_cursor
            if cursor is None:
                return found

    def _sell(self, type_: str) -> None:
        while not self._ends.wait(1 / RATES[type_]):
            self.send(type_)


class House:
    """All of it; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker, self.store = Valkey(), Postgres()
        self.ports = {"serve": free_port(), "prometheus": free_port()}
        self.workers: dict[tuple[str, str], Worker] = {}
        #: The hosts that nobody starts again.
        self.dead: set[str] = set()
        self._metrics = {(host, name): free_port() for host in HOSTS for name in COMMANDS}
        self._serve: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        self._ends = threading.Event()

    @property
    def page(self) -> str:
        """The address of the desk."""
        return f"http://127.0.0.1:{self.ports['serve']}/"

    def __enter__(self) -> House:
        with ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(self.broker)
            stack.enter_context(self.store)
            self.settings = Settings(self.broker.url, self.store.url, str(self.folder), free_port())
            self.settings.ledger.mkdir(exist_ok=True)
            self.bank = Bank(self.settings.bank)
            stack.callback(self.bank.close)
            self.serve()
            stack.callback(self.end_serve)
            eventually(lambda: self.asked("GET", "health") is not None, seconds=90, what="ojs-bridge serve")
            for place in self._metrics:
                self.workers[place] = self._worker(*place)
            stack.callback(self._end_workers)
            eventually(self._are_ready, seconds=120, what="the workers")
            self._prometheus(stack)
            self.shop = Shop(self.settings)
            self.shop.open()
            stack.callback(self.shop.close)
            threading.Thread(target=self._tend, daemon=True).start()
            stack.callback(self._ends.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def asked(self, method: str, path: str, body: object = None) -> Any:
        """Ask the server's API; None while it is not there."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            f"{self.page}ojs/v1/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urlopen(request, timeout=15) as answer:
                return json.load(answer)
        except (URLError, TimeoutError, ConnectionError):
            return None

    def prometheus(self, path: str) -> Any:
        """Ask Prometheus."""
        with urlopen(f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def serve(self) -> None:
        """Start `ojs-bridge serve`, with the apps of both frameworks."""
        command = [sys.executable, "-m", "ojs_bridge", "serve", "--app", "tests.night.both:app"]
        environment = {**os.environ, **self.settings.to_env()}
        with (self.folder / "serve.log").open("ab") as log:
            self._serve = subprocess.Popen(
                [*command, "--port", str(self.ports["serve"])],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def end_serve(self) -> None:
        """Kill it."""
        if self._serve is not None:
            self._serve.kill()
            self._serve.wait()

    def kill_host(self, host: str) -> None:
        """Kill all workers of a host, which nobody starts again until `start_host`."""
        self.dead.add(host)
        for name in COMMANDS:
            self.workers[host, name].kill_all()

    def start_host(self, host: str) -> None:
        """Have the workers of a host be started again."""
        self.dead.discard(host)

    def _tend(self) -> None:
        """Start workers again that have ended, as a supervisor does."""
        while not self._ends.wait(1):
            for (host, _), worker in self.workers.items():
                if host not in self.dead:
                    worker.tend()

    def _worker(self, host: str, name: str) -> Worker:
        counts = self.folder / f"counts-{host}-{name}"
        shutil.rmtree(counts, ignore_errors=True)
        counts.mkdir()
        environment = {
            **self.settings.to_env(),
            WORKER: "1",
            "OJS_BRIDGE_METRICS_PORT": str(self._metrics[host, name]),
            "PROMETHEUS_MULTIPROC_DIR": str(counts),
            "C_FORCE_ROOT": "1",
        }
        return Worker(COMMANDS[name], environment, self._log(host, name), machine=host)

    def _log(self, host: str, name: str) -> Path:
        return self.folder / f"{host}-{name}.log"

    def _are_ready(self) -> bool:
        return all(" ready" in self._log(*place).read_text(errors="replace") for place in self.workers)

    def _end_workers(self) -> None:
        for worker in self.workers.values():
            worker.ask_to_stop()
        for worker in self.workers.values():
            worker.close()

    def _prometheus(self, stack: ExitStack) -> None:
        configuration = self.folder / "prometheus.yml"
        workers = json.dumps([f"127.0.0.1:{port}" for port in self._metrics.values()])
        serve = f"127.0.0.1:{self.ports['serve']}"
        configuration.write_text(
            CONFIGURATION.format(page=self.page, rules=RULES, workers=workers, serve=serve)
        )
        command = [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={self.folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{self.ports['prometheus']}",
        ]
        with (self.folder / "prometheus.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(lambda: (process.send_signal(signal.SIGTERM), process.wait(30)))

        def sees_all() -> bool:
            with suppress(URLError, ConnectionError):
                found = self.prometheus("query?query=sum(up)")["result"]
                return bool(found) and float(found[0]["value"][1]) == len(self._metrics) + 1
            return False

        eventually(sees_all, seconds=60, what="Prometheus and its targets")


def wait(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is so; return whether it is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_so():
            return True
        time.sleep(0.5)
    return False


__all__ = ["CELERY", "DRAMATIQ", "HOSTS", "House", "wait"]
