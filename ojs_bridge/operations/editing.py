"""Edits of the arguments of dead letters as they are sent, and a preview; no redacted value is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..engine.redaction import Redactor
from ..engine.runs import Override
from ..errors import Unpublishable
from ..messages import Reading
from ..rules.edits import Edits
from ..rules.job import Job
from ..store import Letter

#: The letters of a preview.
TEN = 10


@dataclass(frozen=True, slots=True)
class EditedLetter:
    """A dead letter before and after edits, redacted; `after` is None where `error` says why it would stay.

    `notes` say which edits have nothing to do.
    """

    id: str
    type: str
    before: Reading
    after: Reading | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return the letter in JSON."""
        return {
            "id": self.id,
            "type": self.type,
            "parameters": [*self.before.names],
            "before": _arguments(self.before),
            "after": self.after and _arguments(self.after),
            "notes": [*self.notes],
            "error": self.error,
        }


def check_edits(edits: Edits, redactor: Redactor) -> None:
    """Raise ValueError for edits that would bring a redacted value into the open."""
    for name in edits.rename:
        if redactor.names_hidden(name):
            raise ValueError(f"rename: {name!r} is redacted, and its value would be shown under another name")


def with_edits(letter: Letter, job: Job, override: Override, redactor: Redactor) -> tuple[Job, Override]:
    """Return a job and the changes with which its letter is sent; raises ValueError and Unpublishable.

    Where an edit takes a redacted value away, it is taken out of the job's errors, too: nothing would hide it
    there any more.
    """
    reading = letter.reading
    after, _ = _edited(letter, override.edits or Edits(), redactor)
    changed = replace(override, edits=None)
    if (after.args, after.kwargs) != (reading.args, reading.kwargs or {}):
        changed = replace(changed, args=after.args, kwargs=after.kwargs)
    lost = redactor.lost(reading, after)
    return job._replace(errors=tuple(map(lost.out_of, job.errors))), changed


def previewed(letters: Iterable[Letter], edits: Edits, redactor: Redactor) -> Iterator[EditedLetter]:
    """Yield letters before and after edits."""
    check_edits(edits, redactor)
    for letter in letters:
        reading = letter.reading
        known = EditedLetter(letter.id, letter.type, _told(reading, redactor))
        try:
            after, notes = _edited(letter, edits, redactor)
        except (ValueError, Unpublishable) as error:
            yield replace(known, error=str(error))
        else:
            yield replace(known, after=_told(after, redactor), notes=notes)


def _edited(letter: Letter, edits: Edits, redactor: Redactor) -> tuple[Reading, tuple[str, ...]]:
    reading = letter.reading
    if reading.args is None:
        raise Unpublishable(f"args: those of dead letter {letter.id!r} cannot be changed: {reading.note}")
    check_edits(edits, redactor)
    kwargs = reading.kwargs or {}
    done = edits.apply(reading.args, kwargs, reading.names)
    after = replace(reading, args=done.args, kwargs=done.kwargs)
    names = [*reading.names, *map(str, range(len(reading.names), len(reading.args)))]
    given = {**dict(zip(names, reading.args, strict=False)), **kwargs}
    for name, to in edits.rename.items():
        if name in given and redactor.would_open(name, to, given[name]):
            raise ValueError(f"rename: {name!r} is redacted, and its value would be shown under another name")
    told = _arguments(_told(after, redactor))
    if redactor.lost(reading, after).out_of(told, at_cuts=False) != told:
        raise ValueError("a redacted value that it takes away stands in another argument, and would be shown")
    return after, tuple(done.notes)


def _told(reading: Reading, redactor: Redactor) -> Reading:
    return redactor.told(reading, redactor.secrets(reading))


def _arguments(reading: Reading) -> dict[str, Any]:
    return {"args": reading.args, "kwargs": reading.kwargs}
