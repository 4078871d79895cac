"""A job's retry state and its wire form, the `ojs` header (spec section 10)."""

import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ojs_bridge.errors import InvalidState
from ojs_bridge.rules.decision import SnoozeUntil, decide
from ojs_bridge.rules.failures import (
    MAX_DETAILS,
    MAX_MESSAGE,
    ErrorMap,
    Failure,
    Snoozed,
    outcome_of,
    safe_repr,
    sound_json,
)
from ojs_bridge.rules.job import (
    HEADER_BUDGET,
    MAX_COUNT,
    MAX_DEPTH,
    MAX_HEADER,
    MIN_HEADER_BUDGET,
    MIN_HISTORY,
    ErrorEntry,
    Job,
    decode,
    decoded,
    encode,
    format_time,
    parse_time,
)
from ojs_bridge.rules.policy import RetryPolicy
from ojs_bridge.rules.responses import Fail

NOW = datetime(2026, 11, 21, 10, 0, 2, tzinfo=timezone.utc)
BARE = Job(id="j-1", type="billing.charge", queue="default")
FAILURE = Failure("external.timeout", "slow", details={"ms": 30_000}, backtrace=("a.py:1 in f",))


def entry(attempt: int, **fields: Any) -> ErrorEntry:
    """Return an error entry as the spec writes it."""
    return {
        "attempt": attempt,
        "type": "external.timeout",
        "message": "slow",
        "code": "RETRY",
        "timestamp": "2026-11-21T10:00:02.000Z",
        "details": {},
        **fields,
    }


def failed(job: Job, times: int, failure: Failure = FAILURE) -> Job:
    """Return the job after so many failed attempts."""
    for _ in range(times):
        job = job.failed(failure, at=NOW, next_at=NOW)
    return job


def round_trip(job: Job, **limits: int) -> Job:
    """Return the job as the next worker sees it, whose framework counted along."""
    text = encode(job, **limits).text
    return decode(
        text, Job(id=job.id, type=job.type, queue=job.queue, attempt=job.attempt, expires=job.expires)
    )


@pytest.mark.requirement("RET-14")
def test_an_error_entry() -> None:
    """Section 10.1 has the fields; the backtrace comes in addition."""
    assert BARE.failed(FAILURE, at=NOW).errors == (
        entry(1, details={"ms": 30_000}, backtrace=["a.py:1 in f"]),
    )


@pytest.mark.requirement("RET-14")
def test_the_header() -> None:
    """Each field has its wire form."""
    job = BARE._replace(retry={"max_attempts": 10}, created_at=NOW, errors_dropped=2, replay_count=1)
    text = encode(failed(job, 1, Failure("a.b"))).text
    assert json.loads(text) == {
        "v": 1,
        "attempt": 2,
        "retry": {"max_attempts": 10},
        "errors": [entry(1, type="a.b", message="", replay=1)],
        "errors_dropped": 2,
        "next_retry_at": "2026-11-21T10:00:02.000Z",
        "created_at": "2026-11-21T10:00:02.000Z",
        "replay_count": 1,
    }


def test_a_fresh_job_says_almost_nothing() -> None:
    """Empty fields are left out, and the text is ASCII without a space."""
    assert encode(BARE).text == '{"v":1,"attempt":1}'
    assert encode(failed(BARE, 1, Failure("a.b", "\N{SNOWMAN}"))).text.isascii()


@pytest.mark.requirement("RET-14")
def test_a_job_survives_its_header() -> None:
    """The header carries its fields, and the framework's own fields come beside it."""
    job = BARE._replace(retry={"max_attempts": 10}, created_at=NOW, replay_count=3, expires=NOW)
    assert round_trip(failed(job, 5)) == failed(job, 5)


def test_a_header_may_be_an_object() -> None:
    """The options of a Dramatiq message carry an object."""
    text = encode(failed(BARE, 2)).text
    assert decode(json.loads(text), BARE._replace(attempt=3)) == failed(BARE, 2)
    assert decode(text.encode(), BARE._replace(attempt=3)) == failed(BARE, 2)


