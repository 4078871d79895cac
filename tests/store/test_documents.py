"""Documents are the same in every store: one writer of a revision wins, and the newest come first."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from ojs_bridge.store import Document, Store, open_store
from tests.store.processes import in_processes

AT = datetime(2026, 11, 21, 10, tzinfo=timezone.utc)


def document(name: str, *, kind: str = "note", minutes: int = 0, **body: object) -> Document:
    return Document(kind, name, AT + timedelta(minutes=minutes), body)


def test_a_document_is_kept_as_it_was_written(store: Store) -> None:
    written = document("a", text="\ud800 \0 ü", list=[1, {"deep": None}])
    assert store.documents.write(written)
    assert store.documents.get("note", "a") == written
    assert store.documents.get("note", "b") is None
    assert store.documents.get("other", "a") is None


def test_only_the_next_revision_is_written(store: Store) -> None:
    first = document("a", n=1)
    second = replace(first, body={"n": 2}, revision=2)
    assert store.documents.write(first)
    assert store.documents.write(first), "a write that is repeated after a lost answer is no other write"
    assert not store.documents.write(document("a", n="another"))
    assert store.documents.write(second)
    assert not store.documents.write(replace(second, body={"n": "late"}))
    assert not store.documents.write(first)
    assert store.documents.get("note", "a") == second


def test_a_revision_of_another_time_takes_the_place_of_the_earlier_one(store: Store) -> None:
    """Its place among the others is that of its own time."""
    for n in range(3):
        store.documents.write(document(f"n-{n}", minutes=n))
    for revision, minutes in ((2, 30), (3, 1)):
        moved = replace(document("n-0", minutes=minutes), revision=revision)
        assert store.documents.write(moved)
    listed = store.documents.list("note", limit=9, cursor=None).documents
    assert [(one.id, one.revision) for one in listed] == [("n-2", 1), ("n-1", 1), ("n-0", 3)]
    assert store.documents.count(["note"]) == {"note": 3}
    assert store.documents.forget("note", before=AT + timedelta(minutes=9)) == 3
    assert store.documents.list("note", limit=9, cursor=None).documents == ()


def test_documents_are_counted_by_kind(store: Store) -> None:
    for n in range(3):
        store.documents.write(document(f"a-{n}", kind="op-1.died"))
    store.documents.write(document("a-0", kind="op-2.died"))
    store.documents.write(replace(document("a-0", kind="op-2.died"), revision=2))
    wanted = ["op-1.died", "op-2.died", "op-3.died", *(f"k-{n}" for n in range(700))]
    assert store.documents.count(wanted) == {"op-1.died": 3, "op-2.died": 1}
    assert store.documents.count(["op-1.died"]) == {"op-1.died": 3}


def write_own(url: str) -> bool:
    """Write a document that no other process writes."""
    return open_store(url).documents.write(document("a", writer=os.getpid()))


def test_of_many_writers_one_wins(url: str) -> None:
    open_store(url).prepare()
    assert sorted(in_processes(4, write_own, url)) == [False, False, False, True]


def test_pages_have_the_newest_first(store: Store) -> None:
    for n in range(5):
        store.documents.write(document(f"n-{n}", minutes=n))
    store.documents.write(document("n-0", kind="other", minutes=9))
    first = store.documents.list("note", limit=3, cursor=None)
    rest = store.documents.list("note", limit=3, cursor=first.next_cursor)
    assert [found.id for found in (*first.documents, *rest.documents)] == ["n-4", "n-3", "n-2", "n-1", "n-0"]
    assert rest.next_cursor is None
    with pytest.raises(ValueError, match="cursor: 'x' was not given out"):
        store.documents.list("note", limit=3, cursor="x")


def test_older_documents_are_forgotten(store: Store) -> None:
    for n in range(4):
        store.documents.write(document(f"n-{n}", minutes=n))
    store.documents.write(document("n-0", kind="other"))
    assert store.documents.forget("note", before=AT + timedelta(minutes=2)) == 2
    assert store.documents.forget("note", before=AT + timedelta(minutes=2)) == 0
    left = store.documents.list("note", limit=9, cursor=None).documents
    assert [found.id for found in left] == ["n-3", "n-2"]
    assert store.documents.get("other", "n-0")


def test_a_store_of_an_earlier_release_gets_the_table(postgres_url: str) -> None:
    """Its version stays, so that workers of that release go on."""
    store = open_store(postgres_url)
    store.prepare()
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(sa.text("drop table ojs_documents"))
        before = connection.execute(sa.text("select version from ojs_schema")).scalars().all()
    assert open_store(postgres_url).documents.write(document("a"))
    with engine.connect() as connection:
        assert connection.execute(sa.text("select version from ojs_schema")).scalars().all() == before
    engine.dispose()


def test_a_document_has_the_time_of_its_last_revision(store: Store) -> None:
    """It is listed once, and forgotten by that time."""
    for revision in (1, 2, 3):
        written = replace(document("a", minutes=9 * revision), revision=revision)
        assert store.documents.write(written)
    store.documents.write(document("b", minutes=20))
    listed = store.documents.list("note", limit=9, cursor=None).documents
    assert [found.id for found in listed] == ["a", "b"]
    assert store.documents.count(["note"]) == {"note": 2}
    assert store.documents.forget("note", before=AT + timedelta(minutes=19)) == 0
    assert store.documents.get("note", "a") == written
    assert store.documents.write(replace(written, at=AT, revision=4))
    assert store.documents.forget("note", before=AT + timedelta(minutes=1)) == 1
    assert store.documents.get("note", "a") is None
