"""Errors that touch no job go to the log; only an exception that is aimed at the thread goes on its way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from ..rules.job import Job

logger = logging.getLogger("ojs_bridge")

#: Says whether an exception comes from outside, to end what the thread does: a time limit, or a shutdown.
Aimed: TypeAlias = Callable[[BaseException], bool]

_aimed: list[Aimed] = []


def let_through(aimed: Aimed) -> None:
    """Let exceptions through by which a framework interrupts a thread; the adapter calls this once."""
    _aimed.append(aimed)


def is_aimed(error: BaseException) -> bool:
    """Return whether an exception is aimed at the thread, and not an error of the code that runs there."""
    return isinstance(error, KeyboardInterrupt) or any(aimed(error) for aimed in _aimed)


def log(error: BaseException, told: str, *values: object) -> None:
    """Log an error; a log that fails harms nobody."""
    with suppress(Exception):
        logger.error(told, *values, exc_info=error)


class Harmless:
    """Logs an error that comes after a decision was carried out: the job has its place already."""

    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Log and swallow an error, and a time limit of the job, which is over; let other interrupts pass."""
        if error is None or (is_aimed(error) and not isinstance(error, Exception)):
            return False
        log(error, "job %s: an error after its decision was carried out; the job is not affected", self._job)
        return True
