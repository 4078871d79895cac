"""The specification's retry semantics on real workers, on both brokers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from ojs_bridge import LetterNotFound
from tests.on_celery.fleet import LATE, Fleet, in_seconds
from tests.on_celery.forking import ROOT
from tests.on_celery.project import KEEP
from tests.servers import eventually

# the task, what each run does (the last step repeats), the job's policy
# -> runs, how it ends, the last error's type, the cause
ENDINGS: dict[str, tuple[str, list[str], dict[str, Any], int, str, str | None, str | None]] = {
    "succeeds at once": ("act", ["'ok'"], {}, 1, "completed", None, None),
    "fails twice, then succeeds": (
        "act", ["OSError('a')", "OSError('b')", "'ok'"], {}, 3, "completed", None, None,
    ),
    "three attempts by default": (
        "act", ["OSError('a')"], {}, 3, "discarded", "builtins.OSError", "exhausted",
    ),
    "exhausted and discarded": (
        "act", ["KeyError('k')"], {"max_attempts": 4}, 4, "discarded", "builtins.KeyError", "exhausted",
    ),
    "exhausted and kept": ("act_kept", ["KeyError('k')"], {}, 2, "dead", "builtins.KeyError", "exhausted"),
    "max_attempts 1": (
        "act", ["OSError('a')"], {"max_attempts": 1}, 1, "discarded", "builtins.OSError", "exhausted",
    ),
    "max_attempts 0": (
        "act_kept", ["OSError('a')"], {"max_attempts": 0}, 1, "dead", "builtins.OSError", "exhausted",
    ),
    "exact match": (
        "act", ["Retry('auth.expired')"], {"non_retryable_errors": ["auth.expired"]},
        1, "discarded", "auth.expired", "non_retryable",
    ),
    "prefix match": (
        "act_kept", ["Retry('auth.expired')"], {"non_retryable_errors": ["auth.*"]},
        1, "dead", "auth.expired", "non_retryable",
    ),
    "no match": (
        "act", ["Retry('auth.expired')"], {"non_retryable_errors": ["auth", "au.*"], "max_attempts": 2},
        2, "discarded", "auth.expired", "exhausted",
    ),
    "match by class name": (
        "act", ["AuthExpired()"], {"non_retryable_errors": ["AuthExpired"]},
        1, "discarded", "tests.on_celery.project.AuthExpired", "non_retryable",
    ),
    "mapped by the task": (
        "act", ["CardStolen()"], {"non_retryable_errors": ["payment.*"]},
        1, "discarded", "payment.card_stolen", "non_retryable",
    ),
    "mapped with a code": ("act", ["CardFraud()"], {}, 1, "dead", "payment.fraud", "handler"),
    "mapped by the app": (
        "act", ["TimeoutError()"], {"max_attempts": 2}, 2, "discarded", "external.timeout", "exhausted",
    ),
    "Discard": ("act_kept", ["Discard('a.b', 'm')"], {}, 1, "discarded", "a.b", "handler"),
    "Fail": ("act_kept", ["Fail('a.b', 'm')"], {}, 1, "discarded", "a.b", "handler"),
    "DeadLetter": ("act", ["DeadLetter('a.b', 'm')"], {}, 1, "dead", "a.b", "handler"),
    "Discard on the second attempt": (
        "act_kept", ["OSError()", "Discard('a.b')"], {}, 2, "discarded", "a.b", "handler",
    ),
    "Retry never outlives its attempts": (
        "act", ["Retry('a.b', after='PT0.05S')"], {"max_attempts": 3}, 3, "discarded", "a.b", "exhausted",
    ),
    "Snooze uses no attempt": (
        "act", ["Snooze('PT0.05S')"] * 4 + ["'ok'"], {"max_attempts": 1}, 5, "completed", None, None,
    ),
    "an exception that cannot be pickled": (
        "act", ["Unpicklable('x')"], {"max_attempts": 2},
        2, "discarded", "tests.on_celery.project.Unpicklable", "exhausted",
    ),
    "a class-based task with its own policy and errors": (
        "own", [], {}, 2, "discarded", "disk.full", "exhausted",
    ),
}  # fmt: skip


@pytest.mark.requirement("RET-01", "RET-07", "RET-08", "RET-09", "RET-17", "RET-18")
def test_every_job_ends_as_its_policy_says(fleet: Fleet) -> None:
    sent = {
        name: fleet.send(task, *steps, **({"ojs_retry": policy} if policy else {}))
        for name, (task, steps, policy, *_) in ENDINGS.items()
    }
    for name, (*_, runs, ending, error_type, cause) in ENDINGS.items():
        job = sent[name]
        assert fleet.end(job) == ("SUCCESS" if ending == "completed" else "FAILURE"), name
        event = fleet.ending(job)
        assert len(fleet.runs(job)) == runs, name
        assert event["job_type"] == job_type(name), name
        if ending == "completed":
            continue
        assert event["last_error"]["type"] == error_type, name
        assert (event["cause"], event["dead_lettered"]) == (cause, ending == "dead"), name
        assert event["total_attempts"] == runs, name
        if ending == "dead":
            letter = fleet.bridge.dead_letters.get(job.id)
            assert (letter.attempt, letter.error_type, letter.cause) == (runs, error_type, cause), name
            assert len(letter.errors) == runs, name
            assert letter.queue == fleet.settings.queue, name
        else:
            with pytest.raises(LetterNotFound):
                fleet.bridge.dead_letters.get(job.id)


def job_type(name: str) -> str:
    return ENDINGS[name][0]


# policy -> the delays before each retry, in seconds
DELAYS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "none": ({"backoff_strategy": "none", "initial_interval": "PT0.2S"}, [0.2, 0.2, 0.2]),
    "constant": ({"backoff_strategy": "constant", "initial_interval": "PT0.2S"}, [0.2, 0.2]),
    "linear": ({"backoff_strategy": "linear", "initial_interval": "PT0.1S"}, [0.1, 0.2, 0.3]),
    "exponential": ({"initial_interval": "PT0.1S"}, [0.1, 0.2, 0.4]),
    "exponential 3": ({"initial_interval": "PT0.1S", "backoff_coefficient": 3.0}, [0.1, 0.3, 0.9]),
    "polynomial": (
        {"backoff_strategy": "polynomial", "initial_interval": "PT0.1S", "backoff_coefficient": 2.0},
        [0.1, 0.4, 0.9],
    ),
    "capped": (
        {"initial_interval": "PT0.1S", "backoff_coefficient": 10.0, "max_interval": "PT0.3S"},
        [0.1, 0.3, 0.3],
    ),
}


@pytest.mark.requirement("RET-02", "RET-04", "RET-11", "RET-14")
def test_a_retry_comes_after_its_delay_and_never_before(fleet: Fleet) -> None:
    sent = {
        name: fleet.send(
            "act", "OSError('down')", ojs_retry={"jitter": False, **policy, "max_attempts": len(delays) + 1}
        )
        for name, (policy, delays) in DELAYS.items()
    }
    for name, (_, delays) in DELAYS.items():
        assert fleet.end(sent[name]) == "FAILURE", name
        gaps = fleet.gaps(sent[name])
        assert len(gaps) == len(delays), name
        for gap, delay in zip(gaps, delays, strict=True):
            assert delay <= gap < delay + LATE, name
        for run in fleet.runs(sent[name])[1:]:
            assert run.at >= fleet.due(run), name


@pytest.mark.requirement("RET-05", "RET-06")
def test_jitter_stays_within_its_bounds_and_the_cap(fleet: Fleet) -> None:
    policy = {"jitter": True, "initial_interval": "PT0.4S", "max_interval": "PT0.5S", "max_attempts": 2}
    sent = [fleet.send("act", "OSError()", "'ok'", ojs_retry=policy) for _ in range(12)]
    planned = []
    for job in sent:
        assert fleet.end(job) == "SUCCESS"
        first, second = fleet.runs(job)
        assert 0.2 <= second.at - first.at < 0.5 + LATE
        eventually(lambda job=job: any(e["type"] == "job.retrying" for e in fleet.events(job)))
        failed_at = next(e for e in fleet.events(job) if e["type"] == "job.retrying")
        planned.append(fleet.due(second) - first.at)
        assert failed_at["data"]["next_retry_at"] == second.ojs["next_retry_at"]
    assert len({round(delay, 3) for delay in planned}) > 1


@pytest.mark.requirement("RET-04", "RET-08", "RET-11")
def test_a_hint_replaces_the_delay_and_is_still_capped(fleet: Fleet) -> None:
    hint = fleet.send("act", "Retry('a.b', after='PT0.5S')", "'ok'")
    capped = fleet.send("act", "Retry('a.b', after='PT1H')", "'ok'", ojs_retry={"max_interval": "PT0.5S"})
    zero = fleet.send("act", "Retry('a.b', after='PT0S')", "'ok'", ojs_retry={"initial_interval": "PT30S"})
    for job, delay in ((hint, 0.5), (capped, 0.5), (zero, 0.0)):
        assert fleet.end(job) == "SUCCESS"
        assert delay <= fleet.gaps(job)[0] < delay + LATE


@pytest.mark.requirement("RET-10")
def test_policies_of_app_task_and_job_are_merged_field_by_field(fleet: Fleet) -> None:
    plain = fleet.send("act_kept", "OSError()")
    more = fleet.send("act_kept", "OSError()", ojs_retry={"max_attempts": 4})
    other = fleet.send(
        "act_kept", "OSError()", ojs_retry={"on_exhaustion": "discard", "initial_interval": "PT0.4S"}
    )
    for job, runs, kept in ((plain, 2, True), (more, 4, True), (other, 2, False)):
        assert fleet.end(job) == "FAILURE"
        assert (len(fleet.runs(job)), fleet.ending(job)["dead_lettered"]) == (runs, kept)
    assert fleet.gaps(plain)[0] >= 0.1  # the app's interval
    assert fleet.gaps(other)[0] >= 0.4
    assert fleet.runs(more)[3].ojs["retry"] == {"max_attempts": 4}
    assert fleet.bridge.dead_letters.get(more.id).retry == {"max_attempts": 4}


@pytest.mark.requirement("RET-14", "RET-15", "DLQ-001", "DLQ-002")
def test_the_message_keeps_ten_errors_and_the_dead_letter_all_of_them(fleet: Fleet) -> None:
    policy = {"max_attempts": 13, "backoff_strategy": "none", "initial_interval": "PT0.05S", **KEEP}
    job = fleet.send("act", "OSError(f'run {n} ' + 'x' * 3000)", ojs_retry=policy)
    assert fleet.end(job) == "FAILURE"
    runs = fleet.runs(job)
    assert [run.ojs["attempt"] for run in runs] == list(range(1, 14))
    assert [run.retries for run in runs] == list(range(13))
    last = runs[12].ojs
    assert [error["attempt"] for error in last["errors"]] == list(range(3, 13))
    assert last["errors_dropped"] == 2
    assert all(len(run.state or "") <= 16 * 1024 for run in runs)
    letter = fleet.bridge.dead_letters.get(job.id)
    assert [error["attempt"] for error in letter.errors] == list(range(1, 14))
    assert letter.errors[0]["message"].startswith("run 1 ")
    assert letter.errors[0]["code"] == "RETRY"
    assert '"backtrace":[' in (runs[1].state or "")


@pytest.mark.requirement("RET-11")
def test_a_delivery_that_comes_early_waits(fleet: Fleet) -> None:
    state = {"v": 1, "attempt": 1, "next_retry_at": in_seconds(1.5)}
    job = fleet.send("act", "'ok'", headers={"ojs": json.dumps(state)})
    assert fleet.end(job) == "SUCCESS"
    (run,) = fleet.runs(job)
    assert fleet.due(run) <= run.at < fleet.due(run) + LATE


REPLAY = """
import sys
from tests.on_celery.project import Settings, make_app
from ojs_bridge.celery.attach import attach
app = make_app(Settings.from_env())
print(attach(app).dead_letters.retry(sys.argv[1]).replay_count)
"""


@pytest.mark.requirement("DLQ-003")
def test_a_replay_starts_afresh_under_its_own_id(fleet: Fleet) -> None:
    job = fleet.send("act_kept", "OSError('one')", "OSError('two')", "OSError('three')", "'ok'", expires=300)
    expired = fleet.send("act_kept", "OSError('one')", "OSError('two')", "'ok'", expires=8)
    assert [fleet.end(job), fleet.end(expired)] == ["FAILURE", "FAILURE"]
    letter = fleet.bridge.dead_letters.get(job.id)
    assert letter.message["headers"]["expires"]
    time.sleep(max(0.0, 8.1 - (time.time() - fleet.runs(expired)[0].at)))

    command = [sys.executable, "-c", REPLAY, job.id]
    env = {**fleet.settings.to_env(), "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout == "1\n"
    fleet.bridge.dead_letters.retry(expired.id)

    for again in (job, expired):
        fleet.ending(again, nth=2)
        eventually(lambda again=again: fleet.app.AsyncResult(again.id).state == "SUCCESS", seconds=20)
        with pytest.raises(LetterNotFound):
            fleet.bridge.dead_letters.get(again.id)
    runs = fleet.runs(job)
    assert [(run.attempt, run.retries) for run in runs] == [(1, 0), (2, 1), (1, 0), (2, 1)]
    assert [error["message"] for error in runs[3].ojs["errors"]] == ["one", "two", "three"]
    assert runs[3].ojs["replay_count"] == 1
    assert runs[2].more["expires"] == runs[0].more["expires"]
    assert fleet.runs(expired)[2].more["expires"] is None


@pytest.mark.requirement("DLQ-R002")
def test_a_replay_with_other_arguments_on_another_queue(fleet: Fleet) -> None:
    headers = {"tenant": "acme"}
    job = fleet.send("act_kept", "OSError('one')", "OSError('two')", headers=headers)
    assert fleet.end(job) == "FAILURE"
    letter = fleet.bridge.dead_letters.get(job.id)
    assert (letter.reading.args, letter.reading.kwargs) == (["OSError('one')", "OSError('two')"], {})
    assert letter.reading.meta["tenant"] == "acme"
    fleet.ending(job)  # or it might be told of after the second one
    other = f"{fleet.settings.queue}-topic"
    fleet.bridge.dead_letters.retry(job.id, args=["'ok'"], queue=other, meta={"tenant": "other"})
    assert fleet.ending(job, nth=2)["queue"] == other
    eventually(lambda: fleet.app.AsyncResult(job.id).state == "SUCCESS", seconds=20)
    run = fleet.runs(job)[2]
    assert run.more["args"] == "[\"'ok'\"]"
    assert "'tenant': 'other'" in run.more["headers"]
    publisher = fleet.bridge.engine.context.publishers["celery"]
    assert (publisher.knows("act_kept"), publisher.knows("gone")) == (True, False)


def test_events_come_in_order_and_say_what_happened(fleet: Fleet) -> None:
    # Each attempt is told of by its own process, and the first one's may be late.
    job = fleet.send("act_kept", "OSError('down')", ojs_retry={"initial_interval": "PT4S"})
    fleet.end(job)
    fleet.ending(job)
    attempt = ["job.started", "job.failed"]
    eventually(lambda: len(fleet.events(job)) == 7, what="seven events")
    types = [event["type"] for event in fleet.events(job)]
    assert types == [*attempt, "job.retrying", *attempt, "job.discarded", "dead_letter.added"]
    retrying = fleet.events(job)[2]["data"]
    assert retrying["attempt"] == 1
    assert retrying["next_retry_at"] == fleet.runs(job)[1].ojs["next_retry_at"]


def test_each_decision_is_one_log_line_without_arguments(fleet: Fleet) -> None:
    secret = "OSError('down') if 'secret argument' else 0"
    # The line is written after the retry was published, by another process than the next run's.
    job = fleet.send("act_kept", secret, ojs_retry={"initial_interval": "PT4S"})
    fleet.end(job)
    fleet.ending(job)
    eventually(lambda: len(fleet.lines(job)) == 2, what="two lines")
    retrying, buried = fleet.lines(job)
    assert "WARNING" in retrying
    assert "(act_kept) retrying: attempt 1 of 2 failed with builtins.OSError; retry 1 in 4.000 s" in retrying
    assert "ERROR" in buried
    assert "dead-lettered: attempt 2 of 2 failed with builtins.OSError, and no attempt is left" in buried
    assert "secret argument" not in retrying + buried


def test_a_retry_is_not_stored_after_its_run_has_ended(fleet: Fleet) -> None:
    job = fleet.send("handled", "OSError('first')", "Discard('a.b')", headers={"linger": 10})
    assert fleet.end(job) == "FAILURE"
    assert fleet.calls(job, "on_retry") == []
    eventually(lambda: fleet.calls(job, "on_retry"), what="the end of the first run")
    assert fleet.app.AsyncResult(job.id).state == "FAILURE"


def test_a_job_that_waits_for_its_retry_says_so(fleet: Fleet) -> None:
    policy = {"initial_interval": "PT6S"}
    job = fleet.send("act", "OSError('first')", "'ok'", ojs_retry=policy)
    eventually(lambda: job.state == "RETRY", what="the state RETRY")
    stored = fleet.app.AsyncResult(job.id)
    assert isinstance(stored.result, OSError)
    assert "in run" in stored.traceback
    assert stored.traceback.rstrip().endswith("OSError('first')")
    assert fleet.end(job) == "SUCCESS"
