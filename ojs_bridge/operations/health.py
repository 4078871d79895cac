"""The health of a fleet for probes: store, broker, workers, backlog, waiting jobs that are overdue.

Each question has a deadline: a store or a broker that keeps silent is an answer, too.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from ..engine import holds
from ..engine.context import Context
from ..engine.runs import Backlog
from ..errors import StoreError
from ..rules.facts import Status
from ..rules.job import format_time
from ..store import EVERYTHING, Document, Documents, Filter, Store, readable
from .letters import every_page
from .rates import in_broker
from .waiting import word_of

T = TypeVar("T")

#: The kind of the documents by which workers tell that they live, how often they write, after what time they
#: begin a new one, and for how long the store keeps these: so long the dead are missed.
KIND = "worker"
BEAT, RENEWED, KEPT = timedelta(seconds=30), timedelta(hours=6), timedelta(days=1)
#: A worker was seen lately if it wrote within this time. A job that is due for longer is overdue.
LATELY, OVERDUE = timedelta(seconds=90), timedelta(seconds=60)
#: The seconds that a probe waits by default.
SECONDS = 3.0
_PAGE = 1000
#: The questions by name, and what knows the answer.
_KNOWS = dict.fromkeys(("store", "broker", "workers", "backlog", "waiting", "holds"), "store")
_KNOWS |= dict.fromkeys(("broker", "backlog"), "broker")


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
    """The answers by name: `store`, `broker`, `workers`, `backlog`, `waiting`, `holds`."""

    checks: Mapping[str, Check]

    @property
    def status(self) -> Status:
        """`away` if store or broker are out of reach, `degraded` if something else is wrong, else `ok`."""
        statuses = {check.status for check in self.checks.values()}
        return "away" if "away" in statuses else "degraded" if "degraded" in statuses else "ok"

    def to_ojs(self) -> dict[str, Any]:
        """Return the answers in JSON."""
        checks = {name: check.to_ojs() for name, check in self.checks.items()}
        # The specification's words (EXT-OBS-002).
        backend = {"status": "disconnected" if self.status == "away" else "connected"}
        return {"status": self.status, "backend": backend, "checks": checks}


class Question(Generic[T]):
    """A question that a thread asks, and its answer, or its error, when that has come."""

    def __init__(self, name: str, ask: Callable[[], T]) -> None:
        self.answer: T | None = None
        self.error: Exception | None = None
        self.asked = self.answered = time.monotonic()
        self._ask = ask
        self.thread = threading.Thread(target=self._run, name=f"ojs-health-{name}", daemon=True)

    def _run(self) -> None:
        try:
            self.answer = self._ask()
            self.answered = time.monotonic()
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no answer
            self.error = error


class Probe:
    """Asks for the health of a bridge's fleet; never raises."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._asking: dict[str, Question[Mapping[str, Check]]] = {}
        #: The last ones that were answered, be it late.
        self._told: dict[str, Question[Mapping[str, Check]]] = {}
        self._away: dict[str, datetime] = {}
        #: The workers as the store knew them last.
        self._workers: Sequence[Worker] = ()
        self._lock = threading.Lock()

    def check(self, seconds: float = SECONDS, silent: float = 0.0, more: float | None = None) -> Health:
        """Ask the store and the brokers at the same time, and wait so many seconds at most.

        When the store has answered, the brokers have so many `more` at most. What has not answered then is
        away, or late if it was asked less than `silent` seconds ago. Of a broker that is late the depths of
        the queues are those that it told last, with their `age` in seconds.
        """
        until = time.monotonic() + seconds
        store = self._ask("store", self._of_store)

        def of_brokers() -> Mapping[str, Check]:
            # The store names the queues of the workers. It may be silent, and the broker may not.
            store.thread.join(seconds / 3)
            return self._of_brokers()

        asked = {"store": store, "broker": self._ask("broker", of_brokers)}
        checks: dict[str, Check] = {}
        for name, question in asked.items():
            question.thread.join(max(0.0, until - time.monotonic()))
            is_late = question.thread.is_alive() and time.monotonic() - question.asked <= silent
            status: Status = "degraded" if is_late else "away"
            if is_late and name in self._told:
                checks |= _aged(self._told[name])
            checks |= question.answer or {name: Check(status, _why(question.error, seconds))}
            until = min(until, time.monotonic() + (seconds if more is None else more))
        unasked = {name: Check("unknown", f"only the {knows} knows") for name, knows in _KNOWS.items()}
        return Health({name: self._since(name, check) for name, check in {**unasked, **checks}.items()})

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers of the last day, as the store knew them when it was asked last."""
        return self._workers

    def _since(self, name: str, check: Check) -> Check:
        """Return an answer with the time since when this process has met only `away`."""
        if check.status != "away":
            self._away.pop(name, None)
            return check
        since = self._away.setdefault(name, self._context.clock())
        return replace(check, facts={**check.facts, "away_since": format_time(since)})

    def _ask(self, name: str, ask: Callable[[], Mapping[str, Check]]) -> Question[Mapping[str, Check]]:
        """Ask in a thread, or wait for the last question's answer: threads without one must not pile up."""
        with self._lock:
            question = self._asking.get(name)
            if question is not None and question.answer is not None:
                # It may have come since somebody waited for it.
                self._told[name] = question
            if question is None or not question.thread.is_alive():
                question = self._asking[name] = Question(name, ask)
                question.thread.start()
            return question

    def _of_store(self) -> Mapping[str, Check]:
        store, now = self._context.store, self._context.clock()
        if store is None:
            return {"store": Check("unknown", "there is no store")}
        # A store of a newer version raises its own words.
        version = store.schema()
        schema = "empty" if version is None else f"schema {version}"
        self._workers = workers_in(store.documents)
        return {
            "workers": Workers(self._workers, now).check(),
            "waiting": _waiting(store, now),
            "holds": _holds(store, now),
            "store": Check("ok", schema, {"schema": version}),
        }

    def _of_brokers(self) -> Mapping[str, Check]:
        publishers = {**self._context.publishers}
        if not publishers:
            unasked = Check("unknown", "this process has no app")
            return {"broker": unasked, "backlog": unasked}
        workers = Workers(self._workers, self._context.clock())
        backlogs, wrong = dict[str, Sequence[Backlog] | None](), dict[str, str]()
        for framework, publisher in publishers.items():
            try:
                backlogs[framework] = publisher.backlog(workers.queues_of(framework))
            except Exception as error:  # noqa: BLE001 - whatever it is, this broker gives no answer
                wrong[framework] = str(error) or repr(error)
        frameworks = {
            name: "away" if name in wrong else "unknown" if backlogs[name] is None else "ok"
            for name in publishers
        }
        texts = (
            [f"{name}: {why}" for name, why in wrong.items()] if len(publishers) > 1 else [*wrong.values()]
        )
        status: Status = "away" if wrong else "unknown" if "unknown" in frameworks.values() else "ok"
        message = "; ".join(texts) or ", ".join(publishers)
        backlog = {name: queues for name, queues in backlogs.items() if queues is not None}
        return {
            "broker": Check(status, message, {"frameworks": frameworks}),
            "backlog": _backlog(backlog, workers),
        }


