"""The error history of a job: its message carries the newest errors, and the store keeps the rest."""

from __future__ import annotations

import logging

from ..errors import StoreError
from ..rules.job import ErrorEntry, Header, Job, encode, is_cut
from ..store import Store

logger = logging.getLogger("ojs_bridge")


class History:
    """Writes headers with the newest `length` errors in `budget` bytes; a store keeps the older errors."""

    def __init__(self, store: Store | None, length: int, budget: int) -> None:
        self._store = store
        self._length = length
        self._budget = budget

    def encode(self, job: Job) -> Header:
        """Return a job's header, without the errors for which it has no room; raises InvalidState."""
        return encode(job, history=self._length, budget=self._budget)

    def header(self, job: Job, *, ended: bool = False) -> Header:
        """Return a job's `ojs` header; the store keeps the errors for which the header has no room.

        For a job that has `ended` the store keeps none: its dead letter has all errors. Raises InvalidState
        if the state is too long for any message.
        """
        header = encode(job, history=self._length, budget=self._budget)
        if header.left_out and self._store and not ended:
            try:
                self._store.keep_errors(job.letter_id, header.left_out)
            except StoreError:
                logger.exception(
                    "job %s: %d entries of its error history are not kept", job, len(header.left_out)
                )
        return header

    def whole(self, job: Job) -> tuple[ErrorEntry, ...]:
        """Return every error: those of the message, and the rest from the store."""
        if self._store is None or not is_kept_elsewhere(job):
            return job.errors
        carried = {job.errors_dropped + index: entry for index, entry in enumerate(job.errors)}
        whole = {place: entry for place, entry in carried.items() if not is_cut(entry)}
        kept = dict(self._store.kept_errors(job.letter_id))
        length = job.errors_dropped + len(job.errors)
        if len(kept) + len(whole) < length and (earlier := self._store.get(job.letter_id)):
            # This job has ended before; its delivery came again because it was not acknowledged in time. The
            # letter of another job under its id has none of its errors.
            times = {entry.get("timestamp") for entry in job.errors}
            if any(entry.get("timestamp") in times for entry in earlier.errors):
                kept = {**dict(enumerate(earlier.errors[:length])), **kept}
        history = {**carried, **kept, **whole}
        return tuple(history[place] for place in sorted(history))

    def forget(self, job: Job) -> None:
        """Delete the errors that the store keeps of a job that has ended; raises StoreError."""
        if self._store and is_kept_elsewhere(job):
            self._store.forget_errors(job.letter_id)


def is_kept_elsewhere(job: Job) -> bool:
    """Return whether a job's message carries only a part of its history."""
    return job.errors_dropped > 0 or any(is_cut(entry) for entry in job.errors)
