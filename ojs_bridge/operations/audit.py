"""What operators did: the audit, their marks, and a Ctrl-C that waits for the end of a step."""

from __future__ import annotations

import getpass
import json
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from types import FrameType
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from ..engine.context import Context
from ..engine.events import Event
from ..errors import BridgeError, NotFound, NotUndoable, StoreError, Unpublishable
from ..rules.job import format_time
from ..rules.notations import check_pattern, matches
from ..store import Document, Documents, readable
from .letters import MAX_PAGE, only_id, page_size
from .undoing import Undone, bring_back

logger = logging.getLogger("ojs_bridge")

Via: TypeAlias = Literal["code", "cli", "http"]

KIND, MARK = "audit", "mark"
#: The action that an undo takes back.
DELETION = "dead_letter.delete"
#: How long the store keeps records.
KEPT = timedelta(days=180)
#: The most ids of a record, and the most characters of a text in it.
MAX_IDS, MAX_TEXT = 20, 1000
#: The most characters of an address, which a proxy may have from its client.
MAX_ADDRESS = 200
#: The most records that one page searches.
LOOK_THROUGH = 2000
#: How many records are read at once where not all of them are wanted.
_PAGE = 200


@dataclass(frozen=True, slots=True)
class Actor:
    """An operator: the name, the door and the address there, and the reason for what is done."""

    name: str
    via: Via
    address: str
    reason: str = ""

    @classmethod
    def of_system(cls, via: Via = "code", reason: str = "") -> Actor:
        """Return the user of this process; the name is that of the user who called sudo, if any did."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
        address = f"{user}@{socket.gethostname()}"
        return cls(os.environ.get("SUDO_USER") or user, via, address, reason)

    @classmethod
    def current(cls) -> Actor:
        """Return the actor of this thread or task, or else the user of this process."""
        return _ACTOR.get() or cls.of_system()


_ACTOR: ContextVar[Actor | None] = ContextVar("ojs_bridge_actor", default=None)


@contextmanager
def acting(actor: Actor | None) -> Iterator[None]:
    """Name an actor for what this thread or task does within the block; None is the user of this process."""
    before = _ACTOR.set(actor)
    try:
        yield
    finally:
        _ACTOR.reset(before)


@dataclass(frozen=True, slots=True)
class Record:
    """A record of an operator action.

    `subject` says on what: ids, a filter, an operation, the names of changed fields. `outcome` is `begun`,
    `done` or `failed`; that of a bulk operation is the operation's state. `count` is the number of letters or
    jobs, None where it is not known. `error` says why the action failed.
    """

    id: str
    at: datetime
    who: str
    via: Via
    address: str
    action: str
    subject: Mapping[str, Any]
    reason: str = ""
    outcome: str = "begun"
    count: int | None = None
    error: str = ""

    def to_ojs(self) -> dict[str, Any]:
        """Return the record in JSON."""
        return {**asdict(self), "at": format_time(self.at)}


_RECORD = TypeAdapter(Record)


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Records, the newest first, and the cursor of the next page; None on the last page."""

    records: tuple[Record, ...]
    next_cursor: str | None


@dataclass
class Entry:
    """The record of an action that goes on; the action sets the number and the outcome."""

    id: str
    count: int | None = None
    outcome: str = "done"

    def add(self, count: int) -> None:
        """Count letters as they are done, so that an action that breaks off has their number, too."""
        self.count = (self.count or 0) + count


