"""One server for all the processes of a test run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeVar

from tests.servers.process import Server

Kind = TypeVar("Kind", bound=Server)


class Lender:
    """Starts a server of each kind when a process first asks for it, and keeps it until it is closed.

    One thread does it all: a server dies with the thread that started it.
    """

    def __init__(self, kinds: Mapping[str, type[Server]]) -> None:
        self._kinds = kinds
        self._ports: dict[str, int] = {}
        self._listener = Listener(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> Any:
        """The address at which processes ask for servers."""
        return self._listener.address

    def close(self) -> None:
        """Stop the servers."""
        with Client(self.address) as asked:
            asked.send(None)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with ExitStack() as servers:
            while True:
                with self._listener.accept() as caller, suppress(EOFError, OSError):
                    if (kind := caller.recv()) is None:
                        return
                    self._answer(kind, caller, servers)

    def _answer(self, kind: str, caller: Connection, servers: ExitStack) -> None:
        try:
            if kind not in self._ports:
                self._ports[kind] = servers.enter_context(self._kinds[kind]()).port
        except Exception as error:
            caller.send(error)
        else:
            caller.send(self._ports[kind])


@contextmanager
def borrowed(kind: type[Kind], address: Any) -> Iterator[Kind]:
    """The server of a kind that a lender has started, as an object of this process."""
    with Client(tuple(address)) as lender:
        lender.send(kind.__name__)
        answer = lender.recv()
    if isinstance(answer, Exception):
        raise answer
    server = kind()
    server.port = answer
    try:
        yield server
    finally:
        server.close()