def test_unknown_fields_of_a_known_version_are_no_damage() -> None:
    """A later worker may add fields."""
    assert decode('{"v":1,"attempt":1,"colour":"blue"}', BARE) == BARE


@pytest.mark.requirement("RET-15")
@pytest.mark.parametrize(
    ("failures", "history", "kept", "dropped"),
    [
        (9, 10, list(range(1, 10)), 0),
        (10, 10, list(range(1, 11)), 0),
        (11, 10, list(range(2, 12)), 1),
        (60, 10, list(range(51, 61)), 50),
        (60, 25, list(range(36, 61)), 35),
    ],
)
def test_the_newest_errors_stay(failures: int, history: int, kept: list[int], dropped: int) -> None:
    """Section 10.1: at least the ten most recent, and a count of the others."""
    seen = round_trip(failed(BARE, failures, Failure("a.b")), history=history)
    assert [error["attempt"] for error in seen.errors] == kept
    assert seen.errors_dropped == dropped


@pytest.mark.requirement("RET-15")
def test_dropped_errors_are_counted_over_many_attempts() -> None:
    """Sixty workers count them, one after the other."""
    job = BARE
    for _ in range(60):
        job = round_trip(failed(job, 1))
    assert job.errors_dropped == 50
    assert [error["attempt"] for error in job.errors] == list(range(51, 61))


def test_encode_says_which_errors_are_in_the_header() -> None:
    """The store can then keep the others whole."""
    job = failed(BARE, 12)
    trimmed = encode(job).job
    assert trimmed.errors == job.errors[2:]
    assert trimmed.errors_dropped == 2


@pytest.mark.requirement("RET-15")
def test_ten_errors_of_the_largest_size_fit() -> None:
    """Each error is cut, none is dropped, and all are still readable."""
    largest = Failure(
        "t" * 255, "m" * MAX_MESSAGE, "RETRY", {"d": "d" * (MAX_DETAILS - 20)}, backtrace=("f" * 200,) * 50
    )
    job = failed(BARE, 10, largest)
    header = encode(job, budget=MIN_HEADER_BUDGET)
    text, trimmed = header.text, header.job
    assert len(text) <= MIN_HEADER_BUDGET
    assert trimmed.errors == job.errors
    seen = round_trip(job, budget=MIN_HEADER_BUDGET)
    assert [error["attempt"] for error in seen.errors] == list(range(1, 11))
    assert {error["code"] for error in seen.errors} == {"RETRY"}
    assert all(error["message"].startswith("mmmm") for error in seen.errors)
    assert all(error["details"] == {"cut": True} for error in seen.errors)


def test_a_cut_error_still_says_which_life_it_belongs_to() -> None:
    """If not, it would pass for the first life's error of the same attempt."""
    job = failed(failed(BARE, 1).replayed(), 1, Failure("a.b", details={"d": "d" * 20_000}))
    assert [(error.get("replay"), error["attempt"]) for error in round_trip(job).errors] == [
        (None, 1),
        (1, 1),
    ]


def test_a_small_error_beside_a_large_one_stays_whole() -> None:
    """Only texts that are too long are cut."""
    job = failed(failed(BARE, 1), 1, Failure("a.b", details={"d": "d" * 20_000}))
    first, second = round_trip(job).errors
    assert first == job.errors[0]
    assert second["details"] == {"cut": True}


@pytest.mark.requirement("RET-15")
def test_a_long_history_that_does_not_fit_falls_back_to_ten() -> None:
    """The header never has fewer than ten."""
    job = failed(BARE, 2000, Failure("a.b", "m" * 100))
    header = encode(job, history=2000)
    text, trimmed = header.text, header.job
    assert len(text) <= HEADER_BUDGET
    assert len(json.loads(text)["errors"]) == len(trimmed.errors) == MIN_HISTORY
    assert trimmed.errors_dropped == json.loads(text)["errors_dropped"] == 1990


def test_a_policy_too_large_for_any_header() -> None:
    """The policy cannot be cut; the job is refused where it is enqueued."""
    job = BARE._replace(retry={"non_retryable_errors": ["a.b" * 10] * 1000})
    with pytest.raises(InvalidState, match=r"^the job's retry state needs \d+ bytes, its budget is 16384$"):
        encode(job)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
