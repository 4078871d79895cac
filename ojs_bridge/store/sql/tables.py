"""The tables of the SQL store, and how they are made."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..documents import BOUNDS
from ..records import MAX_ID, MAX_TEXT

SCHEMA_VERSION = 1

ID = sa.String(MAX_ID)

#: How full PostgreSQL makes a page of reservations, in percent. One transaction may settle many of a page.
#: Where it has room, no index gets a new entry.
FULL = 70

metadata = sa.MetaData()


def _by_prefix(name: str, column: str, *read: str) -> sa.Index:
    """Return an index that finds prefixes in a database of any collation.

    Groups and counts read the last columns there, and not the letters, which are anywhere on the disk.
    """
    ops = {column: "text_pattern_ops"}
    return sa.Index(name, "namespace", column, "discarded_ms", *read, postgresql_ops=ops)


versions = sa.Table("ojs_schema", metadata, sa.Column("version", sa.Integer, primary_key=True))

letters = sa.Table(
    "ojs_dead_letters",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("id", ID, primary_key=True),
    sa.Column("type", sa.String(MAX_TEXT), nullable=False),
    sa.Column("queue", sa.String(MAX_TEXT), nullable=False),
    sa.Column("error_type", sa.String(MAX_TEXT), nullable=False),
    sa.Column("discarded_ms", sa.BigInteger, nullable=False),
    #: Zero without a claim.
    sa.Column("claimed_until", sa.BigInteger, nullable=False, default=0),
    sa.Column("record", sa.Text, nullable=False),
    #: The number that the digits of the fingerprint stand for.
    sa.Column("fault", sa.BigInteger, nullable=False),
    sa.Index("ojs_dead_letters_newest", "namespace", "discarded_ms", "id"),
    sa.Index("ojs_dead_letters_by_fault", "namespace", "fault", "discarded_ms"),
    _by_prefix("ojs_dead_letters_types", "type", "fault", "queue", "error_type"),
    _by_prefix("ojs_dead_letters_errors", "error_type", "fault", "queue", "type"),
    sa.Index("ojs_dead_letters_queue", "namespace", "queue", "discarded_ms"),
    sa.Index("ojs_dead_letters_kinds", "namespace", "queue", "type", "error_type", "discarded_ms", "fault"),
)

errors = sa.Table(
    "ojs_error_history",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("job_id", ID, primary_key=True),
    sa.Column("place", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("record", sa.Text, nullable=False),
)

#: Deleted letters, which an undo brings back.
bins = sa.Table(
    "ojs_bin",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("deletion", ID, primary_key=True),
    sa.Column("id", ID, primary_key=True),
    sa.Column("deleted_ms", sa.BigInteger, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.Index("ojs_bin_oldest", "namespace", "deleted_ms"),
)

# The column with the most values comes first in these indexes: a planner without statistics takes the
# namespace for selective.
parked = sa.Table(
    "ojs_parked",
    metadata,
    sa.Column("key", ID, primary_key=True),
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("job_id", ID, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    #: Why it waits: retry, scheduled or held.
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("framework", sa.String(MAX_TEXT), nullable=False),
    sa.Column("type", sa.String(MAX_TEXT), nullable=False),
    sa.Column("queue", sa.String(MAX_TEXT), nullable=False),
    sa.Column("due_ms", sa.BigInteger, nullable=False),
    sa.Column("parked_ms", sa.BigInteger, nullable=False),
    #: Empty without a claim.
    sa.Column("claim", sa.String(32), nullable=False),
    sa.Column("claimed_until_ms", sa.BigInteger, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.Index("ojs_parked_due", "framework", "namespace", "due_ms", "key"),
    # The queue, the type and the kind tell which rows need not be read.
    sa.Index(
        *("ojs_parked_kinds", "due_ms", "namespace", "key", "queue", "type", "kind"),
        postgresql_ops={"type": "text_pattern_ops"},
    ),
    sa.Index("ojs_parked_job", "job_id", "namespace"),
)

# There is one index only, because each run adds an entry of each index to the log of PostgreSQL. Of a changed
# row the log gets what lies between its first and its last change. What a settling changes stands together.
reservations = sa.Table(
    "ojs_reservations",
    metadata,
    sa.Column("fence", sa.BigInteger, nullable=False),
    #: When a reservation runs out; of a settled one, when its record may go.
    sa.Column("until_ms", sa.BigInteger, nullable=False),
    sa.Column("settled", sa.Boolean, nullable=False),
    #: Whether the request that wrote the record was answered with a lost attempt.
    sa.Column("lost", sa.Boolean, nullable=False),
    sa.Column("key", ID, primary_key=True),
    sa.Column("namespace", sa.String(64), primary_key=True),
    #: Empty where the publication is not known.
    sa.Column("publication", ID, nullable=False),
    #: Empty when the reservation was settled for a dead holder.
    sa.Column("holder", ID, nullable=False),
    #: The request that wrote the record.
    sa.Column("mark", ID, nullable=False),
)
#: Leaves room in the pages of reservations. SQLAlchemy's own option came after 2.0.28.
_FILL = sa.DDL(f"ALTER TABLE ojs_reservations SET (fillfactor = {FULL})")  # type: ignore[no-untyped-call]
sa.event.listen(reservations, "after_create", _FILL.execute_if(dialect="postgresql"))


def _name(_table: object, connection: Connection, **_: Any) -> None:
    """Write what tells this table from those of other databases and schemas."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"COMMENT ON TABLE ojs_parked IS 'ojs-bridge {uuid4()}'"))


sa.event.listen(parked, "after_create", _name)

documents = sa.Table(
    "ojs_documents",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    sa.Column("id", ID, primary_key=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.Index("ojs_documents_newest", "namespace", "kind", "at_ms", "id"),
)

rates = sa.Table(
    "ojs_rates",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    #: 60 for a minute, 3600 for an hour.
    sa.Column("seconds", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at_ms", sa.BigInteger, primary_key=True, autoincrement=False),
    #: Type, queue and outcome in one text.
    sa.Column("key", ID, primary_key=True),
    sa.Column("type", sa.String(MAX_TEXT), nullable=False),
    sa.Column("queue", sa.String(MAX_TEXT), nullable=False),
    sa.Column("outcome", sa.String(32), nullable=False),
    *(sa.Column(f"count_{place}", sa.BigInteger, nullable=False) for place in range(len(BOUNDS) + 1)),
)

#: The first death of each group, which may have no letter any more.
groups = sa.Table(
    "ojs_groups",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("fault", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("first_ms", sa.BigInteger, nullable=False),
)

#: Families of processes that may be dead, and since when, by the server's clock.
suspects = sa.Table(
    "ojs_suspects",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("family", ID, primary_key=True),
    sa.Column("since_ms", sa.BigInteger, nullable=False),
)


def create(connection: Connection) -> None:
    """Create the tables and indexes that are missing."""
    if connection.dialect.name == "sqlite":
        # Its driver begins no transaction before a table is created.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    metadata.create_all(connection)
