"""The facts of a log line about a job, as fields of its record: a formatter can write them."""

from __future__ import annotations

import logging

from ..rules.job import Job
from ..store import Parked

#: The fields of a record. A line about a job has those that are known of it.
FIELDS = ("job_id", "job_type", "queue", "attempt", "decision", "error_type", "delay_ms")


def add_facts(record: logging.LogRecord) -> bool:
    """Give a record the facts of the job that its line begins with; the line itself has the job's id.

    A record never takes the job along: a handler may keep a record's arguments, and a job has its errors.
    """
    args = record.args
    if isinstance(args, tuple) and args and str(record.msg).startswith("job %s"):
        job, *rest = args
        told = {"job_id": getattr(job, "id", job)}
        if isinstance(job, (Job, Parked)):
            told.update(job_type=job.type, queue=job.queue, attempt=job.attempt)
        vars(record).update({name: value for name, value in told.items() if value})
        record.args = (in_line(str(told["job_id"])), *rest)
    return True


def in_line(text: str) -> str:
    """Return a text that cannot begin a new line in the log."""
    return text if text.isprintable() else repr(text)[1:-1]


logging.getLogger("ojs_bridge").addFilter(add_facts)
