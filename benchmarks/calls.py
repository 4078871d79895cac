"""Counts the system calls of a tree of processes, by perf, or by strace, which slows them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.servers import eventually

EVENT = ("-e", "raw_syscalls:sys_enter")


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(one for text in found for child in text.split() for one in tree(int(child)))]


def counted(processes: Sequence[int]) -> Callable[[], int] | None:
    """Begin to count, and return what ends that and returns the count; None where nothing can count."""
    if _has_perf():
        return _by_perf(processes)
    return _by_strace(processes) if shutil.which("strace") else None


def _has_perf() -> bool:
    if not shutil.which("perf"):
        return False
    return not subprocess.run(["perf", "stat", *EVENT, "true"], capture_output=True, check=False).returncode


def _by_perf(processes: Sequence[int]) -> Callable[[], int]:
    (reads, asks), (answers, acknowledges) = os.pipe(), os.pipe()
    of, control = ",".join(map(str, processes)), f"fd:{reads},{acknowledges}"
    command = ["perf", "stat", "-x,", *EVENT, f"-p{of}", "-D-1", f"--control={control}"]
    counter = _started(command, (reads, acknowledges))

    def tell(word: str) -> None:
        os.write(asks, f"{word}\n".encode())
        os.read(answers, 64)

    def end() -> int:
        tell("disable")
        count = next(line for line in _ended(counter).splitlines() if "," in line).partition(",")[0]
        for end in (reads, asks, answers, acknowledges):
            os.close(end)
        return int(count)

    tell("enable")
    return end


def _by_strace(processes: Sequence[int]) -> Callable[[], int]:
    counter = _started(["strace", "-c", "-f", "-q", *(f"-p{pid}" for pid in processes)])

    def is_traced(pid: int) -> bool:
        return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()

    eventually(lambda: all(map(is_traced, processes)), what="strace")

    def end() -> int:
        total = next(line for line in _ended(counter).splitlines() if line.endswith(" total"))
        return int(total.split()[3])

    return end


def _started(command: Sequence[str], passed: Sequence[int] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pass_fds=passed
    )


def _ended(counter: subprocess.Popen[str]) -> str:
    counter.send_signal(signal.SIGINT)
    return counter.communicate()[1]
