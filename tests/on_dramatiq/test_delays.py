"""Delays as Dramatiq has them: pipelines, groups, ids that are sent twice, and what cannot be kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name
from dramatiq.middleware import CurrentMessage, Middleware
from dramatiq.rate_limits.backends import StubBackend as Limits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy, StorageRetry, StoreError, Unstorable
from ojs_bridge.dramatiq import install
from ojs_bridge.dramatiq.translate import restored
from ojs_bridge.engine.instruments import Instrument
from ojs_bridge.store import Parked
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet, Sent, broker_of, left_in
from tests.servers import eventually

HOUR = 3_600_000
KINDS = ("redis", "rabbitmq")


class Hears(Middleware):
    """Keeps what it hears of the messages that are enqueued."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, int | None]] = []

    def before_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        """Leave a word in the message."""
        self.heard.append(("before", message.queue_name, delay))
        message.options["tenant"] = "gold"

    def after_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        """Hear that it was sent."""
        self.heard.append(("after", message.queue_name, delay))


@pytest.fixture(params=KINDS)
def delaying(request: pytest.FixtureRequest, unique: str, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet whose delays beyond a second wait in the store."""
    broker = broker_of(request.param, url_of(request, request.param), unique)
    fleet = Fleet(
        broker,
        unique,
        store=f"sqlite:///{tmp_path}/ojs.db",
        park_after=timedelta(seconds=1),
        park_delays=True,
        storage_retry=StorageRetry.disabled(),
    )
    yield fleet
    broker.close()


def waiting(fleet: Fleet) -> list[Parked]:
    """The jobs that wait in the store because their users have delayed them."""
    return list(fleet.bridge.scheduled.list().jobs)


def is_on_broker(fleet: Fleet) -> bool:
    """Whether a message went to the broker; on RabbitMQ no queue is declared before the first one goes."""
    fleet.broker.declare_queue(fleet.queue)
    if isinstance(fleet.broker, dramatiq.brokers.rabbitmq.RabbitmqBroker):
        fleet.broker.declare_queue(fleet.queue, ensure=True)
    return bool(left_in(fleet.broker, dq_name(fleet.queue)) or left_in(fleet.broker, fleet.queue))


def test_a_delayed_job_is_sent_to_the_store_as_the_broker_would_take_it(delaying: Fleet) -> None:
    hears = Hears()
    delaying.broker.add_middleware(hears)
    actor = delaying.actor(lambda n: "done")
    before = int(time.time() * 1000)
    sent = actor.send_with_options(
        args=("key",), delay=timedelta(hours=1), ojs_retry={"max_attempts": 2}, broker_priority=3
    )
    assert sent.queue_name == dq_name(delaying.queue)
    assert before + HOUR <= sent.options["eta"] <= int(time.time() * 1000) + HOUR + 1
    assert hears.heard == [(when, dq_name(delaying.queue), HOUR) for when in ("before", "after")]
    (parked,) = waiting(delaying)
    assert (parked.id, parked.key, parked.queue) == (sent.message_id, sent.message_id, delaying.queue)
    assert (parked.attempt, parked.max_attempts, parked.kind) == (1, 2, "scheduled")
    assert parked.next_retry_at.timestamp() * 1000 == pytest.approx(sent.options["eta"], abs=1)
    assert parked.reading.args == ["key"]
    assert parked.reading.meta["broker_priority"] == 3
    assert parked.reading.meta["tenant"] == "gold"
    assert restored(parked.message).message_timestamp == sent.message_timestamp
    assert not is_on_broker(delaying)


def test_a_delayed_job_runs_when_it_is_due_and_its_retries_follow(delaying: Fleet) -> None:
    def fails_once(n: int) -> None:
        if n == 1:
            raise OSError("down")

    actor, at = delaying.actor(fails_once), time.time()
    with delaying.working():
        job = delaying.send(actor, delay=2000, ojs_retry={"max_attempts": 2})
        assert delaying.end(job).type == "job.completed"
    first, second = job.runs
    assert at + 2 <= first.at <= at + 8
    assert (first.ojs["attempt"], second.ojs["attempt"]) == (1, 2)
    assert waiting(delaying) == []
    assert delaying.left() == 0


def test_an_instrument_hears_of_the_send_once_and_the_message_keeps_its_word(delaying: Fleet) -> None:
    class Sends(Instrument):
        @contextmanager
        def sending(
            self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]
        ) -> Iterator[None]:
            carrier["traceparent"] = "00-1-2-01"
            heard.append("begins")
            yield
            heard.append("ends")

    heard: list[str] = []
    delaying.bridge.engine.instrument(Sends())
    actor = delaying.actor(lambda n: None)
    actor.send_with_options(args=("key",), delay=HOUR)
    assert heard == ["begins", "ends"]
    assert waiting(delaying)[0].reading.meta["traceparent"] == "00-1-2-01"


def test_a_job_that_grows_too_old_as_it_waits_does_not_run(delaying: Fleet) -> None:
    """As natively: its age counts from the send."""
    with delaying.working():
        job = delaying.send(delaying.actor(lambda n: None), delay=1500, max_age=500)
        assert len(waiting(delaying)) == 1
        # Its dead queue is declared when it is published.
        eventually(lambda: waiting(delaying) == [])
        eventually(lambda: delaying.dead(job))
    assert job.runs == []


def test_two_jobs_under_one_id_are_two_jobs(delaying: Fleet) -> None:
    actor = delaying.actor(lambda n: None)
    message = actor.message("key")
    delaying.broker.enqueue(message)
    for _ in range(2):
        delaying.broker.enqueue(message, delay=1500)
    chosen = actor.message("key").copy(message_id=message.message_id)
    delaying.broker.enqueue(chosen, delay=1500)
    assert len({parked.key for parked in waiting(delaying)}) == 3
    with delaying.working():
        eventually(lambda: len(delaying.runs["key"]) == 4, seconds=20)
        eventually(lambda: len(delaying.heard.ends(message.message_id)) == 4)
    assert waiting(delaying) == []


def test_an_actor_of_a_class_of_its_own_may_share_an_id_between_its_messages(delaying: Fleet) -> None:
    class OneId(dramatiq.Actor[Any, Any]):
        def message_with_options(self, **options: Any) -> dramatiq.Message[Any]:
            return super().message_with_options(**options).copy(message_id="one")

    actor = delaying.declare(lambda: None, actor_class=OneId)
    for _ in range(2):
        actor.send_with_options(delay=HOUR)
    assert len(waiting(delaying)) == 2


def test_a_dead_letter_of_a_delayed_job_has_the_job_s_own_id(delaying: Fleet) -> None:
    def fails(n: int) -> None:
        raise OSError("down")

    policy = {"max_attempts": 1, "on_exhaustion": "dead_letter"}
    with delaying.working():
        job = delaying.send(delaying.actor(fails), delay=1500, ojs_retry=policy)
        delaying.end(job)
    assert delaying.bridge.dead_letters.get(job.id).id == job.id


def test_pipelines_and_groups_wait_in_the_store(delaying: Fleet) -> None:
    delaying.broker.add_middleware(dramatiq.middleware.GroupCallbacks(Limits()))
    delaying.broker.add_middleware(Results(backend=StubBackend(), store_results=True))
    double = delaying.declare(lambda n: 2 * n)
    done = delaying.declare(lambda: None)
    with delaying.working():
        pipe = double.message(2) | double.message_with_options(delay=2000)
        piped = dramatiq.pipeline(pipe.messages, broker=delaying.broker).run(delay=2000)
        group = dramatiq.group([double.message(1), double.message(2)], broker=delaying.broker)
        group.add_completion_callback(done.message())
        group.run(delay=2000)
        assert len(waiting(delaying)) == 3
        backend = delaying.broker.get_results_backend()
        got = piped.messages[-1].get_result(backend=backend, block=True, timeout=30_000)
        assert got == 8
        assert sorted(group.get_results(block=True, timeout=30_000)) == [2, 4]
        eventually(lambda: delaying.heard.types(callbacks_of(group)[0]), what="the callback")


def callbacks_of(group: Any) -> list[str]:
    """The ids of a group's callbacks."""
    return [each["message_id"] for each in group.completion_callbacks]


def test_an_actor_that_sends_itself_again_waits_in_the_store(delaying: Fleet) -> None:
    def again(n: int) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        if n < 3:
            delaying.broker.enqueue(message, delay=1500)

    with delaying.working():
        job = delaying.send(delaying.actor(again), delay=1500)
        eventually(lambda: len(job.runs) == 3, seconds=30)
        delaying.end(job, nth=3)
    assert delaying.left() == 0


def test_who_says_whether_delays_are_parked(
    request: pytest.FixtureRequest, unique: str, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/ojs.db"
    broker = broker_of("redis", url_of(request, "redis"), unique)
    retries = install(broker, Bridge(store=store), policies={"ours*": {}}, park_delays=True)
    queue: dict[str, Any] = {"broker": broker, "queue_name": unique}
    actors = [
        dramatiq.actor(lambda: None, actor_name=name, **options, **queue)
        for name, options in {
            "ours": {},
            "ours-not": {"ojs_park_delays": False},
            "native": {},
            "native-too": {"ojs_park_delays": True},
        }.items()
    ]
    for actor in actors:
        actor.send_with_options(delay=HOUR)
    broker.enqueue(dramatiq.Message(unique, "nobody-knows", (), {}, {}), delay=HOUR)
    scheduled = retries.bridge.scheduled.list().jobs
    assert {parked.type for parked in scheduled} == {"ours", "nobody-knows"}
    assert left_in(broker, dq_name(unique)) == 3
    broker.close()


def test_what_is_sent_soon_or_now_goes_to_the_broker(delaying: Fleet) -> None:
    actor = delaying.actor(lambda n: None)
    with delaying.working():
        jobs = [delaying.send(actor, delay=delay) for delay in (None, 0, -5, 1, 900, 0.5)]
        assert waiting(delaying) == []
        for job in jobs:
            delaying.end(job)


@pytest.mark.parametrize("delay", [math.inf, math.nan, 10**18, 1e300])
def test_a_delay_that_ends_at_no_time_is_an_error(delaying: Fleet, delay: Any) -> None:
    actor = delaying.actor(lambda n: None)
    with pytest.raises(ValueError, match=r"delay: .* must be milliseconds"):
        actor.send_with_options(args=("key",), delay=delay)
    assert waiting(delaying) == []


def test_what_is_wrong_with_a_message_is_an_error_at_the_send(delaying: Fleet) -> None:
    actor = delaying.actor(lambda n: None)
    with pytest.raises(TypeError):
        actor.send_with_options(args=("key",), delay="soon")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        actor.send_with_options(args=(object(),), delay=HOUR)
    with pytest.raises(InvalidRetryPolicy):
        actor.send_with_options(args=("key",), delay=HOUR, ojs_retry={"max_attempts": -1})
    with pytest.raises(ConfigurationError, match="ojs_park_delays: 'yes'"):
        delaying.actor(lambda n: None, ojs_park_delays="yes")
    assert waiting(delaying) == []
    assert not is_on_broker(delaying)


class Refusing:
    """Stands for the parked jobs of a store that fails, perhaps after it has written."""

    def __init__(self, parked: Any, error: Exception, *, writes: bool = False) -> None:
        self._parked, self._error, self._writes = parked, error, writes

    def park(self, *args: Any) -> bool:
        """Fail."""
        if self._writes:
            self._parked.park(*args)
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parked, name)


@pytest.mark.parametrize("writes", [False, True])
def test_if_the_store_is_away_the_broker_has_the_job_and_it_runs_once(
    delaying: Fleet, caplog: pytest.LogCaptureFixture, writes: bool
) -> None:
    actor = delaying.actor(lambda n: None)
    store: Any = delaying.bridge.store
    whole = store.parked
    store.parked = Refusing(whole, StoreError("away"), writes=writes)
    job = delaying.send(actor, delay=3000)
    store.parked = whole
    assert "waits in the broker, not in the store" in caplog.text
    assert is_on_broker(delaying)
    with delaying.working():
        # A worker that gets it takes it over.
        eventually(lambda: left_in(delaying.broker, dq_name(delaying.queue)) == 0)
        delaying.end(job)
        time.sleep(1.5)
    assert len(job.runs) == 1
    assert delaying.left() == 0


def test_a_message_that_the_store_can_never_keep_is_an_error_at_the_send(delaying: Fleet) -> None:
    actor = delaying.actor(lambda n: None)
    store: Any = delaying.bridge.store
    store.parked = Refusing(store.parked, Unstorable("too long"))
    with pytest.raises(Unstorable, match="too long"):
        actor.send_with_options(args=("key",), delay=HOUR)
    assert not is_on_broker(delaying)


def send_natively(fleet: Fleet, actor: Any, seconds: float, **options: Any) -> Sent:
    """Send a message as a producer without the bridge does."""
    message = dramatiq.Message(fleet.queue, actor.actor_name, ("key",), {}, options)
    type(fleet.broker).enqueue(fleet.broker, message, delay=int(seconds * 1000))
    return Sent(message.message_id, fleet.runs["key"])


@pytest.mark.parametrize("writes", [False, True])
def test_a_worker_waits_itself_while_the_store_is_away(
    delaying: Fleet, caplog: pytest.LogCaptureFixture, writes: bool
) -> None:
    actor = delaying.actor(lambda n: None)
    store: Any = delaying.bridge.store
    whole = store.parked
    job = send_natively(delaying, actor, 10)
    store.parked = Refusing(whole, StoreError("away"), writes=writes)
    with delaying.working():
        eventually(lambda: "waits in this worker" in caplog.text)
        store.parked = whole
        delaying.end(job)
        time.sleep(1.5)
    assert len(job.runs) == 1
    assert delaying.left() == 0


def test_a_copy_of_what_was_taken_over_does_not_run_however_late_it_comes(delaying: Fleet) -> None:
    actor = delaying.actor(lambda n: None)
    message = dramatiq.Message(delaying.queue, actor.actor_name, ("key",), {}, {})
    eta = int(time.time() * 1000) + 8000
    copy = message.copy(queue_name=dq_name(delaying.queue), options={"eta": eta})
    job = Sent(message.message_id, delaying.runs["key"])
    with delaying.working():
        put(delaying, copy)
        eventually(lambda: len(waiting(delaying)) == 1)
        put(delaying, copy)
        delaying.end(job)
        put(delaying, copy)
        eventually(lambda: delaying.left() == 0)
        time.sleep(1.5)
    assert len(job.runs) == 1


@pytest.mark.parametrize("delaying", ["redis"], indirect=True)
def test_two_jobs_of_one_id_and_one_millisecond_are_taken_over_as_two(delaying: Fleet) -> None:
    actor = delaying.actor(lambda n: None)
    message = actor.message("key")
    late = message.copy(queue_name=dq_name(delaying.queue), options={"eta": int(time.time() * 1000) + HOUR})
    with delaying.working():
        for redis_id in ("one", "two"):
            put(delaying, late, redis_id)
        eventually(lambda: len(waiting(delaying)) == 2)


def put(fleet: Fleet, message: dramatiq.Message[Any], redis_id: str = "one") -> None:
    """Put a message into its queue as it is."""
    broker: Any = fleet.broker
    if hasattr(broker, "client"):
        message = message.copy(options={"redis_message_id": redis_id})
        broker.do_enqueue(message.queue_name, redis_id, message.encode())
    else:
        broker.declare_queue(fleet.queue, ensure=True)
        broker.channel.basic_publish("", message.queue_name, message.encode())


def test_a_worker_takes_many_over_and_stops_meanwhile(delaying: Fleet) -> None:
    actor, count = delaying.actor(lambda n: None), 300
    for _ in range(count):
        send_natively(delaying, actor, 3600)
    with delaying.working():
        eventually(lambda: delaying.bridge.scheduled.count() >= 20)
    # What was not taken over is in the broker still.
    left = delaying.bridge.scheduled.count() + left_in(delaying.broker, dq_name(delaying.queue))
    assert left == count
    with delaying.working():
        eventually(lambda: delaying.bridge.scheduled.count() == count, seconds=60)
        eventually(lambda: left_in(delaying.broker, dq_name(delaying.queue)) == 0)


def test_on_a_stub_broker_delays_stay_where_join_waits_for_them(
    stub: StubBroker, unique: str, tmp_path: Path
) -> None:
    fleet = Fleet(stub, unique, store=f"sqlite:///{tmp_path}/ojs.db", park_after="PT0.1S", park_delays=True)
    actor = fleet.actor(lambda n: None)
    with fleet.working():
        job = fleet.send(actor, delay=500)
        stub.join(unique)
        assert len(job.runs) == 1
