"""Work that several processes do at the same moment."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def in_processes(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `work` in `count` processes that begin at the same moment."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(count), context.SimpleQueue()

    def run() -> None:
        start.wait(90)
        try:
            results.put(work(*args))
        except BaseException as error:
            results.put(error)

    processes = [context.Process(target=run) for _ in range(count)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join(90)
    return found
