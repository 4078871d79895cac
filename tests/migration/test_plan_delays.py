"""The plan names the tasks that are sent with long delays, what becomes of them, and what helps."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery import Celery, chain, chord, group
from celery import __version__ as celery_version
from dramatiq.broker import Broker
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from kombu import Exchange, Queue

from ojs_bridge import Bridge
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.dramatiq import install as install_on
from ojs_bridge.migration.plan.celery import plans as of_celery
from ojs_bridge.migration.plan.celery import sends as of_app
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from ojs_bridge.migration.plan.dramatiq import sends as of_broker

TASKS = ("delays.plain", "delays.unknown", "delays.first", "delays.second", "delays.short", "delays.beat")
ACTORS = ("enqueued", "joined", "sent", "brief")
HOUR = 3600
REDIS = {"broker_url": "redis://localhost:1/0"}
RABBITMQ = {"broker_url": "amqp://localhost:1//"}


class Settings:
    """The constants of a fleet."""

    DAY = 24 * HOUR


def body() -> None:
    """What all the tasks run."""


def app_of(conf: dict[str, Any]) -> Celery:
    """An app with all these tasks."""
    made = Celery("delays", set_as_current=False)
    made.conf.update(conf)
    for name in TASKS:
        made.task(name=name, shared=False)(body)

    @made.task(name="delays.again", bind=True, shared=False)
    def again(self: Any) -> None:
        self.apply_async(countdown=2 * HOUR)
        raise self.retry(countdown=5 * HOUR)

    made.conf.beat_schedule = {
        "nightly": {"task": "delays.beat", "schedule": 9, "options": {"countdown": 90}}
    }
    return made


app = app_of(REDIS)
plain, unknown, first, second, short, _ = (app.tasks[name] for name in TASKS)


def sends_tasks(task: Any, wait: int, cache: Any) -> None:
    """Nothing calls it: it is read."""
    delay = timedelta(hours=2)
    plain.apply_async(countdown=delay.total_seconds())
    plain.s().set(countdown=Settings.DAY).apply_async()
    app.send_task("delays.plain", countdown=100 - 10)
    unknown.apply_async(eta=datetime.now(timezone.utc) + delay)
    unknown.apply_async(countdown=wait)
    signatures = [first.s(), second.s()]
    chain(signatures).apply_async(countdown=70)
    (first.s() | second.s()).apply_async(countdown=80)
    group(signatures).apply_async(countdown=120)
    group([first.s() | second.s(), *signatures]).apply_async(countdown=130)
    chain(task.s(), second.s()).apply_async(countdown=140)
    chord(signatures, short.s()).apply_async(countdown=HOUR)
    short.apply_async(countdown=HOUR // 60, eta=None)
    short.apply_async(countdown=-HOUR)
    short.s().set(queue="other", countdown=HOUR / 60).delay()
    task.apply_async(countdown=HOUR)
    cache.set(countdown=HOUR)
    app.send_task("elsewhere", countdown=wait)


def sends_messages(broker: Broker, actors: Any, wait: int) -> None:
    """Nothing calls it: it is read."""
    sent.send_with_options(delay=timedelta(hours=1))
    sent.send_with_options(delay=wait)
    broker.enqueue(enqueued.message(), delay=120_000)
    dramatiq.pipeline([joined.message(), brief.message()]).run(delay=61_000)
    dramatiq.group([sent.message(), joined.message_with_options(delay=62_000)]).run(delay=63_000)
    brief.send_with_options(delay=60_000)
    actors[0].send_with_options(delay=wait)
    actors[0].run(delay=wait)


def messages(broker: Broker) -> list[dramatiq.Actor[Any, Any]]:
    """Declare all these actors on a broker."""
    return [dramatiq.actor(body, broker=broker, actor_name=name) for name in ACTORS]


enqueued, joined, sent, brief = messages(RedisBroker(url="redis://localhost:1/0"))


def delayed(planned: Any) -> dict[str, str]:
    """What a plan says about the delays of each task that has them."""
    return {x.name: h.text for x in planned for h in x.hazards if h.name == "delayed-sends"}


def here(sends: Any) -> list[tuple[tuple[str, ...], float]]:
    """The names and delays of the sends in this file, and in no code."""
    return [(x.names, x.delay) for x in sends if ".py" not in x.where or Path(__file__).name in x.where]


def test_the_sends_of_celery() -> None:
    """A delay of a minute, or one that is no number and not given, is none. A chain delays its first task."""
    assert sorted(here(of_app(app))) == sorted([
        *((("delays.plain",), x) for x in (2.0 * HOUR, 24.0 * HOUR, 90.0)),
        *((("delays.unknown",), math.inf) for _ in range(2)),
        *((("delays.first",), x) for x in (70.0, 80.0)),
        *((("delays.first", "delays.second"), x) for x in (120.0, 130.0)),
        *[((), HOUR), ((), HOUR), ((), 140.0), ((), math.inf)],
        *[(("delays.again",), 2.0 * HOUR), (("delays.beat",), 90.0)],
    ])  # fmt: skip


def test_the_sends_of_dramatiq() -> None:
    """A delay is in milliseconds, or a timedelta."""
    assert sorted(here(of_broker(sent.broker))) == sorted([
        *((("sent",), x) for x in (3600.0, math.inf)),
        *[(("enqueued",), 120.0), (("joined",), 61.0), (("sent", "joined"), 63.0), (("joined",), 62.0)],
        ((), math.inf),
    ])  # fmt: skip


#: the settings of an app -> what becomes of plain, which waits a day, and of first, which waits 2 min
TODAY: list[tuple[dict[str, Any], str, str]] = [
    (REDIS, "any number of others; that is longer than Redis keeps a message from other workers "
     "(visibility_timeout, 1 h): the job is delivered again and runs more than once; with a store",
     "others; with"),
    ({**REDIS, "broker_transport_options": {"visibility_timeout": 100}}, "(visibility_timeout, 1 min 40 s)",
     "(visibility_timeout, 1 min 40 s)"),
    ({**RABBITMQ, "worker_eta_task_limit": 5000}, "with at most 5,000 jobs (worker_eta_task_limit); that is "
     "longer than RabbitMQ's consumer_timeout, 30 min by default: before", "(worker_eta_task_limit); with"),
    ({"broker_url": "memory://"}, "a worker holds it in memory, with any number of others; with", "; with"),
]  # fmt: skip


@pytest.mark.parametrize(("conf", "long", "brief"), TODAY)
def test_what_becomes_of_a_delay_today(conf: dict[str, Any], long: str, brief: str) -> None:
    """The sentence names the longest place, and says what to do."""
    told = delayed(of_celery(app_of(conf)))
    assert told.keys() == {*TASKS, "delays.again"} - {"delays.short"}
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "countdown=Settings.DAY" in text)
    assert f"{Path(__file__).name}:{line} delays it by 1 d (one of 3 places): " in told["delays.plain"]
    assert "delays it by a time that is not known" in told["delays.unknown"]
    assert told["delays.beat"].startswith("beat_schedule['nightly'] delays it by 1 min 30 s: ")
    assert long in told["delays.plain"]
    assert brief in told["delays.first"]
    assert all("with a store and park_delays=True the bridge keeps it there" in x for x in told.values())


@pytest.mark.skipif(celery_version < "5.5", reason="RabbitMQ delays from Celery 5.5 on")
@pytest.mark.parametrize(("kind", "is_told"), [("topic", True), ("direct", False)])
def test_quorum_queues_delay_themselves(kind: str, *, is_told: bool) -> None:
    """A direct exchange keeps them from it."""
    queue = Queue("q", Exchange("q", kind), "q", queue_arguments={"x-queue-type": "quorum"})
    conf = {**RABBITMQ, "task_queues": [queue], "task_default_queue": "q"}
    told = delayed(of_celery(app_of(conf), ["delays.plain"]))["delays.plain"]
    assert ("the broker itself keeps it until then" in told) is is_told
    assert ("consumer_timeout" in told) is not is_told


@pytest.mark.parametrize(
    ("of_the_bridge", "of_the_app", "is_parked"),
    [(True, None, True), (True, False, False), (None, True, True), (None, None, False)],
)  # fmt: skip
def test_what_is_parked_already(
    of_the_bridge: bool | None, of_the_app: bool | None, tmp_path: Path, *, is_parked: bool
) -> None:
    """The plan then says that it waits in the store, and recommends nothing."""
    stored = f"sqlite:///{tmp_path}/ojs.db"
    moved = app_of(REDIS)
    install(moved, Bridge(stored, park_delays=of_the_bridge), park_delays=of_the_app)
    broker = RedisBroker(url="redis://localhost:1/0")
    messages(broker)
    install_on(broker, Bridge(stored, park_delays=of_the_bridge), park_delays=of_the_app)
    for told in (delayed(of_celery(moved)), delayed(of_dramatiq(broker))):
        assert told
        for text in told.values():
            assert ("it waits in the store, as park_delays says" in text) is is_parked
            assert ("with a store and park_delays=True" in text) is not is_parked


def test_a_task_that_says_so_itself() -> None:
    """Its attribute counts before its app has a bridge, too."""
    bare = Celery("delays", set_as_current=False, broker="memory://")
    ojs_task(bare, name="delays.plain", park_delays=True)(body)
    (text,) = delayed(of_celery(bare)).values()
    assert text.endswith(": it waits in the store, as park_delays says")


def test_a_bridge_with_another_park_after(tmp_path: Path) -> None:
    """What is shorter waits in the broker, and is not named."""
    moved = app_of(REDIS)
    install(moved, Bridge(f"sqlite:///{tmp_path}/ojs.db", park_after=timedelta(hours=3), retry={}))
    assert delayed(of_celery(moved)).keys() == {"delays.plain", "delays.unknown"}


def test_what_becomes_of_a_delay_of_dramatiq() -> None:
    """On RabbitMQ it is taken back from its worker after some time; everywhere it is in memory."""
    broker = RabbitmqBroker(url="amqp://localhost:1")
    messages(broker)
    told = [delayed(of_dramatiq(one)) for one in (sent.broker, broker)]
    assert [[*x] for x in told] == [["enqueued", "joined", "sent"]] * 2
    held = "a worker holds 1,000 such jobs for each of its threads; with a store and park_delays=True"
    assert all(held in text for texts in told for text in texts.values())
    assert "if it is long, it is all the time in a worker's memory, where it is delayed" in told[0]["sent"]
    assert "RabbitMQ takes it back after its consumer_timeout" in told[1]["sent"]
    assert "consumer_timeout" not in told[1]["enqueued"]
