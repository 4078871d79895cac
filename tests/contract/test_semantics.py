"""The specification's retry semantics: every fleet keeps them on every broker."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from ojs_bridge import DeadLetter, Discard, Fail, LetterNotFound, Retry, Snooze
from ojs_bridge.operations.operation import Jobs
from ojs_bridge.rules.fingerprint import frame_of
from ojs_bridge.rules.job import format_time
from tests.answers import answering
from tests.contract.fleet import Fleet, attempts, end, gaps, retries
from tests.contract.notes import Busy
from tests.contract.steps import (
    KEEP,
    AuthExpired,
    CardFraud,
    CardStolen,
    Declined,
    Step,
    an,
    calls,
    raises,
    raises_its_number,
    raises_more_each_time,
    raises_what_is_named,
    returns,
)
from tests.servers import eventually


class Ending(NamedTuple):
    """A task, the steps of its runs (the last one repeats) and a policy; the number of runs, and the end."""

    task: str
    steps: list[Step]
    policy: dict[str, Any]
    runs: int
    ends: str
    error: str | None
    cause: str | None


ENDINGS: dict[str, tuple[str, list[Step], dict[str, Any], int, str, str | None, str | None]] = {
    "succeeds at once": ("act", ["ok"], {}, 1, "completed", None, None),
    "fails twice, then succeeds": (
        "act", [raises(OSError, "a"), raises(OSError, "b"), "ok"], {}, 3, "completed", None, None,
    ),
    "three attempts by default": (
        "act", [raises(OSError, "a")], {}, 3, "discarded", "builtins.OSError", "exhausted",
    ),
    "exhausted and discarded": (
        "act", [raises(KeyError, "k")], {"max_attempts": 4}, 4, "discarded", "builtins.KeyError", "exhausted",
    ),
    "exhausted and kept": (
        "act_kept", [raises(KeyError, "k")], {}, 2, "dead", "builtins.KeyError", "exhausted",
    ),
    "max_attempts 1": (
        "act", [raises(OSError, "a")], {"max_attempts": 1}, 1, "discarded", "builtins.OSError", "exhausted",
    ),
    "max_attempts 0": (
        "act_kept", [raises(OSError, "a")], {"max_attempts": 0}, 1, "dead", "builtins.OSError", "exhausted",
    ),
    "exact match": (
        "act", [raises(Retry, "auth.expired")], {"non_retryable_errors": ["auth.expired"]},
        1, "discarded", "auth.expired", "non_retryable",
    ),
    "prefix match": (
        "act_kept", [raises(Retry, "auth.expired")], {"non_retryable_errors": ["auth.*"]},
        1, "dead", "auth.expired", "non_retryable",
    ),
    "no match": (
        "act", [raises(Retry, "auth.expired")], {"non_retryable_errors": ["auth", "au.*"], "max_attempts": 2},
        2, "discarded", "auth.expired", "exhausted",
    ),
    "match by class name": (
        "act", [raises(AuthExpired)], {"non_retryable_errors": ["AuthExpired"]},
        1, "discarded", f"{AuthExpired.__module__}.AuthExpired", "non_retryable",
    ),
    "mapped by the task": (
        "act", [raises(CardStolen)], {"non_retryable_errors": ["payment.*"]},
        1, "discarded", "payment.card_stolen", "non_retryable",
    ),
    "mapped with a code": ("act", [raises(CardFraud)], {}, 1, "dead", "payment.fraud", "handler"),
    "mapped by the app": (
        "act", [raises(TimeoutError)], {"max_attempts": 2}, 2, "discarded", "external.timeout", "exhausted",
    ),
    "Discard": ("act_kept", [raises(Discard, "a.b", "m")], {}, 1, "discarded", "a.b", "handler"),
    "Fail": ("act_kept", [raises(Fail, "a.b", "m")], {}, 1, "discarded", "a.b", "handler"),
    "DeadLetter": ("act", [raises(DeadLetter, "a.b", "m")], {}, 1, "dead", "a.b", "handler"),
    "Discard on the second attempt": (
        "act_kept", [raises(OSError), raises(Discard, "a.b")], {}, 2, "discarded", "a.b", "handler",
    ),
    "Retry never outlives its attempts": (
        "act", [raises(Retry, "a.b", after="PT0.05S")], {"max_attempts": 3}, 3,
        "discarded", "a.b", "exhausted",
    ),
    "Snooze uses no attempt": (
        "act", [raises(Snooze, "PT0.05S")] * 4 + ["ok"], {"max_attempts": 1}, 5, "completed", None, None,
    ),
    "a snooze by the error map": (
        "act", [raises(Busy)] * 4 + ["ok"], {"max_attempts": 1}, 5, "completed", None, None,
    ),
}  # fmt: skip


@pytest.mark.requirement("RET-01", "RET-07", "RET-08", "RET-09", "RET-17", "RET-18")
def test_every_job_ends_as_its_policy_says(fleet: Fleet) -> None:
    endings = {name: Ending(*given) for name, given in ENDINGS.items()}
    sent = {
        name: fleet.send(ending.task, *ending.steps, policy=ending.policy) for name, ending in endings.items()
    }
    for name, ending in endings.items():
        job = sent[name]
        event = end(fleet, job)
        assert event.type == ("job.completed" if ending.ends == "completed" else "job.discarded"), name
        assert event.data["job_type"].endswith(ending.task), name
        assert len(fleet.runs(job)) == ending.runs, name
        if ending.ends == "completed":
            continue
        assert event.data["last_error"]["type"] == ending.error, name
        assert event.data["cause"] == ending.cause, name
        assert event.data["dead_lettered"] == (ending.ends == "dead"), name
        assert event.data["total_attempts"] == ending.runs, name
        if ending.ends == "dead":
            letter = fleet.bridge.dead_letters.get(job)
            assert (letter.attempt, letter.error_type) == (ending.runs, ending.error), name
            assert letter.cause == ending.cause, name
            assert (letter.queue, len(letter.errors)) == (fleet.queue, ending.runs), name
        else:
            assert_not_kept(fleet, job)
    assert fleet.bridge.broker_letters.list().letters == ()


def assert_not_kept(fleet: Fleet, job: str) -> None:
    with pytest.raises(LetterNotFound):
        fleet.bridge.dead_letters.get(job)


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
    "one millisecond": ({"initial_interval": "PT0.001S"}, [0.001, 0.002]),
}


@pytest.mark.requirement("RET-02", "RET-04", "RET-11", "RET-14")
def test_a_retry_comes_after_its_delay_and_never_before(fleet: Fleet) -> None:
    sent = {
        name: fleet.send("act", raises(OSError, "down"), policy={**policy, "max_attempts": len(delays) + 1})
        for name, (policy, delays) in DELAYS.items()
    }
    for name, (_, delays) in DELAYS.items():
        job = sent[name]
        end(fleet, job)
        assert [data["delay_ms"] for data in retries(fleet, job)] == [d * 1000 for d in delays], name
        for gap, delay in zip(gaps(fleet, job), delays, strict=True):
            assert delay <= gap < delay + fleet.late, name
        assert all(run.at >= run.due for run in fleet.runs(job)[1:]), name


@pytest.mark.requirement("RET-05", "RET-06")
def test_jitter_stays_within_its_bounds_and_the_cap(fleet: Fleet) -> None:
    policy = {"jitter": True, "initial_interval": "PT0.4S", "max_interval": "PT0.5S", "max_attempts": 2}
    planned = []
    for job in [fleet.send("act", raises(OSError), "ok", policy=policy) for _ in range(12)]:
        assert end(fleet, job).type == "job.completed"
        assert 0.2 <= gaps(fleet, job)[0] < 0.5 + fleet.late
        (data,) = retries(fleet, job)
        assert data["next_retry_at"] == fleet.runs(job)[1].ojs["next_retry_at"]
        planned.append(data["delay_ms"])
    assert len(set(planned)) > 1
    assert all(200 <= delay <= 500 for delay in planned)


@pytest.mark.requirement("RET-04", "RET-08", "RET-11")
def test_a_hint_replaces_the_delay_and_is_still_capped(fleet: Fleet) -> None:
    hint = fleet.send("act", raises(Retry, "a.b", after="PT0.5S"), "ok")
    capped = fleet.send("act", raises(Retry, "a.b", after="PT1H"), "ok", policy={"max_interval": "PT0.5S"})
    zero = fleet.send("act", raises(Retry, "a.b", after="PT0S"), "ok", policy={"initial_interval": "PT30S"})
    for job, delay in ((hint, 0.5), (capped, 0.5), (zero, 0.0)):
        assert end(fleet, job).type == "job.completed"
        assert delay <= gaps(fleet, job)[0] < delay + fleet.late


def test_a_service_that_is_asked_too_often_says_when_to_come_back(fleet: Fleet) -> None:
    """In seconds or as a date; a longer time than `max_interval` is cut, and nonsense leaves the backoff."""
    date = (datetime.now(timezone.utc) + timedelta(seconds=3)).replace(microsecond=0)
    with answering() as service:
        hints = {"1": 1.0, format_datetime(date, usegmt=True): 0.0, "3600": 1.5, "soon": 0.1}
        sent = {
            hint: fleet.send(
                "act_kept",
                calls("urllib.request.urlopen", f"{service.url}/{status}?{urlencode({'Retry-After': hint})}"),
                policy={"max_interval": "PT1.5S" if hint == "3600" else "PT1M"},
            )
            for hint, status in zip(hints, (429, 429, 503, 429), strict=True)
        }
        for hint, delay in hints.items():
            event = end(fleet, sent[hint])
            unavailable = "external.unavailable" if hint == "3600" else "external.rate_limited"
            assert event.data["last_error"]["type"] == unavailable, hint
            assert delay <= gaps(fleet, sent[hint])[0] < delay + fleet.late + 3, hint
    _, again = fleet.runs(sent[format_datetime(date, usegmt=True)])
    assert again.at >= date.timestamp()
    errors = fleet.bridge.dead_letters.get(sent["soon"]).errors
    assert [error["details"] for error in errors] == [{"ignored": "Retry-After: 'soon'"}] * 2


@pytest.mark.requirement("RET-10")
def test_policies_of_app_task_and_job_are_merged_field_by_field(fleet: Fleet) -> None:
    plain = fleet.send("act_kept", raises(OSError))
    more = fleet.send("act_kept", raises(OSError), policy={"max_attempts": 4})
    other = fleet.send(
        "act_kept", raises(OSError), policy={"on_exhaustion": "discard", "initial_interval": "PT0.4S"}
    )
    for job, delays, kept in ((plain, [100], True), (more, [100, 200, 400], True), (other, [400], False)):
        assert end(fleet, job).data["dead_lettered"] is kept
        assert [data["delay_ms"] for data in retries(fleet, job)] == delays
        assert len(fleet.runs(job)) == len(delays) + 1
    assert fleet.runs(more)[3].ojs["retry"] == {"max_attempts": 4}
    assert fleet.bridge.dead_letters.get(more).retry == {"max_attempts": 4}


@pytest.mark.requirement("RET-14", "RET-15", "DLQ-001", "DLQ-002")
def test_the_message_keeps_ten_errors_and_the_dead_letter_all_of_them(fleet: Fleet) -> None:
    policy = {"max_attempts": 14, "backoff_strategy": "none", "initial_interval": "PT0.01S", **KEEP}
    job = fleet.send("act", raises_its_number("run", padding=3000), policy=policy)
    end(fleet, job)
    runs = fleet.runs(job)
    assert [(run.attempt, run.retries) for run in runs] == [(n + 1, n) for n in range(14)]
    for n, run in enumerate(runs[1:], 1):
        assert [error["attempt"] for error in run.ojs["errors"]] == list(range(max(1, n - 9), n + 1))
        assert run.ojs.get("errors_dropped", 0) == max(0, n - 10)
    assert max(size(run.ojs) for run in runs) <= 16 * 1024
    letter = fleet.bridge.dead_letters.get(job)
    assert [error["attempt"] for error in letter.errors] == list(range(1, 15))
    assert [error["message"].split(" x")[0] for error in letter.errors] == [f"run {n}" for n in range(1, 15)]
    discarded = fleet.send("act", raises(OSError), policy={**policy, "on_exhaustion": "discard"})
    end(fleet, discarded)
    for ended in (job, discarded):
        eventually(
            lambda ended=ended: fleet.bridge.store.letters.kept_errors(ended) == [], what="an empty history"
        )


def size(state: dict[str, Any]) -> int:
    """The length of a header."""
    return len(json.dumps(state, separators=(",", ":")))


@pytest.mark.requirement("RET-14")
def test_an_error_entry_has_the_fields_of_the_spec(fleet: Fleet) -> None:
    job = fleet.send("act", raises(Retry, "a.b", "m", details={"order": 7}), "ok")
    end(fleet, job)
    (entry,) = fleet.runs(job)[1].ojs["errors"]
    assert {name: entry[name] for name in ("attempt", "type", "message", "code", "details")} == {
        "attempt": 1, "type": "a.b", "message": "m", "code": "RETRY", "details": {"order": 7},
    }  # fmt: skip
    assert entry["timestamp"].endswith("Z")
    assert entry["backtrace"][-1].endswith("in raises")


def test_a_group_is_one_fault_at_one_place_of_the_users_own_code(fleet: Fleet) -> None:
    """Its frame is not the framework's, nor the bridge's, nor one of what the user's code has called."""
    steps = (
        raises(KeyError, "order"),
        raises(KeyError, "order"),
        raises(KeyError, "customer"),
        calls("json.loads", "["),
    )
    jobs = [fleet.send("act_kept", each, policy={"max_attempts": 1}) for each in steps]
    jobs.append(fleet.send("act", steps[0], policy={"max_attempts": 1, **KEEP}))
    for job in jobs:
        end(fleet, job)
    letters = [fleet.bridge.dead_letters.get(job) for job in jobs]
    frames = {frame_of(letter.type, letter.backtrace, letter.framework) for letter in letters}
    assert frames == {"contract/steps.py in raises", "contract/steps.py in calls"}
    first, same, *others = (letter.group for letter in letters)
    assert first == same
    assert len({first, *others}) == 4


