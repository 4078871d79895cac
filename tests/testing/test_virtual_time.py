"""Jobs under virtual time: the real adapters run them, and no test waits."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge import Breaker, Bridge, DeadLetter, Dependency, Discard, Event, ReplayRule, Retry, Snooze
from ojs_bridge.rules.job import parse_time
from ojs_bridge.testing import NothingRan, VirtualTime, virtual_time
from tests.testing.conftest import CRM, Shop, amqp_shop, celery_shop, dramatiq_shop, rabbitmq_shop


def down(*_: object) -> None:
    raise ConnectionError("the CRM is down")


def test_a_dead_crm_is_given_up_on(shop: Shop, ojs: VirtualTime) -> None:
    """The example of the documentation."""
    sync_crm = shop.task(down, "sync_crm", **CRM)
    sent = shop.send(sync_crm, "acme")
    job = ojs.run()
    assert (job.id, job.type) == (sent, "sync_crm")
    assert job.outcome == "dead_letter"
    assert job.attempts == 5
    assert job.waits == [15, 60, 240, 960]
    assert ojs.elapsed == timedelta(seconds=1275)
    assert job.errors == ["builtins.ConnectionError"] * 5
    assert job.reason == "attempt 5 of 5 failed with builtins.ConnectionError, and no attempt is left"
    [letter] = ojs.dead_letters
    assert (letter.id, letter.attempt, len(letter.errors)) == (sent, 5, 5)


def test_many_attempts_take_little_time(shop: Shop, ojs: VirtualTime) -> None:
    """25 attempts take about a tenth of a second at rest; a busy machine has ten times as long."""
    task = shop.task(down, "patient", max_attempts=25, initial_interval="PT15S")
    took = []
    for _ in range(3):
        shop.send(task)
        began = time.process_time()
        assert ojs.run().outcome == "discarded"
        took.append(time.process_time() - began)
    assert ojs.jobs[0].attempts == 25
    assert min(took) < 1


@pytest.mark.parametrize("kind", [amqp_shop, rabbitmq_shop])
def test_rabbitmq_is_not_needed_either(kind) -> None:
    shop = kind(Bridge())
    task = shop.task(down, **CRM)
    with virtual_time(shop.target) as ojs:
        shop.send(task)
        assert ojs.run().waits == [15, 60, 240, 960]


def test_a_paused_job_is_as_if_not_there_until_the_pause_ends(shop: Shop, ojs: VirtualTime) -> None:
    """Other jobs run on, with their delays; each runs once, and no faster than the rate of the resume."""
    task, other = shop.task(lambda: None, "charge"), shop.task(down, "other", **CRM)
    ojs.bridge.pause("charge", reason="the bank is down")
    for _ in range(3):
        shop.send(task)
    job = ojs.run()
    assert (job.outcome, job.attempts, ojs.elapsed) == (None, 0, timedelta())
    assert job.reason.endswith("(the bank is down)")
    assert [parked.kind for parked in ojs.parked] == ["held"] * 3
    shop.send(other)
    assert ojs.run().waits == [15, 60, 240, 960]
    before = ojs.elapsed
    with pytest.raises(NothingRan, match="what a pause holds runs when it is over"):
        ojs.run()
    ojs.advance("PT1H")
    assert [job.outcome for job in ojs.jobs] == [None, None, None, "dead_letter"]
    ojs.bridge.resume("charge", rate="1/s")
    assert ojs.run().outcome == "completed"
    assert [(job.outcome, job.attempts) for job in ojs.jobs[:3]] == [("completed", 1)] * 3
    assert ojs.parked == ()
    assert timedelta(seconds=2) <= ojs.elapsed - before - timedelta(hours=1) <= timedelta(seconds=6)


def test_a_pause_with_an_end_is_a_delay(shop: Shop, ojs: VirtualTime) -> None:
    ojs.bridge.pause("*", until=ojs.now + timedelta(hours=3))
    shop.send(shop.task(lambda: None, "charge"))
    job = ojs.run()
    assert (job.outcome, job.attempts) == ("completed", 1)
    assert ojs.elapsed == timedelta(hours=3)
    assert [event.type for event in ojs.events if event.subject == job.id].count("job.held") == 1


@pytest.mark.parametrize("kind", [celery_shop, dramatiq_shop])
def test_a_breaker_opens_and_closes_in_no_time(kind: Any) -> None:
    """The bank is down for an hour: no job is exhausted, and it is called once in each cool-down."""
    breaker = Breaker(least=4, cool_down="PT1M", probes=1, ramp="1/s")
    bank = Dependency("bank", ["builtins.ConnectionError"], ["pay"], breaker)
    shop, calls = kind(Bridge(dependencies=[bank])), []
    with virtual_time(shop.target) as ojs:

        def pay() -> None:
            calls.append(ojs.elapsed)
            if ojs.elapsed < timedelta(hours=1):
                raise ConnectionError("the bank is down")

        task = shop.task(pay, max_attempts=3, initial_interval="PT1S", jitter=False)
        for _ in range(10):
            shop.send(task)
        ojs.run()
        assert [job.outcome for job in ojs.jobs] == ["completed"] * 10
        assert 60 <= len(calls) <= 75
        assert ojs.elapsed <= timedelta(hours=1, minutes=3)
        told = [event.type for event in ojs.events if event.subject == "bank"]
        assert (told[0], told[-1]) == ("breaker.opened", "breaker.closed")


def test_a_success(shop: Shop, ojs: VirtualTime) -> None:
    shop.send(shop.task(lambda: None, "fine"))
    job = ojs.run()
    assert (job.outcome, job.attempts, job.waits, job.reason) == ("completed", 1, [], "")
    assert ojs.elapsed == timedelta(0)


def test_what_a_handler_says(shop: Shop, ojs: VirtualTime) -> None:
    said = [Retry("a.b", after="PT7S"), Snooze("PT1H"), OSError(), Discard("c.d")]

    def speaks() -> None:
        raise said.pop(0)

    shop.send(shop.task(speaks, initial_interval="PT2S"))
    job = ojs.run()
    assert (job.outcome, job.attempts, job.waits) == ("discarded", 3, [7, 4])
    assert job.errors == ["a.b", "builtins.OSError", "c.d"]
    assert ojs.elapsed == timedelta(seconds=7 + 3600 + 4)


def test_the_clock_of_a_task_is_its_own(shop: Shop, ojs: VirtualTime) -> None:
    seen = []

    def looks() -> None:
        seen.append(datetime.now(timezone.utc))
        raise OSError

    shop.send(shop.task(looks, initial_interval="PT5M"))
    ojs.run()
    assert len(seen) == 3
    assert seen[-1] - seen[0] < timedelta(minutes=1) < ojs.elapsed


def test_one_attempt_at_a_time(shop: Shop, ojs: VirtualTime) -> None:
    shop.send(shop.task(down, **CRM))
    assert [(ojs.step().attempts, ojs.elapsed.total_seconds()) for _ in range(3)] == [
        (1, 0),
        (2, 15),
        (3, 75),
    ]
    assert [parked.next_retry_at - ojs.now for parked in ojs.parked] == [timedelta(seconds=240)]
    assert ojs.jobs[0].outcome is None
    assert ojs.run().outcome == "dead_letter"
    assert ojs.parked == ()


def test_time_passes(shop: Shop, ojs: VirtualTime) -> None:
    shop.send(shop.task(down, **CRM))
    for time_, attempts in [("PT0S", 1), ("PT14.999S", 1), ("PT0.001S", 2), (timedelta(hours=1), 5)]:
        ojs.advance(time_)
        assert ojs.jobs[0].attempts == attempts
    assert ojs.elapsed == timedelta(hours=1, seconds=15)
    assert len(ojs.dead_letters) == 1


def test_what_an_operator_does_with_parked_retries(shop: Shop, ojs: VirtualTime) -> None:
    task = shop.task(down, **{**CRM, "initial_interval": "PT10M"})
    now, never = shop.send(task), shop.send(task)
    ojs.advance("PT1M")
    ojs.bridge.retries.run(now)
    ojs.bridge.retries.cancel(never)
    assert ojs.step().id == now
    assert ojs.elapsed == timedelta(minutes=1)
    ojs.run()
    assert {job.id: job.outcome for job in ojs.jobs} == {now: "dead_letter", never: "cancelled"}


def test_more_parked_retries_and_letters_than_a_page_has(
    shop: Shop, ojs: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ojs_bridge.testing.virtual.MAX_PAGE", 2)
    task = shop.task(down, **{**CRM, "initial_interval": "PT10M", "max_attempts": 2})
    for _ in range(5):
        shop.send(task)
    ojs.advance("PT1M")
    assert len(ojs.parked) == 5
    ojs.run()
    assert (len(ojs.parked), len(ojs.dead_letters)) == (0, 5)


def test_a_job_that_is_sent_for_later(shop: Shop, ojs: VirtualTime) -> None:
    shop.send(shop.task(lambda: None, "later"), delay=7200)
    ojs.advance("PT1H")
    assert ojs.jobs == []
    assert (ojs.run().outcome, ojs.elapsed) == ("completed", timedelta(hours=2))


def test_a_worker_dies_as_an_attempt_begins(shop: Shop, ojs: VirtualTime) -> None:
    ran = []
    shop.send(shop.task(lambda: ran.append(1), "charge", **CRM))
    ojs.crash()
    job = ojs.run()
    assert (job.outcome, job.attempts, job.waits, len(ran)) == ("completed", 2, [15], 1)
    assert job.errors == ["visibility_timeout"]
    # A minute of reservation, and the delay of the retry.
    assert ojs.elapsed == timedelta(seconds=60 + 15)


def test_a_worker_dies_in_an_attempt(shop: Shop, ojs: VirtualTime) -> None:
    ran = []

    def charge() -> None:
        ran.append(1)
        ojs.crash()

    shop.send(shop.task(charge, **{**CRM, "max_attempts": 3}))
    job = ojs.run()
    assert (job.outcome, job.attempts, len(ran)) == ("dead_letter", 3, 3)
    assert job.errors == ["visibility_timeout"] * 3


def test_injected_failures(shop: Shop, ojs: VirtualTime) -> None:
    ran = []
    task = shop.task(lambda: ran.append(1), "charge", **CRM)
    ojs.fail(task, TimeoutError("slow"), times=2)
    ojs.fail("charge", DeadLetter("payment.stolen"))
    shop.send(task)
    job = ojs.run()
    assert (job.errors, ran) == (["builtins.TimeoutError"] * 2 + ["payment.stolen"], [])
    ojs.bridge.dead_letters.replay(job.id)
    assert (ojs.run().outcome, ran) == ("completed", [1])
    with pytest.raises(LookupError, match=r"no .* has the name 'refund'"):
        ojs.fail("refund", OSError)


def test_an_injected_class_may_need_arguments(shop: Shop, ojs: VirtualTime) -> None:
    task = shop.task(down, max_attempts=1)
    ojs.fail(task, UnicodeDecodeError)
    shop.send(task)
    assert ojs.run().errors == ["builtins.UnicodeDecodeError"]


def test_a_replay_begins_afresh(shop: Shop, ojs: VirtualTime) -> None:
    sent = shop.send(shop.task(down, **CRM))
    ojs.run()
    ojs.bridge.dead_letters.replay(sent)
    job = ojs.run()
    assert (job.attempts, job.waits, job.outcome) == (5, [15, 60, 240, 960], "dead_letter")
    assert [event.type for event in job.events].count("dead_letter.retried") == 1


def test_jitter_has_a_seed(shop: Shop) -> None:
    task = shop.task(down, **CRM)

    def waits(**options: int) -> list[float]:
        with virtual_time(shop.target, **options) as ojs:
            shop.send(task)
            return ojs.run().waits

    assert waits(jitter=7) == waits(jitter=7) != waits(jitter=8)
    assert waits() == [15, 60, 240, 960]


def test_events_and_log_lines_come_in_order_and_say_what_happened(
    shop: Shop, ojs: VirtualTime, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line for each decision, and never the arguments."""

    def fails(_secret: str) -> None:
        raise OSError("down")

    policy = {"max_attempts": 2, "initial_interval": "PT4S", "on_exhaustion": "dead_letter"}
    shop.send(shop.task(fails, **policy), "secret argument")
    ojs.step()
    assert ojs.parked == ()  # it waits in the broker
    ojs.run()
    attempt = ["job.started", "job.failed"]
    types = [*attempt, "job.retrying", *attempt, "job.discarded", "dead_letter.added"]
    assert [event.type for event in ojs.events] == types
    retrying = ojs.events[2].data
    assert (retrying["attempt"], retrying["delay_ms"]) == (1, 4000)
    assert parse_time(retrying["next_retry_at"]) == ojs.events[3].time
    retried, buried = (record for record in caplog.records if record.name == "ojs_bridge")
    assert (retried.levelname, buried.levelname) == ("WARNING", "ERROR")
    assert retried.message.endswith(
        "(fails) retrying: attempt 1 of 2 failed with builtins.OSError; retry 1 in 4.000 s"
    )
    assert buried.message.endswith(
        "dead-lettered: attempt 2 of 2 failed with builtins.OSError, and no attempt is left"
    )
    assert "secret argument" not in retried.message + buried.message


