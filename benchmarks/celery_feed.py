"""Enqueues the jobs of one side of the Celery comparison, between two marks."""

from __future__ import annotations

from benchmarks.celery_app import JOBS, KIND, counters, fails, mark, succeeds


def feed() -> None:
    """Enqueue them."""
    counters.flushdb()
    mark.delay("begin")
    for _ in range(JOBS):
        (succeeds if KIND == "succeeds" else fails).delay()
    if KIND == "succeeds":
        mark.delay("end")


if __name__ == "__main__":
    feed()