def test_huge_and_unserialisable_errors_are_cut_and_the_header_stays_in_its_budget(fleet: Fleet) -> None:
    policy = {"max_attempts": 12, "initial_interval": "PT0.001S", "max_interval": "PT0.001S", **KEEP}
    job = fleet.send("act", raises_more_each_time(), policy=policy)
    end(fleet, job)
    assert max(size(run.ojs) for run in fleet.runs(job)) <= 16 * 1024
    assert fleet.runs(job)[1].ojs["errors"][0]["details"] == {"object": "<opaque>", "blob": ""}
    letter = fleet.bridge.dead_letters.get(job)
    assert len(letter.errors) == 12
    assert "[cut]" in letter.errors[-1]["message"]


@pytest.mark.requirement("RET-11")
def test_a_delivery_that_comes_early_waits(fleet: Fleet) -> None:
    due = format_time(fleet.bridge.engine.now() + timedelta(seconds=1.5))
    job = fleet.send("act", "ok", state={"v": 1, "attempt": 3, "next_retry_at": due})
    assert end(fleet, job).data["attempt"] == 3
    (run,) = fleet.runs(job)
    assert run.due <= run.at < run.due + fleet.late


@pytest.mark.requirement("RET-14", "DLQ-003")
def test_a_replay_starts_afresh_under_its_own_id_with_the_whole_history(fleet: Fleet) -> None:
    job = fleet.send(
        "act_kept", raises(OSError, "one"), raises(OSError, "two"), raises(OSError, "three"), "ok"
    )
    end(fleet, job)
    assert fleet.bridge.dead_letters.replay(job).replay_count == 1
    assert end(fleet, job, nth=2).type == "job.completed"
    runs = fleet.runs(job)
    assert [(run.attempt, run.retries) for run in runs] == [(1, 0), (2, 1), (1, 0), (2, 1)]
    assert [error["message"] for error in runs[2].ojs["errors"]] == ["one", "two"]
    assert [error["message"] for error in runs[3].ojs["errors"]] == ["one", "two", "three"]
    assert [run.ojs["replay_count"] for run in runs[2:]] == [1, 1]
    assert_not_kept(fleet, job)


