"""Failures are counted by their fingerprints, also of jobs that are not dead yet, and kept in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rules.faults import Counted, Fault
from ..rules.fingerprint import is_fingerprint
from ..rules.job import format_time, parse_time
from ..store import Document, Documents, readable

#: The documents in which workers count failures; a fingerprint belongs to one of so many.
KIND, SHARDS = "faults", 8
#: The most faults of a document.
MAX_FAULTS = 200


def faults_of(documents: Documents) -> Mapping[str, Fault]:
    """Return the faults that workers have counted, by their fingerprints; raises StoreError."""
    found: dict[str, Fault] = {}
    for document in documents.list(KIND, limit=SHARDS, cursor=None).documents:
        found |= in_document(document)
    return found


def in_document(document: Document) -> dict[str, Fault]:
    """Return the faults of a document; what another version has written, and cannot be read, is left out."""
    faults = document.body.get("faults")
    found = readable(faults.items() if isinstance(faults, Mapping) else (), _read)
    return {fault.fingerprint: fault for fault in found}


def to_json(fault: Fault) -> dict[str, Any]:
    """Return a fault as a document has it."""
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
