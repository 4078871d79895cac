"""Failures are counted by their fingerprints, also of jobs that are not dead yet, and kept in the store."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import uuid4

from typing_extensions import assert_never

from ..errors import StoreError, Unstorable
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import Failure
from ..rules.faults import Counted, Fault, due_at, minute_of
from ..rules.fingerprint import fingerprint, frame_of, is_fingerprint
from ..rules.job import Job, format_time, parse_time
from ..store import Document, Documents, index_text, next_of, readable
from .redaction import HIDDEN

logger = logging.getLogger("ojs_bridge")

#: The documents in which workers count failures; a fingerprint belongs to one of so many.
KIND, SHARDS = "faults", 8
#: The most faults of a document, the most that a process has to write, and how long one is kept.
MAX_FAULTS, MAX_NEW, KEPT = 64, 500, timedelta(days=14)
#: The most failures whose fingerprints a process makes between two writes: each takes 0.1 ms.
MAX_PRINTED = 1_000
#: The most characters of a message, and the batches that a document knows, so that none is counted twice.
MAX_MESSAGE, BATCHES = 300, 50
#: How often a document is written anew after another process was first, and the most seconds before that.
TRIES, PAUSE = 4, 0.05

#: What tells the places of failures apart: the job type, the error type and the backtrace.
_Place: TypeAlias = tuple[str, str, tuple[str, ...]]


class Failures:
    """The failures of a process that are not written yet, by their fingerprints; one thread uses it.

    `frameworks` are those of the process. With `redacts` no message is kept: it may quote an argument.
    """

    def __init__(self, documents: Documents, frameworks: Collection[str], *, redacts: bool) -> None:
        self._documents, self._frameworks, self._redacts = documents, frameworks, redacts
        self._new: dict[str, Fault] = {}
        #: What is being written to each document, under a name of its own.
        self._batches: dict[int, tuple[str, Sequence[Fault]]] = {}
        self._printed = 0
        self._known: dict[_Place, Fault] = {}

    def __bool__(self) -> bool:
        """Return whether there is something to write."""
        return bool(self._new or self._batches)

    def add(self, job: Job, decision: Decision, now: datetime) -> None:
        """Count a run, if it has failed; a job that its handler drops has not."""
        match decision:
            case RetryAt():
                self._add(job, decision.failure, now, due={due_at(decision.at, now): 1})
            case DeadLettered() | Discarded():
                if isinstance(decision, DeadLettered) or decision.cause != "handler":
                    self._add(job, decision.failure, now, died_at=now)
            case Complete() | SnoozeUntil() | GiveBack():
                return
            case _:
                assert_never(decision)

    def _add(self, job: Job, failure: Failure, now: datetime, **fields: Any) -> None:
        place = (job.type, failure.type, failure.backtrace)
        if self._printed < MAX_PRINTED or place not in self._known:
            self._printed += 1
            self._known[place] = self._fault(job, failure, now)
        fault = self._known[place]
        minutes = {minute_of(now): Counted(1, int("died_at" in fields))}
        fault = replace(
            fault, first_at=now, last_at=now, queues=(index_text(job.queue),), minutes=minutes, **fields
        )
        earlier = self._new.get(fault.fingerprint)
        if earlier is not None or len(self._new) < MAX_NEW:
            self._new[fault.fingerprint] = earlier.with_more(fault, now) if earlier else fault

    def _fault(self, job: Job, failure: Failure, now: datetime) -> Fault:
        trace = failure.backtrace
        # A frame of an installed package counts, unless the package is the framework.
        framework = next((name for name in self._frameworks if any(name in frame for frame in trace)), "")
        error_type = str(failure.type or "Unknown")
        return Fault(
            fingerprint(job.type, error_type, failure.message, trace, framework),
            index_text(job.type),
            index_text(error_type),
            HIDDEN if self._redacts else _sound(failure.message),
            _sound(frame_of(job.type, trace, framework)),
            now,
            now,
        )

    def write(self, now: datetime) -> None:
        """Write what was counted; never raises. What cannot be written waits for the next time.

        What is too old at the time `now`, of any process, is deleted.
        """
        self._printed, self._known = 0, {}
        try:
            new: dict[int, list[Fault]] = {}
            for fault in self._new.values():
                new.setdefault(int(fault.fingerprint, 16) % SHARDS, []).append(fault)
            for shard, faults in new.items():
                if shard not in self._batches:
                    self._batches[shard] = uuid4().hex, faults
                    for fault in faults:
                        del self._new[fault.fingerprint]
            for shard, batch in [*self._batches.items()]:
                if self._write(f"{shard}", *batch, now=now):
                    del self._batches[shard]
        except Exception as error:
            if not isinstance(error, StoreError) or isinstance(error, Unstorable):
                self._new, self._batches = {}, {}
                logger.exception("faults: counts are dropped")

    def _write(self, shard: str, name: str, faults: Sequence[Fault], *, now: datetime) -> bool:
        """Add failures to those of a document, once; False if other processes were always first."""
        for _ in range(TRIES):
            known = self._documents.get(KIND, shard)
            batches = [*_batches_of(known)]
            if name in batches:
                return True
            all_faults = in_document(known) if known else {}
            for fault in faults:
                earlier = all_faults.get(fault.fingerprint)
                all_faults[fault.fingerprint] = earlier.with_more(fault, now) if earlier else fault.at(now)
            newest = sorted(all_faults.values(), key=lambda fault: fault.last_at, reverse=True)[:MAX_FAULTS]
            kept = {one.fingerprint: _to_json(one.at(now)) for one in newest if now - one.last_at < KEPT}
            body = {"faults": kept, "batches": [*batches, name][-BATCHES:]}
            if self._documents.write(next_of(known, KIND, shard, now, body)):
                return True
            time.sleep(random.uniform(0, PAUSE))
        return False


def faults_of(documents: Documents) -> Mapping[str, Fault]:
    """Return the faults that workers have counted, by their fingerprints; raises StoreError."""
    found: dict[str, Fault] = {}
    for document in documents.list(KIND, limit=2 * SHARDS, cursor=None).documents:
        # The newest document comes first, and another version may have more of them.
        found = {**in_document(document), **found}
    return found


def in_document(document: Document) -> dict[str, Fault]:
    """Return the faults of a document; what another version has written, and cannot be read, is left out."""
    faults = _field(document, "faults")
    found = readable(faults.items() if isinstance(faults, Mapping) else (), _read)
    return {fault.fingerprint: fault for fault in found}


def _batches_of(document: Document | None) -> Sequence[object]:
    batches = _field(document, "batches") if document else ()
    return batches if isinstance(batches, list) else ()


def _field(document: Document, name: str) -> object:
    body: object = document.body
    return body.get(name) if isinstance(body, Mapping) else None


def _sound(text: str) -> str:
    """Return a text that every store can hold, also where it has half a surrogate."""
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _to_json(fault: Fault) -> dict[str, Any]:
    return {
        "type": fault.type,
        "error_type": fault.error_type,
        "message": fault.message,
        "frame": fault.frame,
        "first_at": format_time(fault.first_at),
        "last_at": format_time(fault.last_at),
        "queues": [*fault.queues],
        "died_at": fault.died_at and format_time(fault.died_at),
        "back_at": fault.back_at and format_time(fault.back_at),
        "minutes": [[minute, *counted] for minute, counted in fault.minutes.items()],
        "due": [[at, count] for at, count in fault.due.items()],
    }


def _read(kept: tuple[str, Mapping[str, Any]]) -> Fault:
    name, record = kept
    if not is_fingerprint(name):
        raise ValueError(f"{name!r} is no fingerprint")
    died_at, back_at = record.get("died_at"), record.get("back_at")
    return Fault(
        name,
        str(record["type"]),
        str(record["error_type"]),
        str(record["message"]),
        str(record["frame"]),
        parse_time(record["first_at"]),
        parse_time(record["last_at"]),
        tuple(map(str, record.get("queues", ()))),
        died_at and parse_time(died_at),
        back_at and parse_time(back_at),
        {int(minute): Counted(int(failed), int(died)) for minute, failed, died in record.get("minutes", ())},
        {int(at): int(count) for at, count in record.get("due", ())},
    )