large = st.sampled_from(["x", "\0", "é", "\N{SNOWMAN}", "\N{PILE OF POO}", '"\\', "\ud800"]).flatmap(
    lambda char: st.integers(0, 20_000).map(lambda times: char * times)
)
ENTRY_KEYS = ["attempt", "type", "message", "code", "timestamp", "details", "backtrace", "replay"]
any_value = json_values | large | st.lists(large, max_size=3)
foreign_entries = st.dictionaries(
    st.sampled_from(ENTRY_KEYS) | st.text(max_size=8) | large, any_value, max_size=8
)
times = st.datetimes(timezones=st.just(timezone.utc)).map(lambda at: at.replace(microsecond=0))
jobs = st.builds(
    Job,
    id=st.just("j-1"),
    type=st.just("billing.charge"),
    queue=st.just("default"),
    attempt=st.integers(1, MAX_COUNT),
    retry=st.none() | st.just({"max_attempts": 5}),
    errors=st.lists(foreign_entries, max_size=14).map(tuple),
    errors_dropped=st.integers(0, 10**6),
    next_retry_at=st.none() | times,
    created_at=st.none() | times,
    replay_count=st.integers(0, 99),
    fence=st.integers(0, MAX_COUNT),
)


@pytest.mark.requirement("RET-15")
@settings(max_examples=50)
@given(jobs, st.sampled_from([MIN_HEADER_BUDGET, HEADER_BUDGET]))
def test_no_header_is_over_budget(job: Job, budget: int) -> None:
    """Ten entries remain, whatever they hold, and the rest of the state is untouched."""
    header = encode(job, budget=budget)
    text, trimmed = header.text, header.job
    assert len(text.encode()) <= budget
    seen = round_trip(job, budget=budget)
    assert len(seen.errors) == len(trimmed.errors) == min(len(job.errors), MIN_HISTORY)
    assert seen.errors_dropped == job.errors_dropped + len(job.errors) - len(seen.errors)
    assert seen._replace(errors=(), errors_dropped=0) == job._replace(errors=(), errors_dropped=0)


@settings(max_examples=50)
@given(jobs)
def test_what_fits_is_not_changed(job: Job) -> None:
    """With enough room the newest entries are carried as they are, but for lone surrogates."""
    carried = json.loads(sound_json(json.dumps(job.errors[-MIN_HISTORY:])))
    written = json.loads(sound_json(encode(job, budget=10**8).text))
    assert written.get("errors", []) == carried


@settings(max_examples=50)
@given(jobs)
def test_encoding_again_changes_nothing(job: Job) -> None:
    """A redelivered message is not worn down."""
    once = round_trip(job)
    assert round_trip(once) == once


LONG = "x" * MAX_HEADER


@pytest.mark.parametrize(
    "state", [f'"{LONG}"', {"v": 1, "errors": [{"message": LONG}]}], ids=["text", "errors"]
)
def test_a_header_that_is_too_long_is_not_read(state: object) -> None:
    """The error has its beginning, and the rule."""
    said = r"^the ojs header has [0-9,]+ bytes, and this worker reads 1,048,576 at most"
    with pytest.raises(InvalidState, match=said) as error:
        decode(state, BARE)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["chain", "operation"])
def test_a_name_in_a_header_has_a_bound(name: str) -> None:
    with pytest.raises(InvalidState, match=f"^the ojs header's {name} must have at most 255 characters: xxx"):
        decode({"v": 1, name: "x" * 256}, BARE)


def test_a_header_of_lone_surrogates_is_refused() -> None:
    """A transport in JSON makes such a text of an escape."""
    with pytest.raises(InvalidState, match=r"^the ojs header is not JSON"):
        decode("\ud800{", BARE)


def deep(levels: int) -> dict[str, Any]:
    """Return a header of so many levels, within each other."""
    inner: Any = []
    for _ in range(levels - 4):
        inner = [inner]
    return {"v": 1, "errors": [{"details": inner}]}


