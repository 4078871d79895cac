"""Measures an operator's waits: `python -m benchmarks.operator [letters in PostgreSQL] [in Valkey]`.

A filtered first page, one letter, the counts, the groups, and how fast a bulk replay moves to a real broker.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from itertools import islice

import dramatiq
from celery import Celery
from dramatiq.brokers.redis import RedisBroker

from ojs_bridge import Bridge, Letter
from ojs_bridge.celery import install as install_celery
from ojs_bridge.dramatiq import install as install_dramatiq
from tests.servers import Postgres, Valkey

NOW = datetime.now(timezone.utc)
#: The number of letters that are replayed.
REPLAYED = 5000
#: The number of letters that one statement writes.
LOT = 2000


def main() -> None:
    """Fill each store, measure it, and print both tables."""
    sizes = [int(size) for size in sys.argv[1:]] or [1_000_000, 100_000]
    with Postgres() as postgres, Valkey(appendonly="no") as valkey:
        print("| milliseconds, median of 9 | first page, filtered | a rare error type | get | stats ", end="")
        print("| goal | groups | groups, filtered | goal |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        database = f"{valkey.url.removesuffix('/0')}/1"
        for name, url, size in (("PostgreSQL", postgres.url, sizes[0]), ("Valkey", database, sizes[-1])):
            _fill(url, size)
            _waits(name, url, size)
        print("\n| jobs a second, bulk replay | from PostgreSQL | from Valkey | goal |\n|---|---:|---:|---:|")
        for framework in ("celery", "dramatiq"):
            rates = [_replays(framework, url, valkey.url) for url in (postgres.url, database)]
            cells = " | ".join(f"{rate:,.0f}" for rate in rates)
            print(f"| {framework} on Valkey | {cells} | ≥ 1,000 |", flush=True)
        print(f"\nCelery's own `apply_async` sends {_sent_by_celery(valkey.url):,.0f} a second.")


def _letters(count: int) -> Iterator[Letter]:
    for n in range(count):
        type_ = f"billing.charge{n % 40}" if n % 3 else f"mail.send{n % 25}"
        error = "auth.rare" if n % 9973 == 0 else f"external.error{n % 30}"
        errors = tuple(
            {"attempt": k, "type": error, "message": f"job {n} failed: status 503 of shop {n % 977}",
             "code": "RETRY", "timestamp": "2026-11-21T10:00:00.000Z", "details": {},
             "backtrace": ["shop/tasks.py:17 in charge", "shop/api.py:40 in post"] * 2}
            for k in (1, 2, 3)
        )  # fmt: skip
        yield _letter(
            f"job-{n}", type_, f"queue{n % 5}", "outbox", {"args": [n, "EUR"], "kwargs": {}}, n, errors
        )


def _letter(
    letter_id: str,
    type_: str,
    queue: str,
    framework: str,
    message: dict[str, object],
    n: int,
    errors: tuple = (),
) -> Letter:
    return Letter(
        id=letter_id, type=type_, queue=queue, framework=framework, attempt=3, max_attempts=3,
        cause="exhausted", reason="attempt 3 of 3 failed, and no attempt is left",
        discarded_at=NOW - timedelta(seconds=n), message=message, errors=errors, key=letter_id, fence=3,
    )  # fmt: skip


def _fill(url: str, count: int) -> None:
    """Write letters the quick way: as rows on PostgreSQL, one by one on Valkey."""
    bridge = Bridge(url)
    assert bridge.store is not None
    bridge.store.prepare()
    if not url.startswith("postgresql"):
        for letter in _letters(count):
            bridge.store.letters.bury(letter)
        return
    import sqlalchemy as sa

    from ojs_bridge.store.records import group_number, to_json, to_ms
    from ojs_bridge.store.sql.tables import letters as table

    engine, letters = sa.create_engine(url), _letters(count)
    while lot := list(islice(letters, LOT)):
        rows = [
            {
                "namespace": "ojs", "id": one.id, "type": one.type, "queue": one.queue,
                "error_type": one.error_type, "discarded_ms": to_ms(one.discarded_at), "claimed_until": 0,
                "record": to_json(one), "fault": group_number(one.group),
            }
            for one in lot
        ]  # fmt: skip
        with engine.begin() as connection:
            connection.execute(sa.insert(table), rows)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text(f"VACUUM ANALYZE {table.name}"))


def _waits(name: str, url: str, size: int) -> None:
    letters = Bridge(url).dead_letters
    waits = [
        _median(lambda: letters.list(type="billing.*", queue="queue3")),
        _median(lambda: letters.list(error_type="auth.*")),
        _median(lambda: letters.get("job-77")),
        _median(letters.stats),
    ]
    groups = letters.groups.list
    grouped = [_median(groups), _median(lambda: groups(error_type="external.error7"))]
    cells = [" | ".join(f"{ms:.1f}" for ms in each) for each in (waits, grouped)]
    print(f"| {name}, {size:,} | {cells[0]} | < 100 | {cells[1]} | < 500 |", flush=True)


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1000)
    return sorted(times)[4]


def _replays(framework: str, store: str, broker: str) -> float:
    """Return how many letters a second go back to a queue."""
    bridge = Bridge(store)
    messages = _messages(framework, bridge, broker)
    assert bridge.store is not None
    for n, message in enumerate(messages):
        bridge.store.letters.bury(
            _letter(f"{framework}-{n}", "work", "work", framework, dict(message), 10_000_000 + n)
        )
    begun = time.perf_counter()
    done = bridge.dead_letters.replay_all(type="work", confirm=True)
    assert done.succeeded == REPLAYED, done
    return REPLAYED / (time.perf_counter() - begun)


def _sent_by_celery(url: str) -> float:
    """Return how many jobs a second Celery alone sends."""
    app = Celery("native", broker=url)
    work = app.signature("work", (1,))
    begun = time.perf_counter()
    for _ in range(REPLAYED):
        work.apply_async()
    return REPLAYED / (time.perf_counter() - begun)


def _messages(framework: str, bridge: Bridge, url: str) -> Sequence[dict[str, object]]:
    if framework == "celery":
        app = Celery("bench", broker=url)

        @app.task(name="work")
        def work(n: int) -> None: ...

        install_celery(app, bridge)
        body = {
            "body": '[[1], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
            "body_encoding": "utf-8", "content_type": "application/json", "content_encoding": "utf-8",
            "properties": {}, "exchange": "", "routing_key": "work", "queue": "work",
        }  # fmt: skip
        return [{**body, "headers": {"id": f"celery-{n}", "task": "work"}} for n in range(REPLAYED)]
    broker_ = RedisBroker(url=url)
    install_dramatiq(broker_, bridge)

    @dramatiq.actor(broker=broker_, actor_name="work", queue_name="work")
    def act(n: int) -> None: ...

    return [{"encoded": act.message(n).encode().decode(), "encoding": "utf-8"} for n in range(REPLAYED)]


main()
