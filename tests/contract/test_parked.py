"""A retry that is far away waits in the store: it is listed, run now, or cancelled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from ojs_bridge import Bridge, JobNotFound
from ojs_bridge.store import Parked
from tests.contract.fleet import Fleet, end
from tests.contract.steps import raises
from tests.servers import eventually

FAR = {"initial_interval": "PT2H", "max_interval": "PT2H"}


def parked(fleet: Fleet) -> tuple[str, Parked]:
    """A job that has failed once, and its retry, which is parked and was told of."""
    job = fleet.send("act", raises(OSError, "first"), "second", policy=FAR)
    eventually(lambda: [event.type for event in fleet.events(job)][-1:] == ["job.retrying"])
    (found,) = fleet.bridge.retries.list().jobs
    return job, found


@pytest.mark.requirement("RET-11")
def test_a_retry_in_two_hours_is_parked_listed_and_run_now(fleet: Fleet) -> None:
    job, waiting = parked(fleet)
    assert (waiting.id, waiting.attempt, waiting.framework) == (job, 2, fleet.framework)
    away = waiting.next_retry_at - fleet.bridge.engine.now()
    assert timedelta(hours=1, minutes=59) < away <= timedelta(hours=2)
    assert len(fleet.runs(job)) == 1
    fleet.bridge.retries.run(job)
    assert end(fleet, job).type == "job.completed"
    eventually(lambda: fleet.bridge.retries.count() == 0, what="an empty store")
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
    assert fleet.runs(job)[1].ojs["errors"][0]["message"] == "first"


def test_a_parked_retry_that_is_run_from_another_process_is_published_by_a_worker(fleet: Fleet) -> None:
    job, _ = parked(fleet)
    operator = Bridge(fleet.store)
    operator.retries.run(job)
    assert end(fleet, job).type == "job.completed"
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]


def test_a_parked_retry_that_is_moved_runs_at_that_time(fleet: Fleet) -> None:
    job, _ = parked(fleet)
    at = fleet.bridge.engine.now() + timedelta(seconds=4)
    fleet.bridge.retries.move(job, at)
    assert end(fleet, job).type == "job.completed"
    second = fleet.runs(job)[1]
    assert (second.attempt, second.at >= at.timestamp()) == (2, True)


def test_a_parked_retry_that_is_cancelled_never_runs(fleet: Fleet) -> None:
    job, _ = parked(fleet)
    fleet.bridge.retries.cancel(job)
    end(fleet, fleet.send("act", "another one"))
    assert (len(fleet.runs(job)), fleet.bridge.retries.count()) == (1, 0)
    eventually(lambda: fleet.events(job)[-1].type == "job.cancelled", what="the event of the end")
    for act in (fleet.bridge.retries.run, fleet.bridge.retries.cancel):
        with pytest.raises(JobNotFound, match=f"there is no parked retry '{job}'"):
            act(job)


def test_a_retry_that_is_due_soon_waits_in_the_broker_and_is_counted(fleet: Fleet) -> None:
    """It is no part of the list."""
    soon = {"initial_interval": "PT15S", "jitter": False}
    sent = fleet.bridge.engine.now()
    job = fleet.send("act", raises(OSError), "ok", policy=soon)
    eventually(lambda: fleet.bridge.counts()["retryable"] == 1, seconds=30, what="a counted retry")
    found = fleet.bridge.retries.in_broker(queue=fleet.queue)
    assert found is not None
    assert found.next_due_at is not None
    assert (found.count, fleet.bridge.retries.count(), len(fleet.runs(job))) == (1, 0, 1)
    assert found.next_due_at - sent > timedelta(seconds=15)
    end(fleet, job)
    eventually(lambda: fleet.bridge.counts()["retryable"] == 0, what="the end of the second")


@pytest.mark.parametrize("kind", ["celery-rabbitmq", "dramatiq-rabbitmq"])
def test_a_parked_retry_whose_queue_is_gone_has_it_declared_again(
    made: Callable[..., Fleet], kind: str
) -> None:
    """RabbitMQ confirms a message that it drops, and the publisher has declared the queue before."""
    fleet = made(kind)
    worker = fleet.start()
    earlier, job = (fleet.send("act", raises(OSError, "first"), "second", policy=FAR) for _ in range(2))
    eventually(lambda: fleet.bridge.retries.count() == 2, what="two parked retries")
    worker.stop()
    fleet.bridge.start()
    fleet.bridge.retries.run(earlier)
    eventually(lambda: fleet.bridge.retries.count() == 1, what="a published retry")
    delete_queues(fleet)
    fleet.bridge.retries.run(job)
    eventually(lambda: fleet.bridge.retries.count() == 0, what="another published retry")
    fleet.bridge.stop()
    fleet.start()
    assert end(fleet, job).type == "job.completed"
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]


def delete_queues(fleet: Fleet) -> None:
    """Delete the queues of a fleet on RabbitMQ."""
    with pika.BlockingConnection(pika.URLParameters(fleet.settings.broker)) as connection:
        for name in fleet.queues:
            with suppress(ChannelClosedByBroker):
                connection.channel().queue_delete(name)
