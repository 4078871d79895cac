"""Hints: what a real answer says about when to ask again is heard, whichever library brings it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import OJSError, Retry, standard_errors
from ojs_bridge.rules.decision import DeadLettered, Decision, RetryAt, SnoozeUntil, decide
from ojs_bridge.rules.failures import SNOOZE, ErrorMap, Failure, Snoozed, outcome_of
from ojs_bridge.rules.hints import Heard, heard_in
from ojs_bridge.rules.job import Job
from ojs_bridge.rules.policy import RetryPolicy
from tests.answers import Service, answering
from tests.rules.test_standard_errors import ALL, STANDARD, by_requests, failure_of, requests

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
IN_A_MINUTE = NOW + timedelta(minutes=1)
POLICY = RetryPolicy(max_attempts=5, initial_interval="PT2S", max_interval="PT5M", jitter=False)
EPOCH = str(int(IN_A_MINUTE.timestamp()))
MINUTE = timedelta(minutes=1)


class Draw:
    """Draws one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def decided(outcome: Any, *, drawn: float = 0.5, attempt: int = 1, **policy: Any) -> Decision:
    """The decision about an attempt, one of five."""
    merged = RetryPolicy.merge(POLICY, policy)
    return decide(merged, Job("i", "t", "q", attempt), outcome, now=NOW, rng=Draw(drawn))


def delay(outcome: Any, **how: Any) -> float:
    decision = decided(outcome, **how)
    assert isinstance(decision, RetryAt)
    return decision.delay


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with answering() as service:
        yield service


# the status and the headers of an answer -> seconds until the retry; the policy's own backoff is 2
ANSWERS: list[tuple[int, dict[str, str], float]] = [
    (429, {"Retry-After": "60"}, 60),
    (503, {"Retry-After": "60"}, 60),
    (500, {"retry-after": " 60 "}, 60),
    (403, {"Retry-After": "2.5"}, 2.5),
    (403, {"Retry-After": "1.5"}, 2),
    (429, {"Retry-After": format_datetime(IN_A_MINUTE, usegmt=True)}, 60),
    (503, {"Retry-After": IN_A_MINUTE.strftime("%A, %d-%b-%y %H:%M:%S GMT")}, 60),
    (503, {"Retry-After": IN_A_MINUTE.strftime("%a %b %e %H:%M:%S %Y")}, 60),
    (429, {"Retry-After": "99999999999999999999"}, 300),
    (429, {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}, 300),
    (429, {"Retry-After": "0"}, 2),
    (429, {"Retry-After": format_datetime(NOW - MINUTE, usegmt=True)}, 2),
    (429, {"Retry-After": "soon"}, 2),
    (429, {"Retry-After": "soon", "X-RateLimit-Reset": "60"}, 60),
    (429, {"Retry-After": "30", "X-RateLimit-Reset": "60"}, 30),
    (429, {"X-RateLimit-Reset": "60"}, 60),
    (429, {"X-RateLimit-Reset": EPOCH}, 60),
    (429, {"X-RateLimit-Reset": f"{EPOCH}000"}, 60),
    (503, {"X-RateLimit-Reset": EPOCH}, 60),
    (403, {"X-RateLimit-Reset": EPOCH, "X-RateLimit-Remaining": "0"}, 60),
    (403, {"X-RateLimit-Reset": EPOCH, "X-RateLimit-Remaining": "7"}, 2),
    (403, {"X-RateLimit-Reset": EPOCH}, 2),
    (500, {"X-RateLimit-Reset": EPOCH}, 2),
    (429, {"X-RateLimit-Reset": "-1"}, 2),
    (429, {"X-RateLimit-Reset": "9" * 400}, 2),
    (429, {}, 2),
]


