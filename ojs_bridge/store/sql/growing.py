"""The tables of a new store; those, the column and the index that a store of an earlier release lacks.

Workers of that release go on with the store meanwhile, and no statement waits for long.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .tables import FAULT, GROUPED, LATER, letters, metadata

#: How long PostgreSQL waits for a lock on the table: all that comes after it waits, too.
_LOCK = sa.text("SET LOCAL lock_timeout = '1s'")
_ADD = sa.text(f"ALTER TABLE {letters.name} ADD COLUMN {FAULT.name} BIGINT")
_IS_BUILDING = sa.text(
    "SELECT count(*) FROM pg_stat_progress_create_index"
    " WHERE relid = to_regclass(:table) AND datname = current_database()"
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
        if index is not GROUPED:
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


def build_concurrently(url: sa.URL) -> bool:
    """Build the index on PostgreSQL, however long it takes; return whether it is there."""
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT", hide_parameters=True)
    with engine.connect() as connection:
        if connection.execute(_IS_VALID, {"index": GROUPED.name}).scalar():
            return True
        if connection.execute(_IS_BUILDING, {"table": letters.name}).scalar():
            return False
        # A build that was broken off leaves an index that is not valid.
        connection.execute(sa.text(f"DROP INDEX CONCURRENTLY IF EXISTS {GROUPED.name}"))
        build = str(sa.schema.CreateIndex(GROUPED).compile(connection))
        connection.execute(sa.text(build.replace("INDEX", "INDEX CONCURRENTLY", 1)))
    return True
