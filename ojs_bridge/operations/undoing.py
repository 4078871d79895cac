"""An undo brings the letters of a deletion back, unless their jobs have gone on since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..engine.context import Context
from ..errors import NotUndoable
from ..rules.job import format_time
from ..store import BIN_KEPT, Letters

#: The most letters that stay whose reasons are told.
MAX_STAYED = 100


@dataclass(frozen=True, slots=True)
class Undone:
    """The outcome of an undo: how many letters are back, and how many stay in the bin.

    `reasons` has the ids of letters that stay, and why: the first hundred.
    """

    restored: int
    stayed: int
    reasons: Sequence[tuple[str, str]] = ()

    def to_ojs(self) -> dict[str, Any]:
        """Return the outcome in JSON."""
        reasons = [{"job_id": letter_id, "error": why} for letter_id, why in self.reasons]
        return {"restored": self.restored, "stayed": self.stayed, "errors": reasons}


def undo_until(now: datetime) -> str:
    """Return until when what is deleted now can be brought back, as the audit has it."""
    return format_time(now + BIN_KEPT)


def empty_bin(context: Context) -> None:
    """Delete for good what was deleted more than an hour ago; raises StoreError."""
    context.store_for("dead letters").letters.forget_bin(before=context.surely() - BIN_KEPT)


def bring_back(letters: Letters, deletion: str, now: datetime) -> Undone:
    """Bring the letters of a deletion back; raises NotUndoable if its bin is empty, and StoreError.

    A letter whose hour is over stays away, also if nobody has emptied the bin since. What was broken off may
    be done again. Of a job that has gone on since, the letter stays in the bin.
    """
    back, stayed = set[str](), dict[str, str]()
    for page in letters.binned(deletion, since=now - BIN_KEPT):
        there = letters.restore(deletion, page)
        back.update(there)
        for letter in page:
            if letter.id in back:
                continue
            died = len(stayed) < MAX_STAYED and letters.get(letter.id) is not None
            # Redis may show a letter twice.
            stayed.setdefault(letter.id, "its job has died again" if died else "its job has begun again")
    if not (back or stayed):
        hour = f"{BIN_KEPT.total_seconds() / 3600:g} h"
        raise NotUndoable(
            f"nothing of the deletion {deletion!r} is in the bin: a bin keeps letters for {hour}; they are "
            "back already, or they were deleted for ever"
        )
    return Undone(len(back), len(stayed), (*stayed.items(),)[:MAX_STAYED])