DAMAGED = [
    (None, "the ojs header must be a JSON object, not NoneType"),
    (5, "the ojs header must be a JSON object, not int"),
    ([], "the ojs header must be a JSON object, not list"),
    ("[]", "the ojs header must be a JSON object, not list"),
    ("", "the ojs header is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ('{"v":1', "the ojs header is not JSON: Expecting ',' delimiter: line 1 column 7 (char 6)"),
    (b"\xff\xfe\xfd", "the ojs header is not JSON: "),
    ("[" * 1_000_000, "the ojs header is not JSON: "),
    ('{"v":1,"attempt":' + "9" * 5000 + "}", "the ojs header is not JSON: Exceeds the limit"),
    ({}, "the ojs header has version None, this worker reads 1"),
    ({"v": 2}, "the ojs header has version 2, this worker reads 1"),
    ({"v": "1"}, "the ojs header has version '1', this worker reads 1"),
    ({"v": True}, "the ojs header has version True, this worker reads 1"),
    ({"v": ["x"] * 1000}, "the ojs header has version ['x', 'x', "),
    ({"v": 1, "retry": []}, "the ojs header's retry must be dict, not []"),
    ({"v": 1, "retry": "{}"}, "the ojs header's retry must be dict, not '{}'"),
    ({"v": 1, "errors": {}}, "the ojs header's errors must be list, not {}"),
    ({"v": 1, "errors": [1]}, "the ojs header's errors must hold objects, not 1"),
    ({"v": 1, "errors": [None]}, "the ojs header's errors must hold objects, not None"),
    ({"v": 1, "errors_dropped": "1"}, "the ojs header's errors_dropped must be int, not '1'"),
    ({"v": 1, "errors_dropped": True}, "the ojs header's errors_dropped must be int, not True"),
    ({"v": 1, "replay_count": 1.5}, "the ojs header's replay_count must be int, not 1.5"),
    ({"v": 1, "replay_count": -(2**90)}, "the ojs header's replay_count must be an integer from 0 to 45035"),
    ({"v": 1, "errors_dropped": -5}, "the ojs header's errors_dropped must be an integer from 0 to 4503"),
    ({"v": 1, "attempt": int("9" * 400)}, "the ojs header's attempt must be an integer from 0 to 45035"),
    ({"v": 1, "fence": MAX_COUNT + 1}, "the ojs header's fence must be an integer from 0 to 45035"),
    ({"v": 1, "fence": -1}, "the ojs header's fence must be an integer from 0 to 4503599627370496, not -1"),
    ('{"v":1,"retry":' + "[" * 400 + "]" * 400 + "}", "the ojs header is nested more than 128 deep"),
    (deep(950), "the ojs header is nested more than 128 deep"),
    ({"v": 1, "created_at": 5}, "the ojs header's created_at must be str, not 5"),
    ({"v": 1, "created_at": "yesterday"}, "the ojs header's created_at is no timestamp: 'yesterday'"),
    (
        {"v": 1, "created_at": "2026-11-21T10:00:02"},
        "the ojs header's created_at is no timestamp: '2026-11-21T10:00:02'",
    ),
    (
        {"v": 1, "attempt": 1, "next_retry_at": "0001-01-01T00:00:00+01:00"},
        "the ojs header's next_retry_at is no timestamp: '0001-01-01T00:00:00+01:00'",
    ),
    (
        {"v": 1, "attempt": 1, "next_retry_at": "9999-12-31T23:59:59-01:00"},
        "the ojs header's next_retry_at is no timestamp: '9999-12-31T23:59:59-01:00'",
    ),
    ({"v": 1, "attempt": 1, "created_at": "x" * 9999}, "the ojs header's created_at is no timestamp: 'xx"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "message"), DAMAGED, ids=lambda value: safe_repr(value)[:40])
def test_a_damaged_header(state: object, message: str) -> None:
    """The error describes the damage in one short line."""
    with pytest.raises(InvalidState) as error:
        decode(state, BARE)
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
@pytest.mark.parametrize("form", [dict, json.dumps])
def test_how_deep_a_header_may_be(levels: int, form: Callable[[Any], Any]) -> None:
    """A header that was read can be written again by a process with much less room on its stack."""
    state = form(deep(levels))
    if levels > MAX_DEPTH:
        assert isinstance(decoded(state, BARE), InvalidState)
    else:
        assert json.loads(encode(decode(state, BARE)).text)["errors"] == deep(levels)["errors"]


@pytest.mark.requirement("RET-15")
def test_what_a_handler_says_is_never_too_deep_for_its_header() -> None:
    """Otherwise the words of a failure could forbid the retry of their own job."""
    for levels in (90, 101, 400, 3000):
        failure = outcome_of(Fail("a.b", details=deep(levels)), ErrorMap())
        assert isinstance(failure, Failure)
        assert round_trip(failed(BARE, 1, failure)).attempt == 2


COUNTERS = [(None, 0), (0, 0), (3, 3), (MAX_COUNT, MAX_COUNT), (-1, None), (MAX_COUNT + 1, None)]
COUNTERS += [("x", None), (True, None), (1.0, None), ([1], None), (10**4000, None), (float("nan"), None)]


@pytest.mark.parametrize(("said", "count"), COUNTERS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("state", [None, '{"v":1,"attempt":1}'])
def test_a_framework_s_own_counter(said: object, count: int | None, state: str | None) -> None:
    """A job with an unreadable counter does not run under a guessed number."""
    job = decoded(state, BARE._replace(attempt=1 + (count or 0), fence=count or 0), said)
    if count is None:
        assert isinstance(job, InvalidState)
        assert str(job).startswith(f"the message's retries must be an integer from 0 to {MAX_COUNT}, not ")
        assert len(str(job)) < 300
    else:
        assert isinstance(job, Job)
        assert job.attempt == 1 + count


FIELDS = ["v", "attempt", "retry", "errors", "errors_dropped", "next_retry_at", "created_at", "replay_count"]
timestamps = st.datetimes(timezones=st.timezones()).map(lambda at: at.isoformat())
headers = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), json_values | timestamps, max_size=8)


