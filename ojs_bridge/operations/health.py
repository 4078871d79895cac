"""The health of a fleet for probes: store, broker, workers seen lately, parked retries that are overdue.

Each question has a deadline: a store or a broker that keeps silent is an answer, too.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

from ..engine.context import Context
from ..errors import StoreError
from ..spec.job import format_time
from ..store import Document, ParkedFilter, Store

Status: TypeAlias = Literal["ok", "unknown", "degraded", "away"]

#: The kind of the documents by which workers tell that they live, how often they write, and for how long the
#: store keeps these.
KIND = "worker"
BEAT, KEPT = timedelta(seconds=30), timedelta(minutes=5)
#: A worker was seen lately if it wrote within this time. A retry that is due for longer is overdue.
LATELY, OVERDUE = timedelta(seconds=90), timedelta(seconds=60)
#: The seconds that a probe waits, unless told otherwise.
SECONDS = 3.0
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one question; `unknown` is what this process cannot ask."""

    status: Status
    message: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_ojs(self) -> dict[str, Any]:
        """Return the answer in JSON."""
        return {"status": self.status, "message": self.message, **self.facts}


@dataclass(frozen=True, slots=True)
class Health:
    """The answers by name: `store`, `broker`, `workers`, `retries`."""

    checks: Mapping[str, Check]

    @property
    def status(self) -> Status:
        """`away` if store or broker are out of reach, `degraded` if something else is wrong, else `ok`."""
        found = {check.status for check in self.checks.values()}
        return "away" if "away" in found else "degraded" if "degraded" in found else "ok"

    def to_ojs(self) -> dict[str, Any]:
        """Return the answers in JSON."""
        checks = {name: check.to_ojs() for name, check in self.checks.items()}
        return {"status": self.status, "checks": checks}


class _Question:
    """A question, and its answers when they have come."""

    def __init__(self, name: str, ask: Callable[[], Mapping[str, Check]]) -> None:
        self.answers: Mapping[str, Check] = {}
        self._name, self._ask = name, ask
        self.thread = threading.Thread(target=self._run, name=f"ojs-health-{name}", daemon=True)

    def _run(self) -> None:
        try:
            self.answers = self._ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no answer
            self.answers = {self._name: Check("away", str(error) or repr(error))}


class Probe:
    """Asks for the health of a bridge's fleet; never raises."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._asking: dict[str, _Question] = {}
        self._lock = threading.Lock()

    def check(self, seconds: float = SECONDS) -> Health:
        """Ask the store and the brokers at the same time, and wait so many seconds at most."""
        until = time.monotonic() + seconds
        asked = {"store": self._ask("store", self._of_store), "broker": self._ask("broker", self._of_brokers)}
        found: dict[str, Check] = {}
        for name, question in asked.items():
            question.thread.join(max(0.0, until - time.monotonic()))
            found |= question.answers or {name: Check("away", f"no answer within {seconds:g} s")}
        unasked = Check("unknown", "only the store knows")
        return Health({name: found.get(name, unasked) for name in ("store", "broker", "workers", "retries")})

    def _ask(self, name: str, ask: Callable[[], Mapping[str, Check]]) -> _Question:
        """Ask in a thread, or wait for the last question's answer: threads without one must not pile up."""
        with self._lock:
            question = self._asking.get(name)
            if question is None or not question.thread.is_alive():
                question = self._asking[name] = _Question(name, ask)
                question.thread.start()
            return question

    def _of_store(self) -> Mapping[str, Check]:
        store, now = self._context.store, self._context.clock()
        if store is None:
            return {"store": Check("unknown", "there is no store")}
        # A store of a newer version raises its own words.
        version = store.schema()
        told = "empty" if version is None else f"schema {version}"
        return {
            "workers": _workers(store, now),
            "retries": _retries(store, now),
            "store": Check("ok", told, {"schema": version}),
        }

    def _of_brokers(self) -> Mapping[str, Check]:
        publishers = self._context.publishers
        if not publishers:
            return {"broker": Check("unknown", "this process has no app")}
        answered = [publisher.ping() for publisher in [*publishers.values()]]
        return {"broker": Check("ok" if all(answered) else "unknown", ", ".join(publishers))}


def _workers(store: Store, now: datetime) -> Check:
    seen: dict[str, datetime] = {}
    cursor = None
    while True:
        page = store.list_documents(KIND, limit=_PAGE, cursor=cursor)
        young = [one for one in page.documents if one.at > now - LATELY]
        for one in young:
            # A worker whose clock is ahead would be seen long after its death.
            if one.at <= now + LATELY:
                seen.setdefault(str(one.body["name"]), one.at)
        cursor = page.next_cursor
        if cursor is None or len(young) < len(page.documents):
            break
    facts = {"seen": len(seen), "last_seen_at": format_time(max(seen.values())) if seen else None}
    if seen:
        return Check("ok", f"{len(seen)} in the last {LATELY.total_seconds():g} s", facts)
    return Check("degraded", f"none in the last {LATELY.total_seconds():g} s", facts)


def _retries(store: Store, now: datetime) -> Check:
    first = store.list_parked(ParkedFilter(), limit=1, cursor=None).retries
    if not first:
        return Check("ok", "none is parked", {"oldest_due_at": None})
    due = first[0].next_retry_at
    facts = {"oldest_due_at": format_time(due)}
    if now - due > OVERDUE:
        return Check("degraded", f"the oldest is {(now - due).total_seconds():.0f} s overdue", facts)
    return Check("ok", "none is overdue", facts)


class Beat:
    """Writes in the store that this worker lives; a store that is away does not hear of it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def tell(self) -> None:
        """Write that this process lives; never raises StoreError."""
        now, name = self._context.clock(), f"{socket.gethostname()}:{os.getpid()}"
        document = Document(KIND, f"{name}:{secrets.token_hex(4)}", now, {"name": name})
        if self._context.store is not None:
            with suppress(StoreError):
                self._context.store.write_document(document)
