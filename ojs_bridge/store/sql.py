"""The SQL store, through SQLAlchemy Core: SQLite, PostgreSQL, MySQL."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ..errors import ConfigurationError
from ..job import PlacedEntry, format_time, parse_time
from . import sqlite
from .protocol import Claim, Letter, LetterFilter, Page, Stats, StoreError, without_password
from .reservations import Settle

SCHEMA_VERSION = 1
CONNECT_SECONDS = 5
#: What fits an index of every database; longer ids are hashed.
MAX_ID = 191
#: MySQL's own TEXT holds but 64 KB.
RECORD = sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")
LARGEST_INTEGER = 2**63 - 1

metadata = sa.MetaData()
versions = sa.Table("ojs_schema", metadata, sa.Column("version", sa.Integer, primary_key=True))
letters = sa.Table(
    "ojs_dead_letters",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("id", sa.String(MAX_ID), primary_key=True),
    sa.Column("type", sa.String(255), nullable=False),
    sa.Column("queue", sa.String(255), nullable=False),
    sa.Column("error_type", sa.String(255), nullable=False),
    sa.Column("discarded_ms", sa.BigInteger, nullable=False),
    sa.Column("claimed_until_ms", sa.BigInteger, nullable=False, default=0),
    sa.Column("record", RECORD, nullable=False),
    sa.Index("ojs_dead_letters_newest", "namespace", "discarded_ms", "id"),
    sa.Index("ojs_dead_letters_type", "namespace", "type", "discarded_ms"),
    sa.Index("ojs_dead_letters_queue", "namespace", "queue", "discarded_ms"),
)
errors = sa.Table(
    "ojs_error_history",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("job_id", sa.String(MAX_ID), primary_key=True),
    sa.Column("place", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("record", RECORD, nullable=False),
)


class SQLStore:
    """Dead letters in a SQL database; tables appear on first use and carry a version."""

    def __init__(self, url: str, namespace: str) -> None:
        self._namespace = namespace
        self._shown = without_password(url)
        self._engine = _engine(url)
        is_sqlite = self._engine.dialect.name == "sqlite"
        self._in_use: AbstractContextManager[Any] = sqlite.in_use if is_sqlite else nullcontext()
        self._pid = os.getpid()
        self._prepared = False
        self._preparing = threading.Lock()

    def prepare(self) -> None:
        """Create the tables; raises StoreError when a newer version wrote them."""
        with self._preparing:
            if not self._prepared:
                self._create_tables()
                self._check_version()
                self._prepared = True

    def _create_tables(self) -> None:
        for tries_left in reversed(range(len(metadata.tables) + 1)):
            try:
                with self._transaction(prepare=False) as connection:
                    metadata.create_all(connection)
            except StoreError:
                # Another process may have created a table between the check and the creation.
                if not tries_left:
                    raise
            else:
                return

    def _check_version(self) -> None:
        with self._transaction(prepare=False) as connection:
            found = connection.execute(sa.select(sa.func.max(versions.c.version))).scalar()
            if found is None:
                _insert_or_ignore(connection, sa.insert(versions).values(version=SCHEMA_VERSION))
            elif found > SCHEMA_VERSION:
                raise StoreError(
                    f"the store has schema {found}, this ojs-bridge reads {SCHEMA_VERSION}: update it"
                )

    def bury(self, letter: Letter, settle: Settle | None = None) -> None:
        """Write a dead letter, in place of an earlier one of its job and of the entries kept for it."""
        row = {
            "type": _plain(letter.type),
            "queue": _plain(letter.queue),
            "error_type": _plain(letter.error_type),
            "discarded_ms": _ms(letter.discarded_at),
            "claimed_until_ms": 0,
            "record": json.dumps(_record(letter)),
        }
        with self._transaction() as connection:
            connection.execute(sa.delete(errors).where(self._of(letter.id)))
            key = {"namespace": self._namespace, "id": _key(letter.id)}
            _insert_or_ignore(connection, sa.insert(letters).values({**key, **row}))
            connection.execute(sa.update(letters).where(self._is(letter.id)).values(row))

    def keep_errors(self, job_id: str, entries: Sequence[PlacedEntry]) -> None:
        """Keep entries; one that is there already stays as it is."""
        key = {"namespace": self._namespace, "job_id": _key(job_id)}
        with self._transaction() as connection:
            for place, entry in entries:
                row = {**key, "place": place, "record": json.dumps(entry)}
                _insert_or_ignore(connection, sa.insert(errors).values(row))

    def kept_errors(self, job_id: str) -> list[PlacedEntry]:
        """Return the kept entries with their places, oldest first."""
        query = sa.select(errors.c.place, errors.c.record).where(self._of(job_id)).order_by(errors.c.place)
        with self._transaction() as connection:
            return [(place, json.loads(record)) for place, record in connection.execute(query)]

    def forget_errors(self, job_id: str) -> None:
        """Delete the kept entries of a job."""
        with self._transaction() as connection:
            connection.execute(sa.delete(errors).where(self._of(job_id)))

    def list(self, where: LetterFilter, *, limit: int, cursor: str | None) -> Page:
        """Return a page, newest first; the cursor names the last letter seen, so new ones do not shift it."""
        query = sa.select(letters.c.record, letters.c.discarded_ms, letters.c.id).where(
            *self._matching(where)
        )
        if cursor is not None:
            at, last_id = _read_cursor(cursor)
            older = sa.and_(letters.c.discarded_ms == at, letters.c.id < last_id)
            query = query.where(sa.or_(letters.c.discarded_ms < at, older))
        query = query.order_by(letters.c.discarded_ms.desc(), letters.c.id.desc()).limit(limit + 1)
        with self._transaction() as connection:
            rows = connection.execute(query).all()
        more = f"{rows[limit - 1].discarded_ms}:{rows[limit - 1].id}" if len(rows) > limit else None
        return Page(tuple(_letter(row.record) for row in rows[:limit]), more)

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""
        with self._transaction() as connection:
            record = connection.execute(sa.select(letters.c.record).where(self._is(letter_id))).scalar()
        return None if record is None else _letter(record)

    def claim(self, letter_id: str, *, now: datetime, seconds: float) -> Claim | None:
        """Reserve a letter, atomically; the claim is the time it ends, which no other claim shares."""
        until = _ms(now + timedelta(seconds=seconds))
        free = letters.c.claimed_until_ms <= _ms(now)
        with self._transaction() as connection:
            statement = sa.update(letters).where(self._is(letter_id), free).values(claimed_until_ms=until)
            return until if connection.execute(statement).rowcount == 1 else None

    def release(self, letter_id: str, claim: Claim) -> None:
        """Give back a claim that is still ours."""
        statement = sa.update(letters).where(self._is(letter_id), letters.c.claimed_until_ms == claim)
        with self._transaction() as connection:
            connection.execute(statement.values(claimed_until_ms=0))

    def delete(self, letter_id: str, claim: Claim) -> bool:
        """Delete a letter whose claim is still ours; burying it anew ends every claim."""
        statement = sa.delete(letters).where(self._is(letter_id), letters.c.claimed_until_ms == claim)
        with self._transaction() as connection:
            return connection.execute(statement).rowcount == 1

    def stats(self) -> Stats:
        """Count the dead letters, in all and by queue, type and last error type."""
        mine = letters.c.namespace == self._namespace
        oldest, newest = sa.func.min(letters.c.discarded_ms), sa.func.max(letters.c.discarded_ms)
        with self._transaction() as connection:
            total = connection.execute(sa.select(sa.func.count(), oldest, newest).where(mine)).one()
            by_queue, by_type, by_error_type = (
                {row[0]: row[1] for row in connection.execute(_counts(column).where(mine))}
                for column in (letters.c.queue, letters.c.type, letters.c.error_type)
            )
        return Stats(total[0], by_queue, by_type, by_error_type, _time(total[1]), _time(total[2]))

    def close(self) -> None:
        """Close the connections of this process."""
        self._engine.dispose(close=self._pid == os.getpid())

    @contextmanager
    def _transaction(self, *, prepare: bool = True) -> Iterator[Connection]:
        if self._pid != os.getpid():
            # A forked child must not talk over its parent's connections, nor close them.
            self._engine.dispose(close=False)
            self._pid = os.getpid()
            self._preparing = threading.Lock()
        if prepare and not self._prepared:
            self.prepare()
        try:
            with self._in_use, self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, UnicodeError, OverflowError) as error:
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            raise StoreError(f"the store {self._shown!r} failed: {why}") from error

    def _is(self, letter_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(letters.c.namespace == self._namespace, letters.c.id == _key(letter_id))

    def _of(self, job_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(errors.c.namespace == self._namespace, errors.c.job_id == _key(job_id))

    def _matching(self, where: LetterFilter) -> Iterator[sa.ColumnElement[bool]]:
        yield letters.c.namespace == self._namespace
        if where.queue is not None:
            yield letters.c.queue == _plain(where.queue)
        for column, pattern in ((letters.c.type, where.type), (letters.c.error_type, where.error_type)):
            if pattern is None:
                continue
            text = _plain(pattern)
            if text.endswith(".*"):
                # Not LIKE, which takes `auth` for `AUTH` on SQLite and knows two more wildcards.
                yield sa.func.substr(column, 1, len(text) - 1) == text[:-1]
            else:
                yield column == text


def _engine(url: str) -> sa.Engine:
    shown = without_password(url)
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"store: {shown!r} is not a database URL") from None
    try:
        # Parameters are the arguments of jobs, which belong in no log.
        engine = sa.create_engine(
            parsed, pool_pre_ping=True, hide_parameters=True, connect_args=_patience(parsed)
        )
    except ImportError as error:
        raise ConfigurationError(f"store: the driver of {shown!r} is not installed: {error}") from None
    except (ArgumentError, NoSuchModuleError, TypeError, ValueError) as error:
        raise ConfigurationError(f"store: {shown!r} is not a store that ojs-bridge knows: {error}") from None
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or ":memory:" in parsed.database:
            raise ConfigurationError(
                f"store: {shown!r} would be gone with the process: name a file, as in sqlite:///ojs.db"
            )
        sqlite.share(engine)
    return engine


def _patience(url: sa.URL) -> dict[str, Any]:
    """Return what keeps a worker from waiting minutes for a host that does not answer."""
    networked = url.get_backend_name() in ("postgresql", "mysql")
    return {"connect_timeout": CONNECT_SECONDS} if networked and "connect_timeout" not in url.query else {}


def _insert_or_ignore(connection: Connection, statement: sa.Insert) -> None:
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except sa.exc.IntegrityError:
        return


def _counts(column: sa.Column[str]) -> Any:
    return sa.select(column, sa.func.count()).group_by(column)


def _read_cursor(cursor: str) -> tuple[int, str]:
    at, separator, last_id = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal() and len(at) <= len(str(LARGEST_INTEGER)) - 1):
        raise ValueError(f"cursor: {cursor!r} was not given out by this store")
    return int(at), _plain(last_id)


def _key(job_id: str) -> str:
    """Return an id as an index of every database can hold it; the whole one is in the record."""
    if len(job_id) <= MAX_ID and job_id == _plain(job_id):
        return job_id
    return f"sha256-{hashlib.sha256(job_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _plain(text: str) -> str:
    """Return text as every database can hold it: valid Unicode, no NUL, 255 characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")[:255]


_EPOCH = datetime.fromtimestamp(0, timezone.utc)


def _ms(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(milliseconds=1)


def _time(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, timezone.utc)


def _record(letter: Letter) -> dict[str, Any]:
    record = {name: getattr(letter, name) for name in Letter.__slots__}
    for name in _TIMES:
        record[name] = None if record[name] is None else format_time(record[name])
    return record


def _letter(text: str) -> Letter:
    record = json.loads(text)
    for name in _TIMES:
        record[name] = None if record[name] is None else parse_time(record[name])
    return Letter(**{**record, "errors": tuple(record["errors"])})


_TIMES = ("discarded_at", "created_at")