class Audit:
    """The records of one bridge. Reading them raises StoreError, and ConfigurationError without a store."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @contextmanager
    def acting(self, name: str, *, reason: str = "") -> Iterator[None]:
        """Record the actions within the block under a name, and with a reason."""
        with acting(replace(Actor.of_system(), name=name, reason=reason)):
            yield

    @contextmanager
    def recording(self, action: str, *, ids: Sequence[str] = (), **subject: Any) -> Iterator[Entry]:
        """Record the action in the block: before it, and after it with its outcome.

        Of many `ids` the record has the first twenty, and the number of all. An action whose record cannot be
        written is done nevertheless, and the log has its record. The event `operator.action` has the record
        as it is after the action.
        """
        actor, now = _ACTOR.get() or Actor.of_system(), self._context.clock()
        if ids:
            subject = {"ids": [*ids[:MAX_IDS]], "id_count": len(ids), **subject}
        # The store keeps milliseconds; the records of one of them are listed by their ids.
        entry = Entry(f"act-{round(now.timestamp() * 1e6):x}-{secrets.token_hex(3)}")
        record = Record(
            entry.id,
            now,
            _bounded(actor.name),
            actor.via,
            actor.address[:MAX_ADDRESS],
            action,
            _bounded({name: value for name, value in subject.items() if value not in (None, (), [], {})}),
            _bounded(actor.reason),
        )
        self._write(record, 1)
        try:
            yield entry
        except BaseException as error:
            # Of any other error than our own the class: a foreign text may quote an argument.
            is_own = isinstance(error, BridgeError) and not isinstance(error, Unpublishable)
            text = str(error) if is_own else type(error).__name__
            record = replace(record, outcome="failed", error=_bounded(text))
            raise
        else:
            record = replace(record, outcome=entry.outcome)
        finally:
            with uninterrupted():
                record = replace(record, count=entry.count)
                self._write(record, 2)
                self._context.emit(Event("operator.action", "", self._context.clock(), record.to_ojs()))

    def end(self, record_id: str, outcome: str, count: int) -> None:
        """Change the record of an operation that has ended; the log has what cannot be written."""
        try:
            document = self._documents.get(KIND, record_id)
        except StoreError as error:
            logger.warning("record %s: the action is %s, count %d; %s", record_id, outcome, count, error)
            return
        known = [document] if document else []
        for revision, record in readable(known, lambda one: (one.revision + 1, _read(one))):
            self._write(replace(record, outcome=outcome, count=count), revision)

    def get(self, record_id: str) -> Record:
        """Return a record; raises NotFound."""
        document = self._documents.get(KIND, record_id)
        for record in readable([document] if document else [], _read):
            return record
        raise NotFound(f"there is no record {record_id!r}")

    def id_of(self, text: str) -> str:
        """Return the id that is this text, or else the only one of a late deletion that begins with it."""

        def beginning(text: str, most: int) -> Sequence[str]:
            records = self.list(action=DELETION, limit=MAX_PAGE).records
            return [record.id for record in records if record.id.startswith(text)][:most]

        return only_id(text, beginning)

    def undo(self, record_id: str) -> Undone:
        """Bring the letters back that an action has deleted, by its record; raises NotFound, NotUndoable.

        A letter whose job has gone on since stays in the bin: the Undone says why.
        """
        record = self.get(record_id)
        if record.action != DELETION:
            raise NotUndoable(f"record {record_id!r} is of the action {record.action}, which has no undo")
        return self.bring_back(str(record.subject.get("operation") or record_id))

    def bring_back(self, deletion: str) -> Undone:
        """Bring the letters of a deletion back, which is an operation, or the record of a single one."""
        with self.recording("dead_letter.undo", deletion=deletion) as entry:
            letters = self._context.store_for("dead letters").letters
            undone = bring_back(letters, deletion, self._context.surely())
            entry.count = undone.restored
        return undone

    def list(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        who: str | None = None,
        action: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> RecordPage:
        """Return a page of the records, newest first; `who` and `action` may be patterns.

        They are those of `since` or later, and of before `until`.

        A page searches 2,000 records: it may have few, or none, and still a cursor. Raises ValueError.
        """
        check_pattern("who", who)
        check_pattern("action", action)
        page_size(limit)
        size = limit if who is None and action is None and until is None else _PAGE
        records: list[Record] = []
        for _ in range(-(-LOOK_THROUGH // size)):
            page = self._documents.list(KIND, limit=size, cursor=cursor)
            for n, record in readable(enumerate(page.documents, 1), lambda one: (one[0], _read(one[1]))):
                if since is not None and record.at < since:
                    return RecordPage(tuple(records), None)
                is_wanted = matches(record.who, who or "*") and matches(record.action, action or "*")
                if is_wanted and (until is None or record.at < until):
                    records.append(record)
                if len(records) == limit and n < len(page.documents):
                    # Only the store makes cursors.
                    after = self._documents.list(KIND, limit=n, cursor=cursor).next_cursor
                    return RecordPage(tuple(records), after)
            cursor = page.next_cursor
            if cursor is None or len(records) == limit:
                break
        return RecordPage(tuple(records), cursor)

    def _write(self, record: Record, revision: int) -> None:
        body = {name: value for name, value in asdict(record).items() if name not in ("id", "at")}
        store, why = self._context.store, "there is no store"
        try:
            if store is not None:
                document = Document(KIND, record.id, record.at, body, revision)
                store.documents.write(document, of_operator=True)
                return
        except StoreError as error:
            why = str(error)
        if revision > 1:
            logger.warning("an operator's action is not on record: %s: %s", why, json.dumps(record.to_ojs()))

    @property
    def _documents(self) -> Documents:
        return self._context.store_for("audit records").documents


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, its text, such as `v42`, and the name of the operator who wrote it."""

    id: str
    at: datetime
    text: str
    by: str

    def to_ojs(self) -> dict[str, Any]:
        """Return the mark in JSON."""
        return {**asdict(self), "at": format_time(self.at)}


