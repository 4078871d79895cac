"""A connection to PostgreSQL that waits for no answer for longer than it may, and writes rows by libpq."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import select
import selectors
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from psycopg import Connection, OperationalError
from psycopg.pq import ExecStatus, TransactionStatus

logger = logging.getLogger("ojs_bridge")

#: How long a question that got no answer in time waits for the server to break it off.
CANCEL_SECONDS = 1.0
_PARAMETER = re.compile(r"%\((\w+)\)s")
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_names = itertools.count()


class InTime(Connection[Any]):
    """A connection of psycopg's whose questions are broken off after `seconds`."""

    seconds = 10.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: The statements that `write` has prepared, by their texts: their names on the server.
        self._written: dict[bytes, bytes] = {}
        #: What the store's URL may have chosen: all else that is sent is written in it.
        self._encoding = self.info.encoding

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        """Return the server's answer; raises OperationalError."""
        try:
            return _answer(gen, self.pgconn.socket, self.seconds)
        except TimeoutError as error:
            self._break_off(gen)
            raise OperationalError(str(error)) from None
        except BaseException:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                # The answer may still come. The next question must not take it for its own.
                self._break_off(gen)
            raise

    def write(self, statement: str, row: Mapping[str, Any]) -> int | None:
        """Run a statement, in half of the CPU time that psycopg takes; return how many rows it has written.

        None if the answer is an error: then nothing is written, and psycopg asks again, to say what it is.
        Raises OperationalError.
        """
        written: int | None = self.wait(self._writing(statement, row))
        return written

    def _writing(self, statement: str, row: Mapping[str, Any]) -> Generator[int, int, int | None]:
        text, columns = _numbered(statement)
        values = [str(row[column]).encode(self._encoding) for column in columns]
        if self.prepare_threshold is None:
            self.pgconn.send_query_params(text, values)
        else:
            if text not in self._written:
                name = f"ojs_{next(_names)}".encode()
                self.pgconn.send_prepare(name, text)
                if (yield from self._result()).status != ExecStatus.COMMAND_OK:
                    return None
                self._written[text] = name
            self.pgconn.send_query_prepared(self._written[text], values)
        result = yield from self._result()
        if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            return result.command_tuples or 0
        # psycopg may have deallocated all, and a table may have changed.
        self._written.clear()
        return None

    def _result(self) -> Generator[int, int, Any]:
        """Return the last result of what was sent; yield the events that are waited for, as psycopg does."""
        while self.pgconn.flush():
            if (yield _READ | _WRITE) & _READ:
                self.pgconn.consume_input()
        last = None
        while True:
            while self.pgconn.is_busy():
                yield _READ
                self.pgconn.consume_input()
            result = self.pgconn.get_result()
            if result is None:
                return last
            last = result

    def _break_off(self, gen: Any) -> None:
        """Let the server give a question up, and close: it would wait for a lock without its client.

        The connection counts among those of the process until the server has given up.
        """
        try:
            if hasattr(self, "cancel_safe"):
                self.cancel_safe(timeout=CANCEL_SECONDS)
            else:
                self.cancel()
            _answer(gen, self.pgconn.socket, CANCEL_SECONDS)
        except Exception as error:  # noqa: BLE001 - the answer is an error, or there is none
            logger.debug("a question to PostgreSQL was broken off: %r", error)
        finally:
            self.close()


@functools.cache
def _numbered(statement: str) -> tuple[bytes, Sequence[str]]:
    """Return a statement of psycopg's with numbers for its parameters, and their names in this order."""
    names = list(dict.fromkeys(_PARAMETER.findall(statement)))
    text = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    return text.encode(), names


def _answer(gen: Any, connection: int, seconds: float) -> Any:
    """Run psycopg's generator to its end: it yields the events it waits for, and is sent those that came."""
    ends = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while came := _came(connection, wanted, max(ends - time.monotonic(), 0)):
            wanted = gen.send(came)
    except StopIteration as end:
        return end.value
    raise TimeoutError(f"no answer within {seconds:g} s")


def _came(connection: int, wanted: int, seconds: float) -> int:
    """Wait for events on a connection, and return those that came, as `selectors` and psycopg count them.

    A selector would take as long as the whole statement does, and may need a descriptor of its own.
    """
    if not hasattr(select, "poll"):  # as in a worker that eventlet has patched
        readers, writers = [connection] * bool(wanted & _READ), [connection] * bool(wanted & _WRITE)
        read, write, _ = select.select(readers, writers, (), seconds)
        return _READ * bool(read) | _WRITE * bool(write)
    poll = select.poll()
    poll.register(connection, select.POLLIN * bool(wanted & _READ) | select.POLLOUT * bool(wanted & _WRITE))
    found = poll.poll(seconds * 1000)
    events = found[0][1] if found else 0
    # As `selectors` do, take an error for whatever is waited for: who reads or writes then finds out.
    readable, writable = events & ~select.POLLOUT, events & ~select.POLLIN
    return wanted & (_READ * bool(readable) | _WRITE * bool(writable))
