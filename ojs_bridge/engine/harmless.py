"""What may go wrong after a decision was carried out, without doing the job any harm."""

from __future__ import annotations

import logging
from contextlib import suppress

from ..spec.job import Job

logger = logging.getLogger("ojs_bridge")


class Harmless:
    """Logs what fails after a decision was carried out: the job has its place already."""

    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Log an error and go on after it; what is no Exception goes on."""
        if not isinstance(error, Exception):
            return False
        with suppress(Exception):
            told = "job %s: what follows a decision failed; the job is not affected"
            logger.error(told, self._job.id, exc_info=error)
        return True
