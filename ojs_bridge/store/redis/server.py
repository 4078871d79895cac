"""One Redis or Valkey: its connections, its scripts and its errors."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.connection import Connection, parse_url

from ...errors import ConfigurationError, StoreError
from ..opening import REDIS_SCHEMES
from ..protocol import without_password

CONNECT_SECONDS = 5

Word: TypeAlias = str | bytes | int


class Script:
    """A Lua script.

    Each one must be safe to repeat, and write first what a server without memory refuses: Redis then refuses
    all of it, and never half.
    """

    def __init__(self, text: str) -> None:
        code = text.encode()
        self.whole = _pack(("EVAL", code))
        self.by_name = _pack(("EVALSHA", hashlib.sha1(code, usedforsecurity=False).hexdigest()))


class RedisServer:
    """The connections of one process, each used by one caller at a time.

    redis-py connects, authenticates and parses; its client and its pool are left out, for they take three
    times as long as the server does.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.shown = without_password(url)
        self._address = self._first_address = _address(url, patience)
        self._free: list[_Connection] = []
        self._pid = os.getpid()
        try:
            self._connection()
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"store: {self.shown!r} is not a Redis URL: {error}") from None

    @property
    def database(self) -> int:
        """The number of the database."""
        return int(self._address.get("db") or 0)

    def run(self, script: Script, keys: Sequence[bytes], words: Sequence[Word] = ()) -> Any:
        """Return what a script answers, numbers and bytes; raises StoreError."""
        given = _pack((len(keys), *keys, *words))
        count = 3 + len(keys) + len(words)
        try:
            try:
                return self._answer(b"*%d\r\n%b%b" % (count, script.by_name, given))
            except redis.exceptions.NoScriptError:
                return self._answer(b"*%d\r\n%b%b" % (count, script.whole, given))
        except (redis.RedisError, OSError, UnicodeError) as error:
            raise self._failed(error) from error

    def ask(self, *words: Word) -> Any:
        """Return the answer to a command; raises StoreError."""
        try:
            return self._answer(b"*%d\r\n%b" % (len(words), _pack(words)))
        except (redis.RedisError, OSError, UnicodeError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the connections of this process that nobody uses at the moment."""
        self._forget_those_of_the_parent()
        with suppress(IndexError):
            while True:
                self._free.pop().disconnect()

    def _answer(self, command: bytes) -> Any:
        try:
            return self._try(command)
        except redis.ResponseError as error:
            if not (isinstance(error, redis.exceptions.MovedError) or str(error).startswith("MOVED ")):
                raise
            self._follow(error)
            return self._try(command)

    def _try(self, command: bytes) -> Any:
        self._forget_those_of_the_parent()
        try:
            used = self._free.pop()
        except IndexError:
            return self._exchange(self._connection(), command)
        try:
            return self._exchange(used, command)
        except (redis.ConnectionError, redis.ReadOnlyError):
            # It may have been closed while it was idle, and so may have been the others.
            self.close()
            return self._exchange(self._connection(), command)
        except redis.TimeoutError:
            # The others may be as dead, and each of them would be waited for.
            self.close()
            raise

    def _follow(self, moved: redis.ResponseError) -> None:
        """Go where the keys are: those of a namespace live in one slot, so all of them have moved."""
        host, _, port = str(moved).rpartition(" ")[2].rpartition(":")
        self._address = {
            **self._address,
            "host": host or self._address.get("host", "localhost"),
            "port": port,
        }
        self.close()

    def _exchange(self, connection: _Connection, command: bytes) -> Any:
        try:
            connection.send_packed_command([command], check_health=False)
            answer = connection.read_response()
        except redis.ResponseError as error:
            if isinstance(error, redis.ReadOnlyError):
                connection.disconnect()
            else:
                self._free.append(connection)
            raise
        except BaseException:
            # The answer to this may still come, and must not be taken for the next one's.
            connection.disconnect()
            raise
        self._free.append(connection)
        return answer

    def _connection(self) -> _Connection:
        options = dict(self._address)
        made: _Connection = options.pop("connection_class", Connection)(**options)
        return made

    def _forget_those_of_the_parent(self) -> None:
        if self._pid != os.getpid():
            self._free = []
            self._pid = os.getpid()

    def _failed(self, error: Exception) -> StoreError:
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            self._address = self._first_address
        return StoreError(f"the store {self.shown!r} failed: {' '.join(str(error).split())}")


class _Connection(Protocol):
    def send_packed_command(self, command: Sequence[bytes], check_health: bool) -> None: ...

    def read_response(self) -> Any: ...

    def disconnect(self) -> None: ...


def _address(url: str, patience: float) -> dict[str, Any]:
    scheme, _, rest = url.partition("://")
    known = f"{REDIS_SCHEMES[scheme]}://{rest}"
    try:
        # What is no number here is a typing error, or the rest of a password that was not escaped.
        if scheme != "unix" and not re.fullmatch(r"/?[0-9]*", urlsplit(known).path):
            raise ValueError
        found: dict[str, Any] = parse_url(known)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigurationError(f"store: {without_password(url)!r} is not a Redis URL") from None
    waits = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": patience}
    return {**waits, **found, "protocol": 2, "decode_responses": False, "retry_on_timeout": False}


def _pack(words: Sequence[Word]) -> bytes:
    parts: list[int | bytes] = []
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
        parts += (len(data), data)
    return b"$%d\r\n%b\r\n" * len(words) % tuple(parts)
