"""Chains, chords, pipelines, groups, results, middleware and native retries under virtual time."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
from celery import Celery, chain, chord, group, signals
from kombu.common import Broadcast

import ojs_bridge.celery
import ojs_bridge.dramatiq
from ojs_bridge import Bridge
from ojs_bridge.testing import NothingRan, virtual_time
from tests.testing.conftest import CRM, NOWHERE, Shop, celery_shop, dramatiq_shop


class Flaky:
    """A function that fails so often before it succeeds."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            raise OSError


@pytest.fixture
def celery() -> Shop:
    return celery_shop(Bridge())


@pytest.fixture
def broker() -> Shop:
    return dramatiq_shop(Bridge())


def test_a_chain_goes_on_after_a_retry(celery: Shop) -> None:
    flaky = Flaky(1)

    def first() -> int:
        flaky()
        return 20

    def second(number: int, more: int) -> int:
        return number + more

    a, b = celery.task(first, **CRM), celery.task(second, **CRM)
    with virtual_time(celery.target) as ojs:
        sent = chain(a.s(), b.s(1), b.s(2)).apply_async()
        job = ojs.run()
        assert (job.type, job.attempts, job.outcome) == ("first", 2, "completed")
        assert [job.outcome for job in ojs.jobs] == ["completed"] * 3
        assert sent.get(timeout=1) == 23
        assert ojs.elapsed == timedelta(seconds=15)


def test_a_chord_waits_for_its_members_and_links_are_sent(celery: Shop) -> None:
    flaky, heard = Flaky(2), []

    def member(number: int) -> int:
        if number == 2:
            flaky()
        return number

    def total(numbers: list[int]) -> int:
        return sum(numbers)

    def hears(what: Any) -> None:
        heard.append(what)

    a, b, c = celery.task(member, **CRM), celery.task(total, **CRM), celery.task(hears, **CRM)
    with virtual_time(celery.target) as ojs:
        sent = chord(group(a.s(n) for n in range(4)), b.s().set(link=c.s())).apply_async()
        ojs.run()
        assert (sent.get(timeout=1), heard) == (6, [6])
        assert ojs.elapsed == timedelta(seconds=75)


def test_a_retry_that_a_celery_task_asks_for(celery: Shop) -> None:
    app: Celery = celery.target

    @app.task(bind=True, shared=False, max_retries=2, default_retry_delay=30)
    def natively(self: Any) -> None:
        raise self.retry(countdown=100)

    seen = []
    receiver = signals.task_failure.connect(lambda sender, **_: seen.append(sender.name), weak=False)
    with virtual_time(app) as ojs:
        sent = natively.delay()
        ojs.advance("PT199S")
        assert (sent.state, ojs.jobs) == ("RETRY", [])
        ojs.advance("PT1S")
        assert (sent.state, seen) == ("FAILURE", [natively.name])
    signals.task_failure.disconnect(receiver)


def test_a_task_that_acknowledges_early_is_lost_in_a_crash() -> None:
    app = Celery("early", broker=NOWHERE, set_as_current=False)
    app.task(lambda_named("quick"), name="quick", shared=False)
    ojs_bridge.celery.install(app, Bridge(retry=CRM))
    with virtual_time(app) as ojs:
        ojs.crash()
        app.send_task("quick")
        job = ojs.run()
        assert (job.outcome, job.attempts, ojs.elapsed) == (None, 1, timedelta(0))


def lambda_named(name: str) -> Any:
    def function() -> None:
        pass

    function.__name__ = name
    return function


def test_an_injected_failure_of_a_task_that_celery_retries() -> None:
    ran = []

    def charge() -> None:
        ran.append(1)

    app = Celery("shop", broker=NOWHERE, set_as_current=False)
    task = app.task(charge, name="charge", shared=False, autoretry_for=(OSError,), default_retry_delay=60)
    app.finalize()
    ojs_bridge.celery.install(app, Bridge(), policies={})
    own = task.run
    with virtual_time(app) as ojs:
        ojs.fail(task, OSError, times=2)
        task.delay()
        ojs.advance("PT1M")
        assert ran == []
        ojs.advance("PT1M")
        assert ran == [1]
    assert task.run == own