def _aged(question: Question[Mapping[str, Check]]) -> Mapping[str, Check]:
    """Return what was answered some time ago, with its age."""
    age = time.monotonic() - question.answered
    return {
        name: replace(check, facts={**check.facts, "age": age})
        for name, check in (question.answer or {}).items()
    }


def _why(error: Exception | None, seconds: float) -> str:
    return str(error) or repr(error) if error else f"no answer within {seconds:g} s"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process as it wrote of itself last; `began_at` is when it wrote first, in the last day."""

    name: str
    seen_at: datetime
    host: str
    framework: str
    queues: tuple[str, ...]
    ended: bool
    began_at: datetime


_WORKER = TypeAdapter(Worker)


def _worker_of(document: Document) -> Worker:
    return _WORKER.validate_python({**document.body, "began_at": document.at})


def workers_in(documents: Documents) -> Sequence[Worker]:
    """Return the worker processes of the last day; raises StoreError."""
    newest: dict[str, Worker] = {}
    for page in every_page(lambda cursor: documents.list(KIND, limit=_PAGE, cursor=cursor)):
        for worker in readable(page.documents, _worker_of):
            known = newest.setdefault(worker.name, worker)
            last = max(known, worker, key=lambda one: one.seen_at)
            newest[worker.name] = replace(last, began_at=min(known.began_at, worker.began_at))
    return [*newest.values()]


class Workers:
    """Which worker processes live, and what is served no more since others died.

    A worker that has ended by itself is not missed, and neither is one that others replace.
    """

    def __init__(self, workers: Sequence[Worker], now: datetime) -> None:
        # A worker whose clock is ahead would be seen long after its death.
        self.living = [w for w in workers if not w.ended and now - LATELY < w.seen_at <= now + LATELY]
        self._dead = [w for w in workers if not w.ended and w.seen_at <= now - LATELY]

    def queues_of(self, framework: str) -> set[str]:
        """Return the queues of a framework that workers take, or took before they died."""
        return {q for w in (*self.living, *self._dead) if w.framework == framework for q in w.queues}

    def counts(self, place: Callable[[Worker], Iterable[str]]) -> dict[tuple[str, str], int]:
        """Count the living by framework and place; a place with dead ones alone has zero."""
        counts = Counter[tuple[str, str]]()
        for workers, count in ((self.living, 1), (self._dead, 0)):
            for worker in workers:
                for name in place(worker):
                    counts[worker.framework, name] += count
        return dict(sorted(counts.items()))

    def silent(self) -> Iterator[Worker]:
        """Yield the dead in whose place no other one has begun since, to take the same queues."""
        free = sorted(self.living, key=lambda one: one.began_at)
        for dead in sorted(self._dead, key=lambda one: one.seen_at):
            for other in free:
                is_later = other.began_at > dead.seen_at and other.framework == dead.framework
                if is_later and {*dead.queues} <= {*other.queues}:
                    free.remove(other)
                    break
            else:
                yield dead

    def missed(self) -> Iterator[str]:
        """Yield what no worker serves any more, and since when."""
        alive = {worker.framework for worker in self.living}
        for framework in sorted({worker.framework for worker in self._dead} - alive):
            yield f"{framework}: none since {self._last(framework)}"
        for (framework, queue), count in self.counts(lambda worker: worker.queues).items():
            if not count and framework in alive:
                yield f"{framework}, queue {queue}: none since {self._last(framework, queue)}"

    def _last(self, framework: str, queue: str | None = None) -> str:
        dead = (w for w in self._dead if w.framework == framework and (queue is None or queue in w.queues))
        return format_time(max(worker.seen_at for worker in dead))

    def check(self) -> Check:
        """Return the answer about the workers."""
        frameworks = Counter(worker.framework for worker in self.living)
        frameworks.update({worker.framework: 0 for worker in self._dead})
        last = max((worker.seen_at for worker in self.living), default=None)
        facts = {
            "seen": len(self.living),
            "last_seen_at": format_time(last) if last else None,
            "frameworks": dict(sorted(frameworks.items())),
            "hosts": _rows("host", self.counts(lambda worker: [worker.host])),
            "queues": _rows("queue", self.counts(lambda worker: worker.queues)),
        }
        each = ", ".join(f"{name} {count}" for name, count in sorted(frameworks.items()))
        parts = [f"{len(self.living) or 'none'} in the last {LATELY.total_seconds():g} s"]
        parts += [each] * bool(each) + [*self.missed()]
        is_well = bool(self.living) and len(parts) == 1 + bool(each)
        return Check("ok" if is_well else "degraded", "; ".join(parts), facts)


def _rows(name: str, counts: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    return [{"framework": framework, name: place, "seen": n} for (framework, place), n in counts.items()]


def _backlog(backlogs: Mapping[str, Sequence[Backlog]], workers: Workers) -> Check:
    """Return the answer about what waits in the brokers; a queue that nobody takes is not well."""
    served = {(w.framework, queue) for w in workers.living for queue in w.queues}
    rows = [(framework, each) for framework, queues in backlogs.items() for each in queues]
    unserved = [
        f"{framework}, queue {each.queue}: {each.depth} wait, and no worker takes them"
        for framework, each in rows
        if each.depth and workers.living and (framework, each.queue) not in served
    ]
    facts = {
        "depth": sum(each.depth for _, each in rows),
        "queues": [
            {"framework": name, **asdict(each), "oldest_at": each.oldest_at and format_time(each.oldest_at)}
            for name, each in rows
        ],
    }
    if not backlogs:
        return Check("unknown", "no broker was asked")
    return Check("degraded" if unserved else "ok", "; ".join([f"{facts['depth']} wait", *unserved]), facts)


def _waiting(store: Store, now: datetime) -> Check:
    """Return the answer about what waits until it is due, in the store and in the broker."""
    first, short = store.parked.list(EVERYTHING, limit=1, cursor=None).jobs, in_broker(store.documents, now)
    due = first[0].next_retry_at if first else None
    facts = {"oldest_due_at": due and format_time(due), "in_broker": short.to_ojs()}
    if due and now - due > OVERDUE:
        late = f"the oldest {word_of(first[0])} is {(now - due).total_seconds():.0f} s overdue"
        return Check("degraded", late, facts)
    words = "retry waits" if short.count == 1 else "retries wait"
    waits = f"; {short.count:,} {words} in the broker" if short.count else ""
    return Check("ok", f"none is {'overdue' if due else 'parked'}{waits}", facts)


def _holds(store: Store, now: datetime) -> Check:
    """Return the answer about what holds jobs; a hold that may be forgotten is a note."""
    known = holds.read(store.documents)
    on = [hold for hold in known if hold.is_on(now)]
    breakers = [hold for hold in known if hold.id == f"breaker:{hold.dependency}"]
    held = store.parked.count(Filter(kind="held"))
    note = "; ".join(f"{hold.of}: {text}" for hold in on if (text := hold.still_on(now)))
    told = f"{len(on)} on, {held:,} held" if on else "none is on"
    facts = {"on": len(on), "held": held, "note": note}
    facts["breakers"] = {hold.dependency: "open" if hold in on else "closed" for hold in breakers}
    return Check("ok", "; ".join(filter(None, (told, note))), facts)


class Beat:
    """Writes in the store that this worker lives; a store that is away does not hear of it."""

    def __init__(self, context: Context, framework: str, queues: Callable[[], Iterable[str]] = tuple) -> None:
        self._context, self._framework, self._queues = context, framework, queues
        self._written: Document | None = None

    def tell(self, *, ended: bool = False) -> None:
        """Write that this process lives, or that it has ended by itself; never raises StoreError."""
        now, host = self._context.clock(), socket.gethostname()
        body = {
            "name": f"{host}:{os.getpid()}",
            "host": host,
            "framework": self._framework,
            "queues": sorted(self._queues()),
            "seen_at": format_time(now),
            "ended": ended,
        }
        if self._written is not None and now - self._written.at < RENEWED:
            document = replace(self._written, body=body, revision=self._written.revision + 1)
        else:
            document = Document(KIND, f"{body['name']}:{secrets.token_hex(4)}", now, body)
        with suppress(StoreError):
            is_written = self._context.store is not None and self._context.store.documents.write(document)
            self._written = document if is_written else None

    def end(self) -> None:
        """Write that this process has ended by itself, so that nobody misses it."""
        if self._written is not None:
            self.tell(ended=True)
