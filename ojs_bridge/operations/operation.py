"""Bulk operations as the store keeps them: their choice, their state and their progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Literal, TypeAlias, get_args

from pydantic import TypeAdapter

from ..engine.context import Context
from ..engine.runs import Override
from ..engine.storing import Fate, fate_kind
from ..errors import OperationNotFound
from ..rules.edits import Edits, words_of
from ..rules.job import format_time
from ..store import (
    EVERYTHING,
    Document,
    Documents,
    Filter,
    Unreadable,
    from_ms,
    readable,
    reading,
    to_ms,
)
from .audit import DELETION
from .letters import every_page, without_group
from .replaying import check_rate

Action: TypeAlias = Literal["replay", "purge", "run", "move", "cancel"]
#: An action in JSON and in the store: there the specification calls a replay `retry`.
JsonAction: TypeAlias = Literal["retry", "purge", "run", "move", "cancel"]
#: The ids of an operation are a document of their own, so that the progress is short.
KIND, IDS = "operation", "operation-ids"
#: An operation whose progress is older was left by its process. A batch may wait long for its broker.
STALE = timedelta(minutes=5)
#: How long the store keeps operations.
KEPT = timedelta(days=30)
#: The actions on what waits; the others are on dead letters.
ON_WAITING = ("run", "move", "cancel")
#: What an operation is on, by whether it is on what waits.
ENTRIES = ("dead letters", "waiting jobs")
#: The names of the actions in the audit.
RECORDED: Mapping[Action, str] = {
    "replay": "dead_letter.replay",
    "purge": DELETION,
    "run": "waiting.run",
    "move": "waiting.move",
    "cancel": "waiting.cancel",
}
_TIMES = ("began_at", "updated_at", "at")
State: TypeAlias = Literal["running", "stopping", "interrupted", "stopped", "failed", "done"]

#: The most ids of an operation.
MAX_IDS = 10_000


@dataclass(frozen=True, slots=True)
class Jobs:
    """What became of the jobs that a replay has sent, as workers have written to the store.

    Those that run, or wait for a retry, count as `running`. `failed` counts those that have failed at least
    once.
    """

    sent: int
    waiting: int
    running: int
    succeeded: int
    discarded: int
    died_again: int
    failed: int

    @classmethod
    def of(cls, sent: int, count: Callable[[Fate], int]) -> Jobs:
        """Return the numbers by those of the fates."""
        succeeded = count("succeeded") + count("recovered")
        discarded, died, began = count("discarded"), count("died"), count("began")
        running = max(began - succeeded - discarded - died, 0)
        waiting = max(sent - running - succeeded - discarded - died, 0)
        return cls(sent, waiting, running, succeeded, discarded, died, count("failed"))

    def __str__(self) -> str:
        """Tell the numbers that are not zero."""
        words = [
            f"{number:,} {what}"
            for number, what in (
                (self.succeeded, "succeeded"),
                (self.running, "running or waiting for a retry"),
                (self.waiting, "not begun"),
                (self.died_again, "died again"),
                (self.discarded, "discarded"),
            )
            if number
        ]
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Operation:
    """A bulk operation: dead letters are replayed or purged, or what waits is run now, moved or cancelled.

    `ids` is the number of ids that were chosen, None where a filter chose. `at` is the time of a move.
    `total` is the number of letters or waiting jobs that matched in the beginning, None where they were not
    counted. `succeeded` is the number of
    those with which the operation was done: of a replay, the number of jobs that were sent. `jobs` says what
    became of these. `why` says what ended it. `record` is the id of its record in the audit, of its beginning
    or its last resumption; `recorded` is how many had succeeded before that.

    A probe has a `limit`: it takes so many letters of its filter, the oldest or the `newest`. When it has
    ended, `rest` is how many its filter still has. `rest_operation` is the operation that sends them, and
    `rest_of` is the probe of that operation. A purge that is `forever` keeps no letter in the bin.
    """

    id: str
    action: Action
    state: State
    began_at: datetime
    updated_at: datetime
    kind: Mapping[str, Any] = field(default_factory=dict)
    ids: int | None = None
    override: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    stop_if_failing: float | None = None
    at: datetime | None = None
    total: int | None = None
    matched: int = 0
    succeeded: int = 0
    failed: int = 0
    errors: Sequence[Sequence[str]] = ()
    why: str = ""
    cursor: str | None = None
    record: str = ""
    recorded: int = 0
    limit: int | None = None
    newest: bool = False
    rest: int | None = None
    rest_operation: str = ""
    rest_of: str = ""
    forever: bool = False
    revision: int = 1
    jobs: Jobs | None = field(default=None, compare=False)

    @property
    def where(self) -> Filter:
        """The filter of its letters or waiting jobs, as `kind` has it in JSON.

        Raises ValueError for a filter of a newer version.
        """
        return Filter.from_json(self.kind)

    @property
    def has_ended(self) -> bool:
        """Whether no process carries it out any more."""
        return self.state not in ("running", "stopping")

    def to_ojs(self) -> dict[str, Any]:
        """Return the operation in JSON; of the override it has only the names of the changed fields."""
        fields = asdict(self)
        for name in ("cursor", "revision", "override", "record", "recorded"):
            del fields[name]
        return {
            **fields,
            "action": action_to_json(self.action),
            "changes": words_of(self.override),
            "died_again": self.jobs.died_again if self.jobs else 0,
            "errors": [{"job_id": letter_id, "error": why} for letter_id, why in self.errors],
            **{name: format_time(at) for name in _TIMES if (at := getattr(self, name))},
        }


_OPERATION = TypeAdapter(Operation)


def action_from_json(action: JsonAction) -> Action:
    """Return an action as code names it."""
    return "replay" if action == "retry" else action


def action_to_json(action: Action) -> JsonAction:
    """Return an action as JSON and the store name it."""
    return "retry" if action == "replay" else action


def with_changes(override: Mapping[str, Any] | None, changes: Edits | None) -> Mapping[str, Any]:
    """Return the override of a replay with edits of arguments."""
    return {**(override or {}), **({"edits": changes} if changes else {})}


def check_forever(action: Action, *, forever: bool) -> None:
    """Raise ValueError for an action that deletes nothing."""
    if forever and action != "purge":
        raise ValueError(f"forever: True goes with a purge, and this is a {action}")


def check_probe(action: Action, ids: Sequence[str] | None, limit: int | None, *, newest: bool) -> None:
    """Raise ValueError for a limit, or an order, that cannot be."""
    if newest and limit is None:
        raise ValueError("newest: True needs a limit; without one all letters go, the oldest first")
    if limit is None:
        return
    if type(limit) is not int or not 1 <= limit <= MAX_IDS:
        raise ValueError(f"limit: {limit!r} must be an integer from 1 to {MAX_IDS}")
    if action != "replay":
        raise ValueError(f"limit: {limit!r}: goes with a replay, and this is a {action}")
    if ids is not None:
        raise ValueError(f"limit: {limit!r}: goes with a filter, and ids are named")


def check(
    action: Action,
    ids: Sequence[str] | None,
    override: Mapping[str, Any] | None,
    rate: float | None,
    stop_if_failing: float | None,
    at: datetime | None,
    where: Filter,
) -> None:
    """Raise ValueError for an operation that cannot be, and InvalidRetryPolicy."""
    if action not in get_args(Action):
        raise ValueError(f"action: {action!r} must be one of {', '.join(get_args(Action))}")
    if ids is not None and not 0 < len(ids) <= MAX_IDS:
        raise ValueError(f"ids: {len(ids)} of them; there must be 1 to {MAX_IDS}")
    if ids is not None and where != EVERYTHING:
        raise ValueError("ids: either ids or a filter, not both")
    check_rate(rate)
    changes = Override.of(override).to_ojs()
    try:
        json.dumps(changes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"override: it must be JSON: {error}") from None
    if action != "replay" and (changes or rate or stop_if_failing is not None):
        raise ValueError(f"action: a {action} has no override, no rate, no stop_if_failing and no changes")
    _check_choice(action, at, where)
    if stop_if_failing is None:
        return
    if not (isinstance(stop_if_failing, int | float) and 0 <= stop_if_failing < 1):
        raise ValueError(f"stop_if_failing: {stop_if_failing!r} must be a share, from 0 to below 1")
    if rate is None:
        raise ValueError(
            f"stop_if_failing: {stop_if_failing!r} needs a rate, so that the first jobs end before the last "
            "are sent"
        )


def _check_choice(action: Action, at: datetime | None, where: Filter) -> None:
    if (action == "move") != (at is not None):
        raise ValueError(f"at: {at!r}: a {action} has {'a' if action == 'move' else 'no'} time")
    if action in ON_WAITING:
        without_group(where)
    elif where.kind:
        raise ValueError(f"kind: {where.kind!r}: dead letters have none; leave it out")


class Ledger:
    """The operations in the store of one bridge."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def get(self, operation_id: str) -> Operation:
        """Return an operation; raises OperationNotFound."""
        document = self.documents.get(KIND, operation_id)
        if document is None:
            raise OperationNotFound(f"there is no operation {operation_id!r}")
        try:
            with reading(KIND):
                return self.with_jobs([self._read(document)])[0]
        except Unreadable as error:
            raise OperationNotFound(f"operation {operation_id!r}: {error}") from None

    def ids_beginning(self, text: str, most: int) -> Sequence[str]:
        """Return the id that is a text, or else so many ids at most that begin with it, the newest first."""
        if self.documents.get(KIND, text):
            return [text]
        pages = every_page(lambda cursor: self.documents.list(KIND, limit=500, cursor=cursor))
        ids = (document.id for page in pages for document in page.documents)
        return [*islice((each for each in ids if each.startswith(text)), most)]

    def newest(self, limit: int) -> Sequence[Operation]:
        """Return the newest operations."""
        documents = self.documents.list(KIND, limit=limit, cursor=None).documents
        return self.with_jobs([*readable(documents, self._read)])

    def with_jobs(self, operations: Sequence[Operation]) -> Sequence[Operation]:
        """Return operations, the replays with what became of their jobs."""
        replays = [operation.id for operation in operations if operation.action == "replay"]
        kinds = [fate_kind(replay, fate) for replay in replays for fate in get_args(Fate)]
        counts = self.documents.count(kinds) if kinds else {}

        def jobs(replay: Operation) -> Jobs:
            return Jobs.of(replay.succeeded, lambda fate: counts.get(fate_kind(replay.id, fate), 0))

        return tuple(replace(each, jobs=jobs(each)) if each.id in replays else each for each in operations)

    def newest_fates(self, operation: Operation, fates: Sequence[Fate], most: int) -> Sequence[Fate]:
        """Return the newest of some fates of an operation's jobs, the newest first."""
        newest = [
            (document.at, fate)
            for fate in fates
            for document in self.documents.list(
                fate_kind(operation.id, fate), limit=most, cursor=None
            ).documents
        ]
        return [fate for _, fate in sorted(newest, reverse=True)[:most]]

    def dead(self, operation: Operation, limit: int, cursor: str | None) -> tuple[Sequence[str], str | None]:
        """Return the ids of an operation's jobs that died again, the newest first, and a cursor."""
        page = self.documents.list(fate_kind(operation.id, "died"), limit=limit, cursor=cursor)
        return [*readable(page.documents, lambda one: str(one.body["id"]))], page.next_cursor

    def _read(self, document: Document) -> Operation:
        operation = _OPERATION.validate_python(
            {
                **document.body,
                "action": action_from_json(document.body["action"]),
                "errors": tuple((job_id, why) for job_id, why in document.body["errors"]),
                "id": document.id,
                "began_at": document.at,
                "revision": document.revision,
            }
        )
        # No operation is kept for longer, however slow it is.
        pace = timedelta(seconds=min(KEPT.total_seconds(), 1 // operation.rate) if operation.rate else 0)
        if not operation.has_ended and self.now() - operation.updated_at > STALE + pace:
            return replace(operation, state="interrupted")
        return operation

    def save(self, operation: Operation) -> bool:
        """Write the next revision of an operation; False when another process has written one."""
        body = {
            **asdict(operation),
            "action": action_to_json(operation.action),
            **{name: format_time(at) for name in _TIMES if (at := getattr(operation, name))},
        }
        del body["revision"], body["began_at"], body["jobs"]
        return self.documents.write(
            Document(KIND, operation.id, operation.began_at, body, operation.revision), of_operator=True
        )

    def write_ids(self, operation: Operation, ids: Sequence[str]) -> None:
        """Write the ids that an operation begins with."""
        self.documents.write(Document(IDS, operation.id, operation.began_at, {"ids": ids}), of_operator=True)

    def ids_of(self, operation: Operation) -> Sequence[str]:
        """Return the ids that an operation was begun with; raises OperationNotFound when they are gone."""
        document = self.documents.get(IDS, operation.id)
        found = [document] if document else []
        for ids in readable(found, lambda one: tuple(map(str, one.body["ids"]))):
            return ids
        raise OperationNotFound(f"the ids of operation {operation.id!r} are gone")

    def forget_older(self, operation: Operation) -> None:
        """Delete the operations that began 30 days before this one, with the fates of their jobs."""
        before = operation.began_at - KEPT
        for page in every_page(lambda cursor: self.documents.list(KIND, limit=500, cursor=cursor)):
            for old in (document.id for document in page.documents if document.at < before):
                for fate in get_args(Fate):
                    self.documents.forget(fate_kind(old, fate), before=operation.began_at)
        for kind in (KIND, IDS):
            self.documents.forget(kind, before=before)

    def now(self) -> datetime:
        """Return the time, in whole milliseconds, as the store keeps it."""
        return from_ms(to_ms(self._context.clock()))

    @property
    def documents(self) -> Documents:
        """The documents of the store; raises ConfigurationError without one."""
        return self._context.store_for("bulk operations").documents
