"""Messages that no worker can carry out, and errors that fight back: they are kept, and harm nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.hostile import ERRORS
from tests.contract.steps import raises, raises_hostile
from tests.servers import Postgres, eventually

STATE, POLICY, ANY = "validation.state_invalid", "validation.retry_policy_invalid", "validation."
#: What differs from a good message: its state, and the framework's count of retries; and the error type.
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no JSON": ({"ojs": "{"}, STATE),
    "no object": ({"ojs": "[1]"}, STATE),
    "another type": ({"ojs": 17}, STATE),
    "no version": ({"ojs": "{}"}, STATE),
    "an unknown version": ({"ojs": '{"v": 99, "attempt": 1}'}, STATE),
    "errors of another shape": ({"ojs": '{"v": 1, "attempt": 1, "errors": "many"}'}, STATE),
    "a time that is none": ({"ojs": '{"v": 1, "next_retry_at": "soon"}'}, STATE),
    "an invalid policy": ({"ojs": '{"v": 1, "retry": {"max_attempts": -5}}'}, POLICY),
    "an infinite policy": ({"ojs": '{"v": 1, "retry": {"backoff_coefficient": 1e999}}'}, ANY),
    "a duration of many digits": (
        {"ojs": f'{{"v": 1, "retry": {{"initial_interval": "P{"1" * 100_000}Y"}}}}'},
        POLICY,
    ),
    "a deep policy": ({"ojs": f'{{"v": 1, "retry": {"[" * 950}{"]" * 950}}}'}, STATE),
    "a fence that no store holds": ({"ojs": f'{{"v": 1, "fence": {10**17}}}'}, STATE),
    "a fence below zero": ({"ojs": '{"v": 1, "fence": -1}'}, STATE),
    "an attempt of 400 digits": ({"ojs": f'{{"v": 1, "attempt": {"9" * 400}}}'}, STATE),
    "a count below zero": ({"retries": -1}, ANY),
    "a huge count": ({"retries": 10**17}, ANY),
    "a count that is text": ({"retries": "many"}, ANY),
}
CELERY: dict[str, dict[str, Any]] = {
    "a count that is a list": {"retries": [1]},
    "a count that is a fraction": {"retries": 1.5},
    "a count that is true": {"retries": True},
    "bytes that are no text": {"ojs": b"\xff\xfe"},
    "an id that is a list": {"id": ["x"]},
    "an eta that is no time": {"eta": "soon"},
    "an eta that is an object": {"eta": {"at": 1}},
    "an expiry that is no time": {"expires": "soon"},
    "one time limit": {"timelimit": 5},
    "time limits that are text": {"timelimit": ["x", "y"]},
    "a late job's time limits": {"timelimit": 5, "eta": "2026-01-01T00:00:00"},
    "stamps that are none": {"stamped_headers": 5},
    "a header called headers": {"headers": 5},
    "no JSON in the body": {"body": b"{"},
    "an unknown content": {"body": b"x", "content_type": "application/x-nonsense"},
    "an object for a body": {"body": b'{"a": 1}'},
    "an empty body": {"body": b"[]"},
    "arguments that are text": {"body": b'["x", {}, {}]'},
    "arguments without names": {"body": b"[[], [], {}]"},
    "a list of callbacks": {"body": b"[[], {}, [1]]"},
    "a third part that is a request": {"body": b'[[], {}, {"delivery_info": null}]'},
}
DEEP: Any = []
for _ in range(700):
    DEEP = [DEEP]
#: More than a message has room for.
LONG = ["x" * 250] * 100
#: A state that is due in a far future, and has no room in a message.
FAR = {"v": 1, "next_retry_at": "9999-01-01T00:00:00.000Z", "retry": {"non_retryable_errors": LONG}}
#: The options of a Dramatiq message.
DRAMATIQ: dict[str, dict[str, Any]] = {
    "a state that is no text": {"ojs": [1]},
    "a deep policy that is no text": {"ojs": {"v": 1, "retry": {"max_attempts": DEEP}}},
    "a policy that is none": {"ojs_retry": {"max_attempts": float("nan")}},
    "an unread policy": {"ojs_retry": {"max_attempts": -1}},
    "a broken pipeline": {"pipe_target": {"x": 1}},
    "an early job that no message can carry": {"ojs": FAR},
}
#: What Dramatiq's own threads would end at.
AS_THEY_CAME: dict[str, dict[str, Any]] = {
    "no JSON": {"body": b"{"},
    "no text": {"body": b"\xff\xfe"},
    "no message": {"body": b"[]"},
    "arguments that are none": {"args": 5},
    "options that are a list": {"options": [1]},
    "options that are a number": {"options": 5},
    "an actor without a name": {"actor_name": ["x"]},
    "a queue that nobody consumes": {"queue_name": "elsewhere"},
    "a queue without a name": {"queue_name": None},
    "an id that is a list": {"message_id": ["x"]},
}
#: Times of Celery's messages, and times and ages of Dramatiq's.
EDGES = ["0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59.999999-23:00", "9999-12-31T23:59:59.999999Z"]
AGES = [(253402300799999, 1), (-62135596800000, None), (10**400, 1e308), (253402300799999, 1e308), (1e308, 1)]
#: What runs all the same.
HARMLESS: dict[str, dict[str, Any]] = {
    "a timestamp that is none": {"message_timestamp": "then"},
    "an eta that is none": {"options": {"eta": "soon"}},
    "an age that is none": {"options": {"max_age": "old"}},
    "a time limit that is none": {"options": {"time_limit": "long"}},
    "an id that is a number": {"message_id": 42},
    "throws that are none": {"options": {"throws": "x"}},
    "a backoff that is no number": {"options": {"min_backoff": {"x": 1}}},
    "a limit that is no number": {"options": {"max_retries": "many"}},
}


def hostile(framework: str) -> dict[str, tuple[dict[str, Any], str]]:
    """The differences of messages that become dead letters, and the types of their errors."""
    if framework == "celery":
        return {**UNREADABLE, **{name: (differs, ANY) for name, differs in CELERY.items()}}
    options = {**UNREADABLE, **{name: (differs, ANY) for name, differs in DRAMATIQ.items()}}
    return {name: ({"options": differs}, error) for name, (differs, error) in options.items()}


def assert_healthy(fleet: Fleet) -> None:
    jobs = [fleet.send("act", "ok") for _ in range(20)]
    assert {end(fleet, job).type for job in jobs} == {"job.completed"}


@pytest.mark.requirement("RET-16")
def test_a_message_that_nobody_can_carry_out_is_a_dead_letter_and_the_rest_runs(fleet: Fleet) -> None:
    sent = {name: fleet.put(**differs)[0] for name, (differs, _) in hostile(fleet.framework).items()}
    assert_healthy(fleet)
    store = fleet.bridge.store
    assert store is not None
    for name, (_, error_type) in hostile(fleet.framework).items():
        job = sent[name]
        eventually(lambda job=job: store.letters.get(job), what=f"the dead letter of {name}")
        letter = store.letters.get(job)
        assert letter is not None
        assert letter.error_type.startswith(error_type), name
        assert (letter.type, letter.queue, letter.cause) == ("act", fleet.queue, "invalid"), name
        json.dumps(letter.to_ojs())
        if fleet.framework == "celery" and name in UNREADABLE:
            assert letter.message["headers"].items() >= UNREADABLE[name][0].items(), name
        assert fleet.runs(job) == [], name
        fleet.bridge.dead_letters.delete(job)


@pytest.mark.requirement("RET-16")
def test_a_policy_s_word_that_only_a_newer_release_knows_buries_no_job(fleet: Fleet) -> None:
    """The job runs under the other words, and retry, dead letter and replay carry that word on."""
    retry = {"max_attempts": 2, "on_exhaustion": "dead_letter", "of_a_newer_release": {"for": "PT1H"}}
    differs = {"ojs": json.dumps({"v": 1, "retry": retry})}
    step = raises(OSError, "down")
    job, _ = fleet.put(step, **(differs if fleet.framework == "celery" else {"options": differs}))
    assert end(fleet, job).data["total_attempts"] == 2
    assert [run.ojs["retry"] for run in fleet.runs(job)] == [retry] * 2
    assert fleet.bridge.dead_letters.get(job).retry == retry
    fleet.bridge.dead_letters.replay(job, retry={"max_attempts": 1})
    assert end(fleet, job, nth=2).data["total_attempts"] == 1
    assert fleet.runs(job)[2].ojs["retry"] == {**retry, "max_attempts": 1}


@pytest.mark.requirement("RET-16")
@pytest.mark.parametrize("fleet", SERVED, indirect=True)
def test_a_message_that_can_be_no_dead_letter_lies_in_the_dead_queue_as_it_came(fleet: Fleet) -> None:
    hostile = {"celery": [{"id": None}], "dramatiq": [*AS_THEY_CAME.values()]}[fleet.framework]
    bodies = sorted(fleet.put(**differs)[1] for differs in hostile)
    assert_healthy(fleet)
    # RabbitMQ takes a moment to put back what a look has taken.
    eventually(lambda: sorted(fleet.dead_bodies()) == bodies, what="the dead messages")


@pytest.mark.requirement("RET-16")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_job_that_the_store_cannot_write_is_a_dead_letter_of_its_broker_and_the_rest_runs(
    made: Callable[..., Fleet], kind: str, postgres: Postgres, unique: str
) -> None:
    """It is no outage, in which all jobs would wait."""
    postgres.execute(f"CREATE DATABASE {unique} ENCODING 'LATIN1' TEMPLATE template0")
    fleet = made(kind, store=postgres.url_of(unique))
    strange = [fleet.send("act", "ok", id=f"\u0437\u0430\u043a\u0430\u0437-{unique}-{n}") for n in range(10)]
    named = fleet.send("act", "ok", id=f"caf\u00e9-{unique}")
    worker = fleet.start(2)
    assert_healthy(fleet)
    eventually(lambda: fleet.dead() == {*strange}, what="the dead letters")
    assert [len(fleet.runs(job)) for job in (*strange, named)] == [0] * 10 + [1]
    assert worker.log.count("has the encoding LATIN1") >= 1
    assert worker.stop() == 0
    fleet.close()
    postgres.execute(f"DROP DATABASE {unique} WITH (FORCE)")


@pytest.mark.parametrize("fleet", [kind for kind in SERVED if kind.startswith("dramatiq")], indirect=True)
def test_a_message_that_is_odd_but_harmless_runs(fleet: Fleet) -> None:
    jobs = {name: fleet.put(**differs)[0] for name, differs in HARMLESS.items()}
    for name, job in jobs.items():
        eventually(lambda job=job: fleet.runs(job), what=name)


@pytest.mark.parametrize("fleet", SERVED, indirect=True)
def test_a_job_from_the_end_of_all_times_becomes_a_dead_letter_like_others(fleet: Fleet) -> None:
    """UTC cannot hold the first of these times, and nothing can hold the others."""
    state = {"ojs": '{"v": 1, "retry": {"max_attempts": 1, "on_exhaustion": "dead_letter"}}'}
    sent = {
        "celery": [state | {"ojs_created_at": at} for at in EDGES],
        "dramatiq": [{"message_timestamp": at, "options": state | {"max_age": age}} for at, age in AGES],
    }[fleet.framework]
    store = fleet.bridge.store
    assert store is not None
    for job in [fleet.put(raises(OSError, "down"), **differs)[0] for differs in sent]:
        eventually(lambda job=job: store.letters.get(job), what="the dead letter")
        json.dumps(fleet.bridge.dead_letters.get(job).to_ojs())


@pytest.mark.parametrize("fleet", ["celery-valkey"], indirect=True)
def test_a_message_that_cannot_even_be_handed_to_the_pool_is_kept_and_takes_no_place_there(
    fleet: Fleet,
) -> None:
    """RabbitMQ's client writes no header that is nested so deep; newer Pythons pickle deeper."""
    sent = [fleet.put(**{"x-deep": DEEP})[0] for _ in range(5)]
    sent.append(fleet.put(body=json.dumps([[DEEP], {}, {}]).encode())[0])
    assert_healthy(fleet)
    store = fleet.bridge.store
    assert store is not None
    for job in sent:
        eventually(lambda job=job: store.letters.get(job) or fleet.runs(job), what="a dead letter")


