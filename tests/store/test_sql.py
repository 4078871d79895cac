"""What is true of the stores in SQL databases only: their tables and their version."""

from __future__ import annotations

import os

import pytest
import sqlalchemy as sa

from ojs_bridge import StoreError, open_store
from tests.store.processes import in_processes
from tests.store.test_store import letter


def test_many_processes_create_the_tables_at_once(sql_url: str) -> None:
    """Each of them can use the store."""
    found = in_processes(6, first_use, sql_url)
    assert sorted(found) == [1, 1, 1, 1, 1, 1]


def first_use(sql_url: str) -> int:
    """Use a store that nobody has used before, and count what it says of its version."""
    store = open_store(sql_url)
    store.prepare()
    store.bury(letter(str(os.getpid())))
    with sa.create_engine(sql_url).connect() as connection:
        return connection.execute(sa.text("select count(*) from ojs_schema")).scalar_one()


def test_a_store_of_a_newer_version_is_refused(sql_url: str) -> None:
    """By every method, and it says what to do."""
    store = open_store(sql_url)
    store.prepare()
    with sa.create_engine(sql_url).begin() as connection:
        connection.execute(sa.text("insert into ojs_schema values (3)"))
    store.bury(letter())
    later = open_store(sql_url)
    for use in (later.prepare, later.stats, lambda: later.bury(letter())):
        with pytest.raises(StoreError, match=r"^the store has schema 3, this ojs-bridge reads 2: update it$"):
            use()


def test_an_error_says_nothing_of_a_jobs_arguments(sql_url: str) -> None:
    """They may be secret, and the error goes to the log."""
    store = open_store(sql_url)
    store.bury(letter())
    with sa.create_engine(sql_url).begin() as connection:
        connection.execute(sa.text("drop table ojs_dead_letters"))
    with pytest.raises(StoreError) as error:
        store.bury(letter(message={"args": ["4111-1111"]}))
    assert "4111" not in str(error.value)
    assert "4111" not in str(error.value.__cause__)
