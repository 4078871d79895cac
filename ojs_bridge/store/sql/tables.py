"""The tables of the SQL store: how they are made, and how those are added that an earlier release lacked.

Workers of that release go on with the store meanwhile, and no statement waits for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..documents import BOUNDS
from ..records import MAX_ID, MAX_TEXT

#: Version 2 brought parked retries and reservations, version 3 indexes, version 4 `ojs_shadows`, which no
#: release needs any more, and which stays. A later table that earlier releases need not know changes no
#: version, because they refuse a store of a newer version.
SCHEMA_VERSION = 4

ID = sa.String(MAX_ID)

#: How full PostgreSQL makes a page of reservations, in percent. One transaction may settle many of a page.
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
    #: Zero without a claim. The column has its name from the first version, when a claim was only a time.
    sa.Column("claimed_until_ms", sa.BigInteger, key="claimed_until", nullable=False, default=0),
    sa.Column("record", sa.Text, nullable=False),
    #: The number that the digits of the fingerprint stand for; null in a letter of an earlier release, which
    #: had other fingerprints, in a column of that name.
    sa.Column("fault", sa.BigInteger),
    sa.Index("ojs_dead_letters_newest", "namespace", "discarded_ms", "id"),
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

# The column with the most values comes first in these indexes: a planner without statistics takes the
# namespace for selective.
parked = sa.Table(
    "ojs_parked",
    metadata,
    sa.Column("key", ID, primary_key=True),
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("job_id", ID, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
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
    # The queue and the type tell which rows need not be read.
    sa.Index(
        *("ojs_parked_kinds", "due_ms", "namespace", "key", "queue", "type"),
        postgresql_ops={"type": "text_pattern_ops"},
    ),
    sa.Index("ojs_parked_job", "job_id", "namespace"),
)

reservations = sa.Table(
    "ojs_reservations",
    metadata,
    sa.Column("key", ID, primary_key=True),
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("settled", sa.Boolean, nullable=False),
    #: Empty where the publication is not known.
    sa.Column("publication", ID, nullable=False),
    #: Empty when the reservation was settled for a dead holder.
    sa.Column("holder", ID, nullable=False),
    #: The request that wrote the record, and whether it was answered with a lost attempt.
    sa.Column("mark", ID, nullable=False),
    sa.Column("lost", sa.Boolean, nullable=False),
    sa.Column("until_ms", sa.BigInteger, nullable=False),
    sa.Column("keep_until_ms", sa.BigInteger, nullable=False),
    # Where no index has a column that a settling changes, and the page has room, PostgreSQL settles without a
    # new entry in any index.
    sa.Index("ojs_reservations_ended", "until_ms", "namespace"),
)
#: Leaves room in the pages of reservations. SQLAlchemy's own option came after 2.0.28.
_FILL = sa.DDL(f"ALTER TABLE ojs_reservations SET (fillfactor = {FULL})")  # type: ignore[no-untyped-call]
sa.event.listen(reservations, "after_create", _FILL.execute_if(dialect="postgresql"))

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

texts = sa.Table(
    "ojs_letter_texts",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("id", ID, primary_key=True),
    #: The time of the death that the text is of: a letter that was replaced has another.
    sa.Column("discarded_ms", sa.BigInteger, nullable=False),
    #: What a letter says, in lower case; null where its record has to be searched.
    sa.Column("text", sa.Text),
    sa.Index("ojs_letter_texts_newest", "namespace", "discarded_ms", "id"),
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

#: What a store of an earlier release lacks: these tables, a column of dead letters, and the column's index.
#: Jobs go on without them.
LATER = (documents, rates, texts, groups, suspects)
FAULT = letters.c.fault
GROUPED = sa.Index("ojs_dead_letters_by_fault", letters.c.namespace, FAULT, letters.c.discarded_ms)
(ENDED,) = reservations.indexes
_BEFORE = {
    "ojs_reservations_ended": "ojs_reservations_kept",
    "ojs_parked_kinds": "ojs_parked_listed",
    "ojs_dead_letters_kinds": "ojs_dead_letters_counted",
    "ojs_dead_letters_types": "ojs_dead_letters_by_type",
    "ojs_dead_letters_errors": "ojs_dead_letters_by_error_type",
}
#: The indexes that are built in the place of those of earlier releases, whose names are here.
REPLACED = {
    index: _BEFORE[str(index.name)]
    for table in (reservations, parked, letters)
    for index in table.indexes
    if index.name in _BEFORE
}

#: How long PostgreSQL waits for a lock on the table: all that comes after it waits, too.
_LOCK = sa.text("SET LOCAL lock_timeout = '1s'")
_ADD = sa.text(f"ALTER TABLE {letters.name} ADD COLUMN {FAULT.name} BIGINT")
_IS_BUILDING = sa.text(
    "SELECT count(*) FROM pg_stat_progress_create_index"
    " WHERE index_relid = to_regclass(:index) AND datname = current_database()"
)
_MAY_USE = sa.text(
    "SELECT bool_and(has_table_privilege(to_regclass(:table), word)"
    " OR NOT has_table_privilege(to_regclass(:letters), word))"
    " FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS word"
)
_IS_VALID = sa.text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:index)")


def create(connection: Connection) -> None:
    """Create a new store whole, or the tables and indexes that a store of an earlier version lacks."""
    if connection.dialect.name == "sqlite":
        # Its driver begins no transaction before a table is created.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    has_table = sa.inspect(connection).has_table
    if not any(has_table(name) for name in metadata.tables):
        metadata.create_all(connection, checkfirst=False)
        return
    tables = [table for table in metadata.sorted_tables if table not in LATER]
    metadata.create_all(connection, tables)
    for index in (each for table in tables for each in table.indexes):
        if index not in (GROUPED, *REPLACED):
            index.create(connection, checkfirst=True)


def missing(connection: Connection) -> list[str]:
    """Return the names of the tables that are missing, and that of the groups' column if it is.

    A table counts as missing if this role has fewer rights to it than to the letters.
    """
    inspector = sa.inspect(connection)
    columns = {each["name"] for each in inspector.get_columns(letters.name)}
    tables = [
        table.name
        for table in LATER
        if not (inspector.has_table(table.name) and _may_use(connection, table.name))
    ]
    return tables if FAULT.name in columns else [*tables, FAULT.name]


def _may_use(connection: Connection, table: str) -> bool:
    return connection.dialect.name != "postgresql" or bool(
        connection.execute(_MAY_USE, {"table": table, "letters": letters.name}).scalar()
    )


def add(connection: Connection, name: str) -> None:
    """Add a table, or the column: that rewrites no row, but a client's long transaction may prevent it."""
    if name != FAULT.name:
        metadata.tables[name].create(connection)
        return
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK)
    connection.execute(_ADD)