def test_a_state_that_no_message_can_carry_any_further_is_a_dead_letter(fleet: Fleet) -> None:
    huge = {"max_attempts": 9, "non_retryable_errors": LONG}
    state = {"ojs": json.dumps({"v": 1, "attempt": 1, "retry": huge})}
    job, _ = fleet.put(raises(OSError), **({"options": state} if fleet.framework == "dramatiq" else state))
    told = end(fleet, job).data
    assert (told["cause"], told["last_error"]["type"]) == ("invalid", "builtins.OSError")
    assert "cannot be followed up" in told["reason"]
    assert len(fleet.runs(job)) == 1
    assert fleet.bridge.dead_letters.get(job).retry == huge


def assert_ends_as_decided(fleet: Fleet) -> dict[str, str]:
    """Let jobs fail with each hostile error; each is retried once, and has one letter then."""
    kept = {"max_attempts": 2, "on_exhaustion": "dead_letter"}
    jobs = {name: fleet.send("act", raises_hostile(name), policy=kept) for name in ERRORS}
    assert_healthy(fleet)
    ends = {name: end(fleet, job).data for name, job in jobs.items()}
    assert {n: (e["cause"], e["dead_lettered"]) for n, e in ends.items() if e["cause"] != "exhausted"} == {}
    for name, job in jobs.items():
        eventually(lambda job=job: fleet.types(job).count("dead_letter.added") == 1, what=f"letter of {name}")
        assert attempts(fleet, job) == [1, 2], name
        assert sorted(fleet.types(job)) == [
            *("dead_letter.added", "job.discarded", "job.failed", "job.failed"),
            *("job.retrying", "job.started", "job.started"),
        ], name
    return jobs


@pytest.mark.requirement("RET-01")
def test_an_error_that_fights_back_is_retried_and_kept_as_any_other(fleet: Fleet) -> None:
    jobs = assert_ends_as_decided(fleet)
    letters = {letter.id: letter for letter in fleet.bridge.dead_letters.list(limit=1000).letters}
    for name, job in jobs.items():
        json.dumps(letters[job].to_ojs())
        assert [error["attempt"] for error in letters[job].errors] == [1, 2], name


@pytest.mark.requirement("RET-01")
def test_an_error_that_fights_back_is_kept_by_the_broker_without_a_store(storeless: Fleet) -> None:
    jobs = assert_ends_as_decided(storeless)

    def without_one_letter() -> dict[str, int]:
        letters = [letter.id for letter in storeless.bridge.broker_letters.list(limit=1000).letters]
        return {name: letters.count(job) for name, job in jobs.items() if letters.count(job) != 1}

    # The broker has a message in its dead queue a moment after the listeners have heard of it.
    with suppress(TimeoutError):
        eventually(lambda: not without_one_letter())
    assert without_one_letter() == {}