class Marks:
    """The marks of one bridge. Its methods raise StoreError; without a store ConfigurationError."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._audit = Audit(context)

    def add(self, text: str, *, at: datetime | None = None) -> Mark:
        """Write a mark, for now or for another time; raises ValueError."""
        text = text.strip()
        if not 0 < len(text) <= MAX_TEXT:
            raise ValueError(f"text: {len(text)} characters; there must be 1 to {MAX_TEXT}")
        if at is not None and not at.tzinfo:
            raise ValueError(f"at: {at!r} must be a time with a zone")
        at = at or self._context.clock()
        mark = Mark(f"mark-{secrets.token_hex(6)}", at, text, Actor.current().name)
        documents = self._documents
        with self._audit.recording("mark.add", mark=mark.id, text=text, at=format_time(at)):
            documents.write(Document(MARK, mark.id, at, {"text": text, "by": mark.by}))
        return mark

    def list(self, *, since: datetime | None = None, limit: int = 100) -> Sequence[Mark]:
        """Return the newest marks, of `since` or later; raises ValueError for a limit outside 1 to 1000."""
        documents = self._documents.list(MARK, limit=page_size(limit), cursor=None).documents
        marks = readable(
            documents, lambda one: Mark(one.id, one.at, str(one.body["text"]), str(one.body["by"]))
        )
        return tuple(mark for mark in marks if since is None or mark.at >= since)

    @property
    def _documents(self) -> Documents:
        return self._context.store_for("marks").documents


def _read(document: Document) -> Record:
    return _RECORD.validate_python({**document.body, "id": document.id, "at": document.at})


def _bounded(value: Any) -> Any:
    """Return a JSON value with its texts cut."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}…"
    if isinstance(value, Mapping):
        return {name: _bounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(inner) for inner in value]
    return value


class _Hold:
    """A handler of SIGINT that keeps the first signal for later."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self._held: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._held is None:
            self._held = number, frame
        else:
            self._held = None
            self.before(number, frame)

    def release(self) -> None:
        if self._held is not None:
            self.before(*self._held)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of the block or the decorated function; a second one strikes at once.

    Python handles Ctrl-C in the main thread alone, so other threads need no hold. A process whose SIGINT has
    no handler in Python ends at once, or ignores it, as before.
    """
    before = signal.getsignal(signal.SIGINT)
    is_held = isinstance(before, _Hold) or not callable(before)
    if is_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    hold = _Hold(before)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        # What the block calls may have set a handler of its own.
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, before)
        hold.release()