@given(
    json_values
    | st.text()
    | st.binary()
    | headers
    | headers.map(json.dumps)
    | headers.map(lambda h: {**h, "v": 1})
)
def test_any_header_is_read_or_invalid(state: object) -> None:
    """No input raises another error than InvalidState; a header that was read can be written again."""
    try:
        job = decode(state, BARE)
    except InvalidState as error:
        assert str(error).startswith("the ojs header")
    else:
        assert (job.id, job.type, job.queue, job.attempt) == ("j-1", "billing.charge", "default", 1)
        encode(job._replace(retry=None))


@pytest.mark.requirement("RET-14")
@pytest.mark.parametrize(
    ("native", "why"),
    [(3, "in step"), (4, "a rolled-back worker ran one more attempt"), (1, "someone else requeued it")],
)
def test_the_native_counter_wins(native: int, why: str) -> None:
    """Out of step, the due time in the header belongs to another attempt; the history stays."""
    text = encode(failed(BARE, 2)).text
    job = decode(text, BARE._replace(attempt=native))
    assert job.attempt == native
    assert job.next_retry_at == (NOW if native == 3 else None), why
    assert len(job.errors) == 2


def test_a_header_without_an_attempt_is_in_step() -> None:
    """The framework's counter decides alone."""
    assert decode({"v": 1, "next_retry_at": format_time(NOW)}, BARE).next_retry_at == NOW


def test_a_replay_starts_afresh_and_forgets_nothing() -> None:
    """The job has attempt 1 again, no due time, no expiry, the whole history, and one more replay."""
    dead = failed(BARE, 3)._replace(created_at=NOW, expires=NOW)
    replayed = dead.replayed()
    assert (replayed.attempt, replayed.next_retry_at, replayed.expires, replayed.replay_count) == (
        1,
        None,
        None,
        1,
    )
    assert (replayed.errors, replayed.created_at) == (dead.errors, NOW)
    assert round_trip(replayed) == replayed
    assert replayed.replayed().replay_count == 2