@pytest.mark.parametrize("by", ALL)
def test_an_answer_is_heard(service: Service, by: Callable[[str], None]) -> None:
    found = []
    for status, headers, _ in ANSWERS:
        service.headers = urlencode(headers)
        found.append(delay(failure_of(lambda: by(f"{service.url}/{status}"))))  # noqa: B023
    service.headers = ""
    assert found == [seconds for *_, seconds in ANSWERS]


def asked_for(service: Service, **headers: str) -> Exception:
    """The error of a call that is answered with 429 and with headers."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(requests.HTTPError) as error:
        by_requests(f"{service.url}/429?{urlencode(headers)}")
    return error.value


def test_a_limit_of_github_is_a_limit(service: Service) -> None:
    for headers in ("Retry-After=60", "X-RateLimit-Remaining=0"):
        failure = failure_of(lambda: by_requests(f"{service.url}/403?{headers}"))  # noqa: B023
        assert failure.type == "external.rate_limited"


def test_what_is_ignored_is_said(service: Service) -> None:
    error = asked_for(service, Retry_After="soon", X_RateLimit_Reset="later")
    failure = outcome_of(error, STANDARD)
    assert isinstance(failure, Failure)
    assert failure.details == {"ignored": "Retry-After: 'soon', X-RateLimit-Reset: 'later'"}


def test_the_reason_says_who_asked(service: Service) -> None:
    failure = outcome_of(asked_for(service, Retry_After="60"), STANDARD)
    assert decided(failure).reason == (
        "attempt 1 of 5 failed with external.rate_limited; retry 1 in 60.000 s, as Retry-After asked"
    )


@pytest.mark.parametrize(("jitter", "seconds"), [(True, 63.0), (False, 60.0)])
def test_not_all_come_back_in_the_same_moment(*, jitter: bool, seconds: float) -> None:
    for when in (MINUTE, IN_A_MINUTE):
        assert delay(Failure("a", retry_after=Heard(when, "Retry-After")), jitter=jitter) == seconds
    capped = Failure("a", retry_after=Heard(timedelta(hours=1), "Retry-After"))
    assert delay(capped, jitter=jitter) == 300


def test_an_answer_is_heard_only_where_the_standard_errors_are(service: Service) -> None:
    """Whatever type the error has there."""
    error = asked_for(service, Retry_After="60")
    assert delay(outcome_of(error, ErrorMap({"requests.exceptions.HTTPError": "a.b"}))) == 2
    own = ErrorMap(standard_errors() | {requests.HTTPError: "shop.no"})
    failure = outcome_of(error, own)
    assert isinstance(failure, Failure)
    assert (failure.type, delay(failure)) == ("shop.no", 60)


def test_a_hint_of_the_handler_wins(service: Service) -> None:
    class Busy(OJSError):
        retry_after = "PT9S"
        response = SimpleNamespace(status_code=429, headers={"Retry-After": "60"})

    retry = Retry("a.b", after="PT7S")
    retry.response = Busy.response  # type: ignore[attr-defined]
    assert [delay(outcome_of(error, STANDARD)) for error in (retry, Busy("x"))] == [7, 9]


def test_no_attempt_is_left(service: Service) -> None:
    failure = outcome_of(asked_for(service, Retry_After="60"), STANDARD)
    assert isinstance(decided(failure, attempt=5, on_exhaustion="dead_letter"), DeadLettered)


def test_an_error_may_be_a_snooze_by_the_map(service: Service) -> None:
    """It waits as an answer asked, or as before the first retry; else it is a failure."""
    own = {requests.HTTPError: ("shop.busy", SNOOZE), KeyError: ("k", SNOOZE)}
    errors = ErrorMap(standard_errors(), own)
    told = outcome_of(asked_for(service, Retry_After="60"), errors)
    snoozed = [decided(each, attempt=4) for each in (told, outcome_of(KeyError("x"), errors))]
    assert all(isinstance(decision, SnoozeUntil) for decision in snoozed)
    assert [decision.delay for decision in snoozed if isinstance(decision, SnoozeUntil)] == [60, 2]
    assert snoozed[1].reason == "k: 'x'; the job pauses for 2.000 s"
    failure = outcome_of(KeyError("x"), errors, "since nobody wants it")
    assert isinstance(failure, Failure)
    assert (failure.type, failure.code, failure.final) == ("k", "RETRY", "since nobody wants it")
    assert isinstance(outcome_of(KeyError("x"), errors), Snoozed)


def test_grpc() -> None:
    """By the metadata alone, and within the details of a rich status."""
    grpc = pytest.importorskip("grpc")
    rpc_status = pytest.importorskip("grpc_status.rpc_status")
    from google.protobuf.any_pb2 import Any as Detail
    from google.protobuf.duration_pb2 import Duration
    from google.rpc import code_pb2, error_details_pb2, status_pb2

    from tests.remote import remote

    def info(seconds: int, nanos: int = 0) -> error_details_pb2.RetryInfo:
        return error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos))

    def rich(*details: Any) -> Any:
        packed = [Detail() for _ in details]
        for one, detail in zip(packed, details, strict=True):
            one.Pack(detail)
        status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="no", details=packed)
        return rpc_status.to_status(status)

    quota, key = error_details_pb2.QuotaFailure(), "google.rpc.retryinfo-bin"
    asked_for: list[tuple[dict[str, Any], float]] = [
        ({"metadata": ((key, info(7, 250_000_000).SerializeToString()),)}, 7.25),
        ({"metadata": ((key, info(2, 5_000_000).SerializeToString()),)}, 2.005),
        ({"metadata": ((key, info(0, 5_000_000).SerializeToString()),)}, 2),
        ({"metadata": ((key, info(300_000_000_000).SerializeToString()),)}, 300),
        ({"metadata": ((key, info(-7).SerializeToString()),)}, 2),
        ({"metadata": ((key, b""),)}, 2),
        ({"metadata": ((key, b"\xff\xff"),)}, 2),
        ({"metadata": (("google-rpc", "x"),)}, 2),
        ({"status": rich(quota, info(60))}, 60),
        ({"status": rich(quota)}, 2),
        ({"status": rich()}, 2),
    ]
    with remote() as (port, asked), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/shop.Shop/Buy")
        found = []
        for answer, _ in asked_for:
            asked.update(
                {"code": grpc.StatusCode.RESOURCE_EXHAUSTED, "metadata": (), "status": None}, **answer
            )
            failure = failure_of(lambda: call(b"", timeout=10))
            assert failure.type == "external.rate_limited"
            found.append(delay(failure))
    assert found == [seconds for _, seconds in asked_for]


@given(st.binary(max_size=40), st.sampled_from(["google.rpc.retryinfo-bin", "grpc-status-details-bin"]))
def test_whatever_bytes_come_nothing_is_raised(data: bytes, key: str) -> None:
    class Call(Exception):
        def trailing_metadata(self) -> Any:
            return ((key, data),)

    heard, _ = heard_in(Call())
    assert heard is None or heard.seconds(NOW) > 0


@given(st.text(max_size=30), st.sampled_from(["Retry-After", "X-RateLimit-Reset"]))
def test_whatever_a_header_says_nothing_is_raised(text: str, name: str) -> None:
    error: Any = Exception()
    error.response = SimpleNamespace(status_code=429, headers={name: text})
    heard, _ = heard_in(error)
    assert heard is None or isinstance(delay(Failure("a", retry_after=heard)), float)


def test_botocore_says_how_it_was_throttled(service: Service) -> None:
    service.body = '{"__type": "ThrottlingException"}'
    failure = failure_of(lambda: ALL[-1](f"{service.url}/400"))
    service.headers = "Retry-After=60"
    asked = failure_of(lambda: ALL[-1](f"{service.url}/400"))
    service.body = "{}"
    assert [(each.type, delay(each)) for each in (failure, asked)] == [
        ("external.rate_limited", 2),
        ("external.rate_limited", 60),
    ]
