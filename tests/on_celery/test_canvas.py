"""Chains, groups, chords, links and handlers around jobs that are retried."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from ojs_bridge import InvalidRetryPolicy, RetryPolicy, Snooze
from tests.contract.steps import raises
from tests.on_celery.fleet import Fleet, in_seconds
from tests.servers import eventually


def recovering(fleet: Fleet, result: Any = "ok") -> Any:
    return fleet.task("act").si(raises(OSError, "one"), result)


def test_chain_group_and_chord_go_on_after_retries(fleet: Fleet) -> None:
    collect = fleet.task("collect")
    chained = chain(recovering(fleet), collect.s("end")).delay()
    grouped = group(recovering(fleet, 1), recovering(fleet, 2)).delay()
    chorded = chord([recovering(fleet, 1), recovering(fleet, 2)], collect.s()).delay()
    snoozed = chord(
        [fleet.task("act").si(raises(Snooze, "PT0.1S"), 1), recovering(fleet, 2)], collect.s()
    ).delay()
    assert chained.get(timeout=90) == ["ok", "end"]
    assert [job.get() for job in grouped] == [1, 2]
    assert chorded.get(timeout=90) == [[1, 2]]
    assert snoozed.get(timeout=90) == [[1, 2]]


def test_a_job_that_waits_for_its_time_stays_in_its_chord(fleet: Fleet) -> None:
    state = json.dumps({"v": 1, "next_retry_at": in_seconds(0.7)})
    early = recovering(fleet).set(headers={"ojs": state})
    assert chord([early, recovering(fleet, 2)], fleet.task("collect").s()).delay().get(timeout=90) == [
        ["ok", 2]
    ]


@pytest.mark.requirement("RET-17")
def test_failure_ends_chain_and_chord_once(fleet: Fleet) -> None:
    act, collect, errback = (fleet.task(name) for name in ("act", "collect", "errback"))
    failing = act.si(raises(OSError, "down")).set(ojs_retry={"max_attempts": 2})
    rest = collect.s()
    chained = chain(failing.clone().on_error(errback.s()), rest).delay()
    body = collect.s().on_error(errback.s())
    chorded = chord([failing.clone(), recovering(fleet)], body).delay()
    with pytest.raises(OSError, match="down"):
        chained.get(timeout=90)
    assert isinstance(chorded.get(timeout=90, propagate=False), ChordError)
    assert fleet.end(chained.parent) == "FAILURE"
    eventually(lambda: fleet.calls(chained.parent, "errback"), what="the chain's errback")
    eventually(lambda: fleet.calls(chorded, "errback"), what="the chord's errback")
    time.sleep(0.5)
    assert len(fleet.calls(chained.parent, "errback")) == 1
    assert len(fleet.calls(chorded, "errback")) == 1
    assert len(fleet.runs(chained.parent)) == 2


def test_links_are_called_once_at_the_end(fleet: Fleet) -> None:
    errback = fleet.task("errback").s()
    follower = fleet.task("act").si(raises(OSError), "linked")
    job = fleet.send("act", raises(OSError), "ok", link=follower, link_error=errback)
    failed = fleet.send("act", raises(OSError), link=follower, link_error=[errback])
    assert [fleet.end(job), fleet.end(failed)] == ["SUCCESS", "FAILURE"]
    eventually(lambda: fleet.calls(failed, "errback"), what="the errback")
    time.sleep(0.3)
    assert len(fleet.calls(failed, "errback")) == 1
    assert fleet.calls(job, "errback") == []
    (linked,) = job.children or fleet.app.AsyncResult(job.id).children
    assert fleet.end(linked) == "SUCCESS"
    assert not fleet.app.AsyncResult(failed.id).children


@pytest.mark.requirement("RET-10")
def test_each_job_of_a_canvas_brings_its_own_policy(fleet: Fleet) -> None:
    act, collect = fleet.task("act"), fleet.task("collect")

    def runs_out(attempts: int) -> Any:
        steps = [raises(OSError)] * (attempts - 1)
        return act.si(*steps, "ok").set(ojs_retry={"max_attempts": attempts})

    policy = RetryPolicy(max_attempts=5, jitter=False)
    chained = chain(runs_out(4), runs_out(5), collect.s()).delay()
    grouped = group([act.si(*[raises(OSError)] * 3, "ok") for _ in range(2)]).apply_async(
        ojs_retry={"max_attempts": 4}
    )
    chorded = chord([runs_out(4), act.si(1)], runs_out(5)).delay()
    linked = act.si("ok").apply_async(link=act.si(*[raises(OSError)] * 4, "ok").set(ojs_retry=policy))
    assert chained.get(timeout=90) == ["ok"]
    assert [job.get() for job in grouped] == ["ok", "ok"]
    assert chorded.get(timeout=90) == "ok"
    assert fleet.end(linked) == "SUCCESS"
    (follower,) = fleet.app.AsyncResult(linked.id).children
    assert fleet.end(follower) == "SUCCESS"
    assert len(fleet.runs(follower)) == 5


def test_replace_ends_as_the_replacement(fleet: Fleet) -> None:
    job = fleet.send("replaces", "once", raises(OSError), "replaced")
    assert fleet.end(job) == "SUCCESS"
    assert job.get() == "replaced"
    assert [run.attempt for run in fleet.runs(job)] == [1, 1, 2]
    failed = fleet.send("replaces", raises(OSError))
    assert fleet.end(failed) == "FAILURE"
    assert len(fleet.runs(failed)) == 4


BAD = {"max_attempts": -1}


@pytest.mark.requirement("RET-16", "RET-20")
def test_an_invalid_policy_is_refused_before_anything_is_sent(separate, fleet: Fleet) -> None:
    idle = separate()  # no worker: sent messages stay visible
    act, collect = idle.task("act"), idle.task("collect")
    bare = idle.app.signature("act", ("ok",), options={"ojs_retry": BAD})
    attempts = {
        "apply_async": lambda: act.apply_async(("ok",), ojs_retry=BAD),
        "send_task": lambda: idle.app.send_task("act", ("ok",), ojs_retry=BAD),
        "send_task of a stranger": lambda: idle.app.send_task("elsewhere", ojs_retry=BAD),
        "set": lambda: act.s("ok").set(ojs_retry=BAD),
        "signature": lambda: act.signature(("ok",), ojs_retry=BAD),
        "chain": lambda: chain(act.s("ok"), bare).delay(),
        "link": lambda: act.apply_async(("ok",), link=bare),
        "errback": lambda: act.apply_async(("ok",), link_error=[bare]),
        "chord body": lambda: chord([act.s("ok")], bare).delay(),
        "a chain in a chord": lambda: act.apply_async(("ok",), link=chord([bare], collect.s())),
        "with the task's own": lambda: act.apply_async(("ok",), ojs_retry={"max_interval": "PT0.01S"}),
    }
    for name, attempt in attempts.items():
        with pytest.raises(InvalidRetryPolicy, match="ojs_retry of "):
            attempt()
            pytest.fail(name)
    with idle.app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare(idle.settings.queue, passive=False).message_count == 0