def test_errors_after_a_replay_are_told_apart() -> None:
    """Attempt numbers begin again, so each entry names its life."""
    job = failed(failed(failed(BARE, 2).replayed(), 2).replayed(), 1)
    assert [(error.get("replay", 0), error["attempt"]) for error in job.errors] == [
        (0, 1), (0, 2), (1, 1), (1, 2), (2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (NOW, "2026-11-21T10:00:02.000Z"),
        (NOW.replace(microsecond=1999), "2026-11-21T10:00:02.001Z"),
        (NOW.astimezone(timezone(timedelta(hours=2))), "2026-11-21T10:00:02.000Z"),
        (datetime(1, 1, 1, tzinfo=timezone.utc), "0001-01-01T00:00:00.000Z"),
        (datetime.max.replace(tzinfo=timezone.utc), "9999-12-31T23:59:59.999Z"),
    ],
)
def test_times_are_utc_with_milliseconds(at: datetime, text: str) -> None:
    """The form is RFC 3339 with a Z."""
    assert format_time(at) == text
    assert format_time(parse_time(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "2026-02-12T10:31:05Z",
        "2026-02-12T10:31:05.000Z",
        "2026-02-12T12:31:05+02:00",
        "2026-02-12T10:31:05.000000+00:00",
    ],
)
def test_times_that_others_write(text: str) -> None:
    """The texts are the spec's own example, another zone and another precision."""
    assert parse_time(text) == datetime(2026, 2, 12, 10, 31, 5, tzinfo=timezone.utc)


@given(st.datetimes(max_value=datetime.max.replace(microsecond=999_000), timezones=st.just(timezone.utc)))
def test_rounding_up_is_never_early_and_survives_the_wire(at: datetime) -> None:
    """The time moves by less than a millisecond."""
    decision = decide(RetryPolicy(), BARE, Snoozed(timedelta(0)), now=at, rng=random)
    assert isinstance(decision, SnoozeUntil)
    rounded = decision.at
    assert timedelta(0) <= rounded - at < timedelta(milliseconds=1)
    assert parse_time(format_time(rounded)) == rounded


@pytest.mark.parametrize(
    ("state", "native", "fence"),
    [
        (None, 1, 0),
        ({"v": 1}, 3, 2),
        ({"v": 1, "attempt": 3}, 3, 2),
        ({"v": 1, "attempt": 3, "fence": 7}, 3, 7),
        ({"v": 1, "attempt": 3, "fence": 7}, 5, 9),
        ({"v": 1, "attempt": 3}, 4, 3),
        ({"v": 1, "attempt": 3, "fence": 7}, 1, 8),
        ({"v": 1, "attempt": 3}, 1, 3),
    ],
    ids=["plain", "policy only", "implied", "said", "moved on", "implied, moved on", "requeued", "both"],
)
def test_a_fence_is_never_one_that_was_used(state: dict[str, Any] | None, native: int, fence: int) -> None:
    """The fence grows with each message of a job, also with those that a foreign process has sent."""
    bare = BARE._replace(attempt=native, fence=native - 1)
    assert (bare if state is None else decode(state, bare)).fence == fence


def test_a_fence_grows_with_everything_that_is_sent_on() -> None:
    """A retry, a snooze, an end and a replay raise it; a postponed delivery does not."""
    retried = BARE.failed(FAILURE, at=NOW, next_at=NOW)
    assert (retried.fence, retried.attempt) == (1, 2)
    snoozed = retried.snoozed(NOW)
    assert (snoozed.fence, snoozed.attempt) == (2, 2)
    waiting = snoozed.waiting(NOW)
    assert (waiting.fence, waiting.next_retry_at) == (2, NOW)
    ended = waiting.failed(FAILURE, at=NOW)
    assert (ended.fence, ended.attempt) == (3, 2)
    assert ended.replayed().fence == 4


@pytest.mark.parametrize("job", [BARE._replace(fence=4), BARE._replace(chain="abc"), BARE.snoozed(NOW)])
def test_fence_and_chain_travel(job: Job) -> None:
    """A header without them has the usual ones."""
    assert (round_trip(job).fence, round_trip(job).key) == (job.fence, job.key)
    assert "fence" not in encode(BARE.failed(FAILURE, at=NOW, next_at=NOW)).state


def test_jobs_of_one_id_are_told_apart() -> None:
    """A job with a chain of its own has a key of its own."""
    assert BARE.key == "j-1"
    assert BARE._replace(chain="x").key == "j-1#x"