def build_concurrently(url: sa.URL, index: sa.Index) -> bool:
    """Build an index on PostgreSQL, however long it takes; return whether it is there."""
    with _patient(url) as connection:
        if connection.execute(_IS_VALID, {"index": index.name}).scalar():
            return True
        if connection.execute(_IS_BUILDING, {"index": index.name}).scalar():
            return False
        # A build that was broken off leaves an index that is not valid.
        connection.execute(sa.text(f"DROP INDEX CONCURRENTLY IF EXISTS {index.name}"))
        build = str(sa.schema.CreateIndex(index).compile(connection))
        connection.execute(sa.text(build.replace("INDEX", "INDEX CONCURRENTLY", 1)))
    return True


def drop_concurrently(url: sa.URL, index: sa.Index) -> None:
    """Drop the index of earlier releases that PostgreSQL had in the place of this one.

    Let it leave room in the pages of reservations.
    """
    with _patient(url) as connection:
        if index is ENDED:
            connection.execute(_FILL)
        connection.execute(sa.text(f"DROP INDEX CONCURRENTLY IF EXISTS {REPLACED[index]}"))


@contextmanager
def _patient(url: sa.URL) -> Iterator[Connection]:
    """Connect for statements that may take long, and stop nobody."""
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT", hide_parameters=True)
    with engine.connect() as connection:
        yield connection
