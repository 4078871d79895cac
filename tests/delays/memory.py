"""What a worker needs while very many jobs wait for a later time: its memory, and the time of its start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calls import tree
from tests.chaos.ledger import Reader
from tests.delays.fleets import Fleet, Sent, send_many
from tests.delays.settings import Settings
from tests.servers import Postgres, Valkey

#: Seconds until the jobs are due; the delay of the job that is sent after them; how long a run is waited for.
FAR, NEAR, PATIENCE = 7200, 5, 180
#: Memory is at rest when it has grown less than this, in MB, within so many seconds.
STILL, WITHIN = 1.0, 10
WIDTH = 8
HEAD = (
    *("fleet", "jobs that wait", "sent a second", "MB of an idle worker", "of one while they wait"),
    *("first run after its start, s: idle", "while they wait", "a job due in 5 s is late, s"),
)


@dataclass(frozen=True)
class Needs:
    """Memory in MB, the seconds until the first run, and how late a job was; None where it did not run."""

    memory: float
    first_run: float | None
    late: float | None


def measure(fleet: Fleet, folder: Path, *, bridged: bool, jobs: int) -> Iterator[str]:
    """Yield the cells of a row: one worker with nothing that waits, then one with so many jobs that do."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        broker = stack.enter_context(Valkey(appendonly="no"))
        store = stack.enter_context(Postgres()).url if bridged else None
        settings = Settings(broker.url, store, str(folder / "ledger"))
        Path(settings.ledger).mkdir()
        idle = _needs(fleet, settings, folder, "idle")
        due = time.time() + FAR
        rate = send_many(fleet, settings, [Sent(f"far-{n}", due) for n in range(jobs)])
        full = _needs(fleet, settings, folder, "full")
    yield from (f"{jobs:,}", f"{rate:,.0f}", f"{idle.memory:.0f}", f"{full.memory:.0f}")
    yield from (_seconds(seconds) for seconds in (idle.first_run, full.first_run, full.late))


def _seconds(seconds: float | None) -> str:
    return f"> {PATIENCE}" if seconds is None else f"{seconds:.1f}"


def _needs(fleet: Fleet, settings: Settings, folder: Path, name: str) -> Needs:
    """Start a worker for which a job waits, and watch it until its memory is at rest."""
    ledger = Reader(Path(settings.ledger))
    fleet.send(settings, [Sent(f"now-{name}")])
    begun = time.time()
    with _worker(fleet, settings, folder / f"{name}.log") as pid:
        now = _started(ledger, f"now-{name}", begun + PATIENCE)
        memory = _at_rest(pid)
        due = time.time() + NEAR
        fleet.send(settings, [Sent(f"near-{name}", due)])
        near = _started(ledger, f"near-{name}", due + PATIENCE)
    return Needs(memory, now and now - begun, near and near - due)


@contextmanager
def _worker(fleet: Fleet, settings: Settings, log: Path) -> Iterator[int]:
    """Run a worker whose memory is its own: it is not forked from a process that has imported its modules."""
    program, *words = fleet.command(WIDTH)
    with log.open("w") as file:
        worker = subprocess.Popen(
            [Path(sys.executable).with_name(program), *words],
            env={**os.environ, **settings.to_env()},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield worker.pid
        # In good order, so that the jobs that wait in it go back to the broker.
        worker.terminate()
        worker.wait(PATIENCE)
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def _started(ledger: Reader, job: str, until: float) -> float | None:
    while time.time() < until:
        ledger.refresh()
        if lines := ledger.lines(job, "start"):
            return lines[0].at
        time.sleep(0.02)
    return None


def _at_rest(pid: int) -> float:
    """Return the memory of a tree of processes, shared pages counted once, when it does not grow any more."""
    readings = [_memory(pid)]
    while len(readings) <= WITHIN or readings[-1] - readings[-1 - WITHIN] > STILL:
        time.sleep(1)
        readings.append(_memory(pid))
    return readings[-1]


def _memory(pid: int) -> float:
    found = [Path(f"/proc/{each}/smaps_rollup").read_text().splitlines() for each in tree(pid)]
    return sum(int(line.split()[1]) for lines in found for line in lines if line.startswith("Pss:")) / 1024