def test_a_replay_that_fails_again_is_a_dead_letter_again(fleet: Fleet) -> None:
    job = fleet.send("act_kept", raises(OSError, "down"))
    for replays in (1, 2):
        end(fleet, job, nth=replays)
        fleet.bridge.dead_letters.replay(job)
    end(fleet, job, nth=3)
    letter = fleet.bridge.dead_letters.get(job)
    assert (letter.replay_count, letter.attempt, len(letter.errors)) == (2, 2, 6)
    assert len(fleet.runs(job)) == 6


def test_an_operation_tells_what_became_of_its_jobs(fleet: Fleet) -> None:
    """They succeed, after a failed attempt, too, or die again; its letters are those that died."""
    lives = {
        "succeeds": ("ok",),
        "recovers": (raises(OSError, "three"), "ok"),
        "dies": (raises(OSError, "three"), raises(OSError, "four")),
    }
    sent = {
        name: fleet.send("act_kept", raises(OSError, "one"), raises(OSError, "two"), *later)
        for name, later in lives.items()
    }
    for job in sent.values():
        end(fleet, job)
    operations = fleet.bridge.operations
    done = operations.run(operations.begin("replay", ids=[*sent.values()]))
    for job in sent.values():
        end(fleet, job, nth=2)
    jobs = Jobs(sent=3, waiting=0, running=0, succeeded=2, discarded=0, died_again=1, failed=2)
    eventually(lambda: operations.get(done.id).jobs == jobs, what="what became of the jobs")
    [letter], _ = operations.died_again(done.id)
    assert letter.id == sent["dies"]