def test_listeners_hear_at_once() -> None:
    heard = []
    shop = amqp_shop(Bridge(listeners=[lambda event: heard.append(event.type)]))
    task = shop.task(lambda: None, "fine")
    with virtual_time(shop.target) as ojs:
        shop.send(task)
        ojs.run()
        assert heard == ["job.started", "job.completed"]


@pytest.mark.parametrize("kind", [celery_shop, dramatiq_shop])
@pytest.mark.parametrize("event_type", ["job.started", "job.completed"])
def test_a_listener_can_end_the_test_but_its_errors_do_not(kind: Any, event_type: str) -> None:
    raised: list[BaseException] = [OSError(), KeyboardInterrupt(), pytest.fail.Exception("wrong event")]

    def hears(event: Event) -> None:
        if event.type == event_type:
            raise raised.pop(0)

    shop = kind(Bridge(listeners=[hears]))
    task = shop.task(lambda: None, "fine")
    with virtual_time(shop.target) as ojs:
        shop.send(task)
        assert ojs.run().outcome == "completed"
        for end in (KeyboardInterrupt, pytest.fail.Exception):
            shop.send(task)
            with pytest.raises(end):
                ojs.run()


@pytest.mark.parametrize("kind", [celery_shop, dramatiq_shop])
def test_replay_rules_are_those_of_the_bridge(kind: Any) -> None:
    shop = kind(Bridge(replay_rules=[ReplayRule("again", delay="PT1H")]))
    task = shop.task(down, **CRM)
    with virtual_time(shop.target) as ojs:
        shop.send(task)
        ojs.run()
        ojs.advance("PT61M")
        ojs.fail(task, Discard("gone"))
        ojs.bridge.dead_letters.apply_replay_rules()
        assert ojs.run().outcome == "discarded"


def test_nothing_has_run(ojs: VirtualTime) -> None:
    with pytest.raises(NothingRan, match="send one first"):
        ojs.run()
    with pytest.raises(NothingRan):
        ojs.step()


def test_jobs_that_never_end(shop: Shop, ojs: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    def snoozes() -> None:
        raise Snooze("PT1S")

    monkeypatch.setattr("ojs_bridge.testing.virtual.MOST", 50)
    shop.send(shop.task(snoozes))
    with pytest.raises(RuntimeError, match=r"50 messages were delivered.*job.snoozed"):
        ojs.run()


def test_a_task_cannot_run_others(shop: Shop, ojs: VirtualTime) -> None:
    shop.send(shop.task(lambda: ojs.run() and None, "impatient", max_attempts=1))
    assert ojs.run().errors == ["builtins.RuntimeError"]
