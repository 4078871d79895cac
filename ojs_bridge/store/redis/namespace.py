"""The keys of one namespace of a Redis, and their version."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...errors import StoreError
from ..records import index_id
from ..reservations import Reservation
from .server import RedisServer, Script, Word, lua

SCHEMA_VERSION = 1

logger = logging.getLogger("ojs_bridge")


class RedisNamespace(RedisServer):
    """A namespace on a server. All its keys are in one slot of a cluster."""

    def __init__(self, url: str, namespace: str, patience: float) -> None:
        super().__init__(url, patience)
        self._prefix = f"ojs:{{{_without_braces(namespace)}}}:".encode()
        # Workers of earlier releases use the same name, and may run beside this one.
        self._reservations = self.key("turn:")
        self._prepared = False
        self._scripts: dict[str, Script] = {}

    def run_id(self) -> str | None:
        """Return the unique id of this server; None where INFO is not allowed."""
        try:
            answer: bytes = self.ask("INFO", "server")
        except StoreError:
            return None
        lines = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
        return lines.get("run_id")

    def schema(self) -> int:
        """Write the version unless there is one, and return it; raises StoreError for a newer version."""
        found: int = super().run(Script(lua("version")), (self.key("schema"),), (SCHEMA_VERSION,))
        if found > SCHEMA_VERSION:
            raise StoreError(
                f"the store has schema {found}, this ojs-bridge reads {SCHEMA_VERSION}: update it"
            )
        return found

    def prepare(self) -> None:
        """Write the version; warn of settings with which the server loses data.

        Raises StoreError for a newer version.
        """
        self.schema()
        if not self._prepared:
            self._prepared = True
            self._warn()

    def run(self, script: str | Script, keys: Sequence[bytes], words: Sequence[Word] = ()) -> Any:
        """Return the answer of a script, given as itself or by its file's name; raises StoreError."""
        if not self._prepared:
            self.prepare()
        if isinstance(script, str):
            known = self._scripts.get(script)
            script = known or self._scripts.setdefault(script, Script(lua(script)))
        return super().run(script, keys, words)

    def ask(self, *words: Word) -> Any:
        """Return the answer to a command; raises StoreError."""
        if not self._prepared:
            self.prepare()
        return super().ask(*words)

    def key(self, name: str) -> bytes:
        """Return a key of the namespace."""
        return self._prefix + name.encode()

    def keys(self, *names: str) -> list[bytes]:
        """Return keys of the namespace."""
        return [*map(self.key, names)]

    def reservation_key(self, reservation: Reservation) -> bytes:
        """Return the key of a reservation's record."""
        return self._reservations + index_id(reservation.key).encode()

    def _warn(self) -> None:
        policy = self._setting("maxmemory-policy")
        if policy not in (None, "noeviction") and self._setting("maxmemory") not in (None, "0"):
            advice = "set maxmemory-policy noeviction, not"
            logger.warning("the store %r may evict what it keeps: %s %s", self.shown, advice, policy)
        if self._setting("appendonly") == "no" and self._setting("save") == "":
            logger.warning("the store %r keeps nothing over a restart: set appendonly yes", self.shown)

    def _setting(self, name: str) -> str | None:
        """Return a setting of the server; None where CONFIG is not allowed."""
        try:
            answer: list[bytes] = super().ask("CONFIG", "GET", name)
        except StoreError:
            return None
        return answer[1].decode() if len(answer) > 1 else None


def _without_braces(namespace: str) -> str:
    """Return a namespace that cannot end its hash tag."""
    return namespace.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