def test_a_broadcast_runs_natively(celery: Shop) -> None:
    celery.target.conf.task_queues = [Broadcast("news")]
    ran = []
    task = celery.task(lambda: ran.append(1), "tells")
    with virtual_time(celery.target) as ojs:
        celery.send(task, queue="news")
        with pytest.raises(NothingRan, match="broadcast"):
            ojs.run()
    assert ran == [1]


def test_a_task_that_the_app_does_not_have(celery: Shop, caplog: pytest.LogCaptureFixture) -> None:
    celery.task(lambda_named("mine"), **CRM)
    with virtual_time(celery.target) as ojs:
        celery.target.send_task("of.another.service")
        celery.target.send_task("mine")
        assert ojs.run().type == "mine"
    assert "no task of this app has the name of.another.service" in caplog.text


def test_a_pipeline_goes_on_after_a_retry(broker: Shop) -> None:
    flaky = Flaky(1)

    def first() -> int:
        flaky()
        return 20

    def second(number: int) -> int:
        return number + 1

    a, b = broker.task(first, **CRM), broker.task(second, **CRM)
    with virtual_time(broker.target) as ojs:
        sent = dramatiq.pipeline([a.message(), b.message(), b.message()], broker=broker.target).run()
        assert ojs.run().attempts == 2
        results = broker.target.get_results_backend()
        assert sent.messages[-1].get_result(backend=results) == 22
        assert ojs.elapsed == timedelta(seconds=15)


def test_a_group_calls_back_once(broker: Shop) -> None:
    flaky, heard = Flaky(2), []

    def member(number: int) -> None:
        if number == 2:
            flaky()

    def done() -> None:
        heard.append(1)

    a, b = broker.task(member, **CRM), broker.task(done, **CRM)
    with virtual_time(broker.target) as ojs:
        members = dramatiq.group([a.message(n) for n in range(4)], broker=broker.target)
        members.add_completion_callback(b.message())
        members.run()
        ojs.advance("PT74S")
        assert heard == []
        ojs.advance("PT1S")
        assert heard == [1]


def test_the_middleware_of_a_broker_hears_of_each_attempt(broker: Shop) -> None:
    heard = []

    class Hears(dramatiq.Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            heard.append("before")

        def after_process_message(self, broker: Any, message: Any, *, result=None, exception=None) -> None:
            heard.append(type(exception).__name__)

    broker.target.add_middleware(Hears())
    flaky = Flaky(1)

    def acts() -> None:
        flaky()

    task = broker.task(acts, **CRM)
    with virtual_time(broker.target) as ojs:
        task.send()
        ojs.run()
    assert heard == ["before", "OSError", "before", "NoneType"]


def test_an_async_actor(broker: Shop) -> None:
    broker.target.add_middleware(dramatiq.middleware.asyncio.AsyncIO())

    async def acts() -> None:
        raise OSError

    task = broker.task(acts, max_attempts=2, initial_interval="PT9S")
    with virtual_time(broker.target) as ojs:
        task.send()
        assert ojs.run().waits == [9]


def test_an_actor_that_dramatiq_retries(broker: Shop) -> None:
    ran = []

    @dramatiq.actor(broker=broker.target, max_retries=2, min_backoff=1000, max_backoff=1000)
    def natively() -> None:
        ran.append(1)
        raise OSError

    with virtual_time(broker.target) as ojs:
        natively.send()
        ojs.advance("PT1H")
    assert len(ran) == 3


def test_an_actor_that_the_broker_does_not_have(broker: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with virtual_time(broker.target) as ojs, caplog.at_level(logging.ERROR):
        broker.task(lambda_named("mine"), **CRM)
        broker.target.enqueue(dramatiq.Message("default", "of_another_service", (), {}, {}))
        ojs.advance("PT1S")
    assert "undefined actor 'of_another_service'" in caplog.text