@pytest.mark.requirement("DLQ-R002")
def test_a_replay_with_other_arguments_on_another_queue(fleet: Fleet) -> None:
    job = fleet.send("act_kept", raises(OSError, "one"), raises(OSError, "two"), meta={"tenant": "acme"})
    end(fleet, job)
    letter = fleet.bridge.dead_letters.get(job)
    assert letter.reading.args == [raises(OSError, "one"), raises(OSError, "two")]
    assert letter.reading.kwargs == {}
    assert letter.reading.meta["tenant"] == "acme"
    args = [raises_what_is_named(DeadLetter, "a.b", name="word")]
    changes: dict[str, Any] = {"args": args, "kwargs": {"word": "given"}}
    fleet.bridge.dead_letters.replay(job, **changes, queue=fleet.other_queue, meta={"tenant": "other"})
    assert end(fleet, job, nth=2).data["queue"] == fleet.other_queue
    letter = fleet.bridge.dead_letters.get(job)
    assert [entry["message"] for entry in letter.errors] == ["one", "two", "given"]
    assert (letter.queue, letter.reading.meta["tenant"]) == (fleet.other_queue, "other")
    assert (letter.reading.args, letter.reading.kwargs) == (changes["args"], changes["kwargs"])
    publisher = fleet.bridge.engine.context.publishers[fleet.framework]
    assert (publisher.knows("act_kept"), publisher.knows("gone")) == (True, False)


