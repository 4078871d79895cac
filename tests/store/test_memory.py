"""A store in memory: each is empty at first, threads share it, and other processes are refused."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from ojs_bridge import StoreError, open_store
from ojs_bridge.store import Filter, Store
from tests.store.test_store import letter


def ids(store: Store) -> set[str]:
    return {kept.id for kept in store.letters.list(Filter(), limit=100, cursor=None).letters}


def test_each_store_is_empty_at_first() -> None:
    first, second = open_store("memory://"), open_store("memory://")
    first.letters.bury(letter("a"), None)
    assert (ids(first), ids(second)) == ({"a"}, set())
    first.close()
    second.close()


def test_threads_share_it() -> None:
    store = open_store("memory://")
    names = [f"l{n}" for n in range(20)]
    threads = [threading.Thread(target=store.letters.bury, args=(letter(name), None)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert ids(store) == {*names}
    store.close()


def test_a_forked_process_is_refused_and_leaves_it_as_it_is() -> None:
    store = open_store("memory://")
    store.letters.bury(letter("a"), None)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            store.letters.bury(letter("b"), None)
        except StoreError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1000).decode()
    assert told == (
        f"the store 'memory://' is in the memory of process {os.getpid()}, and this is process {child}: "
        "processes share a store such as sqlite:///ojs.db"
    )
    assert ids(store) == {"a"}
    store.close()


def test_it_forgets_all_when_it_is_closed() -> None:
    store = open_store("memory://")
    store.letters.bury(letter("a"), None)
    store.close()
    with pytest.raises(StoreError, match="memory://"):
        store.letters.count(Filter())
