"""What commands answer about dead letters: tables, counts, and what became of each or of many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import StoreError, Unreachable
from ..operations.replaying import Bulk
from ..spec.policy import attempts_told
from ..store import Letter, Stats
from .failing import INCOMPLETE
from .printing import Rows, say, show, show_json, table, time_of


def told(number: int) -> str:
    """Return a number of dead letters in words."""
    return "1 dead letter" if number == 1 else f"{number:,} dead letters"


def letters_table(letters: Iterable[Letter]) -> Rows:
    """Return a table of dead letters."""
    headings = ("id", "type", "queue", "error type", "attempts", "died (UTC)")
    rows = (
        (
            x.id,
            x.type,
            x.queue,
            x.error_type,
            attempts_told(x.attempt, x.max_attempts, "/"),
            time_of(x.discarded_at),
        )
        for x in letters
    )
    return table(headings, rows)


def show_letters(letters: Iterable[Letter], where: str = "", *, as_json: bool) -> None:
    """Answer with dead letters; in JSON each as soon as it is read."""
    if as_json:
        for letter in letters:
            show_json(letter.to_ojs())
        return
    found = [*letters]
    show(letters_table(found) if found else f"no dead letters{where}")


def counts(stats: Stats) -> list[Any]:
    """Return how many dead letters there are, and tables of their kinds, the most frequent first."""
    span = f", from {time_of(stats.oldest_at)} to {time_of(stats.newest_at)} UTC" if stats.total else ""
    by = {"queue": stats.by_queue, "type": stats.by_type, "error type": stats.by_error_type}
    most = {name: sorted(found.items(), key=lambda item: -item[1]) for name, found in by.items() if found}
    return [f"{told(stats.total)}{span}", *(table((name, "letters"), rows) for name, rows in most.items())]


def show_matched(stats: Stats, done: str, *, as_json: bool) -> None:
    """Answer with what many would be done to."""
    if as_json:
        show_bulk(Bulk(stats.total, confirmed=False), done, as_json=True)
    else:
        show(*counts(stats))


def each(ids: Sequence[str], act: Callable[[str], object], done: str, *, as_json: bool) -> int | None:
    """Do something with each id and tell of each; returns the exit code.

    What is wrong with one is told, and the others go on; raises StoreError and Unreachable.
    """
    wrong = 0
    for job_id in ids:
        try:
            act(job_id)
        except (StoreError, Unreachable):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the matter with this one is
            wrong += 1
            _tell(job_id, "error", str(error) or repr(error), as_json=as_json)
        else:
            _tell(job_id, done, value=True, as_json=as_json)
    return INCOMPLETE if wrong else None


def _tell(job_id: str, name: str, value: object, *, as_json: bool) -> None:
    if as_json:
        show_json({"id": job_id, name: value})
    elif value is True:
        show(f"{job_id}: {name}")
    else:
        say(f"{job_id}: {value}")


def show_bulk(bulk: Bulk, done: str, *, as_json: bool) -> int | None:
    """Answer with what became of many; returns the exit code."""
    if as_json:
        errors = [{"id": letter_id, "error": why} for letter_id, why in bulk.errors]
        numbers = {"matched": bulk.matched, "succeeded": bulk.succeeded, "failed": bulk.failed}
        show_json({**numbers, "errors": errors, "confirmed": bulk.confirmed})
    else:
        stayed = f", {bulk.failed:,} stayed" if bulk.failed else ""
        show(f"{told(bulk.succeeded)} {done}{stayed}")
        if bulk.errors:
            show(table(("id", "why it stayed"), bulk.errors))
    return INCOMPLETE if bulk.failed else None