#: What a handler returns first, the attempts of the runs, and the end: its event, and what it says.
RETURNED: dict[str, tuple[Any, list[int], str, dict[str, Any]]] = {
    "Discard": (an(Discard, "a.b", "no"), [1], "job.discarded", {"cause": "handler", "dead_lettered": False}),
    "DeadLetter": (an(DeadLetter, "a.b"), [1], "job.discarded", {"cause": "handler", "dead_lettered": True}),
    "Fail": (an(Fail, "a.b"), [1], "job.discarded", {"response_code": "FAIL", "dead_lettered": False}),
    "Retry": (an(Retry, "a.b", after="PT0.1S"), [1, 2], "job.completed", {"attempt": 2}),
    "Snooze": (an(Snooze, "PT0.1S"), [1, 1], "job.completed", {"attempt": 1}),
    "an own error": (an(Declined, "no"), [1], "job.discarded", {"response_code": "DISCARD"}),
    "an error object": ({"type": "a.b", "message": "no", "code": "FAIL"}, [1], "job.completed", {}),
    "another object": ({"type": "a.b", "message": "no", "order": 7}, [1], "job.completed", {}),
}


@pytest.mark.requirement("RET-08")
def test_a_response_that_is_returned_counts_as_if_it_were_raised(fleet: Fleet) -> None:
    sent = {name: fleet.send("act", returns(value), "ok") for name, (value, *_) in RETURNED.items()}
    for name, (_, runs, ends, says) in RETURNED.items():
        told = end(fleet, sent[name])
        assert (told.type, attempts(fleet, sent[name])) == (ends, runs), name
        assert says.items() <= told.data.items(), name
    # A worker says it once for each task.
    eventually(lambda: fleet.worker.log.count("Raise what is an error.") == 1, what="the warning")
