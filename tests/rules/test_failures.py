"""Any exception of a handler becomes a Failure (spec sections 6.1 and 7.3)."""

import json
import math
import os
import pickle
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgpack
import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.errors import ConfigurationError, InvalidRetryPolicy, InvalidState
from ojs_bridge.rules.failures import (
    CUT,
    MAX_BACKTRACE,
    MAX_DETAILS,
    MAX_FRAMES,
    MAX_MESSAGE,
    MAX_TYPE,
    ErrorMap,
    Failure,
    Snoozed,
    cut,
    outcome_of,
    plain_details,
)
from ojs_bridge.rules.job import Job, decode, entries_of
from ojs_bridge.rules.responses import DeadLetter, Discard, Fail, OJSError, Response, Retry, Snooze
from tests.contract import hostile

NOTHING = ErrorMap()
FORMS = "must be an ISO 8601 duration string such as 'PT30S', or a timedelta"
CODES = {"RETRY", "DISCARD", "DEAD_LETTER", "FAIL"}


def failure_of(exc: BaseException, errors: ErrorMap = NOTHING) -> Failure:
    """Return the failure of an exception."""
    outcome = outcome_of(exc, errors)
    assert isinstance(outcome, Failure)
    return outcome


def raised(function: Callable[[], object]) -> BaseException:
    """Return the exception that a function raises, with its traceback."""
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.requirement("RET-08")
@pytest.mark.parametrize(
    ("response", "code"),
    [
        (Retry("external.timeout", "slow", details={"ms": 30_000}), "RETRY"),
        (Discard("external.timeout", "slow", details={"ms": 30_000}), "DISCARD"),
        (DeadLetter("external.timeout", "slow", details={"ms": 30_000}), "DEAD_LETTER"),
        (Fail("external.timeout", "slow", details={"ms": 30_000}), "FAIL"),
    ],
)
def test_what_a_handler_says(response: Response, code: str) -> None:
    """Section 7.3: a response has type, message, code and details."""
    assert failure_of(response) == Failure("external.timeout", "slow", code, {"ms": 30_000})  # type: ignore[arg-type]


@pytest.mark.parametrize("after", ["PT90S", timedelta(seconds=90)])
def test_a_hint(after: str | timedelta) -> None:
    """A hint is a text or a timedelta."""
    assert failure_of(Retry("a.b", after=after)).retry_after == timedelta(seconds=90)
    assert outcome_of(Snooze(after), NOTHING) == Snoozed(timedelta(seconds=90))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Retry("a.b", after=30), TypeError, f"after: 30 {FORMS}"),
        (
            lambda: Retry("a.b", after=timedelta(-1)),
            ValueError,
            "after: datetime.timedelta(days=-1) must not be negative",
        ),
        (lambda: Snooze(None), TypeError, f"after: None {FORMS}"),
        (
            lambda: Snooze("10s"),
            ValueError,
            "after: '10s' is not an ISO 8601 duration such as PT1S, PT0.5S or PT5M",
        ),
        (
            lambda: type("Late", (OJSError,), {"retry_after": 30}),
            TypeError,
            f"Late.retry_after: 30 {FORMS}",
        ),
        (lambda: Fail(""), ValueError, "the error type must not be empty"),
        (
            lambda: Discard(KeyError),
            TypeError,
            "the error type must be a string such as 'payment.card_stolen', not <class 'KeyError'>",
        ),
    ],
)
def test_a_wrong_word_is_refused_where_it_is_said(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    """The error comes in the handler, where its author sees it."""
    with pytest.raises(error) as found:
        build()
    assert str(found.value) == message


def test_a_response_reads_like_an_error() -> None:
    """The text is for logs and for a framework's own result."""
    assert str(DeadLetter("payment.card_stolen", "reported stolen")) == "payment.card_stolen: reported stolen"
    assert str(Fail("payment.card_stolen")) == "payment.card_stolen"
    assert str(Snooze("PT10S")) == "snoozed for 0:00:10"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "exc",
    [
        Retry("a.b", "no", after="PT30S", details={"order": 7}),
        Retry("a.b"),
        Discard("a.b", "no", details={"order": 7}),
        DeadLetter("a.b", "no"),
        Fail("a.b"),
        Snooze(timedelta(seconds=10)),
        InvalidRetryPolicy(["max_attempts: -1 must be >= 0", "tries: 3 is not a field of a retry policy"]),
        InvalidState("damaged"),
    ],
)
def test_what_is_raised_survives_pickling(exc: Exception, protocol: int) -> None:
    """A pool child sends it to its parent."""
    copied = pickle.loads(pickle.dumps(exc, protocol))
    assert type(copied) is type(exc)
    assert (str(copied), copied.args, vars(copied)) == (str(exc), exc.args, vars(exc))


class Outer:
    """Holds a class whose qualified name has a dot."""

    class Timeout(TimeoutError):
        pass


def test_an_unmapped_exception_is_named_by_module_and_class() -> None:
    """Non-retryable matching also tries the bare name."""
    assert failure_of(ValueError("no")) == Failure("builtins.ValueError", "no", alias="ValueError")
    failure = failure_of(Outer.Timeout())
    assert (failure.type, failure.alias) == (f"{__name__}.Outer.Timeout", "Timeout")


def test_the_nearest_class_decides() -> None:
    """The method resolution order decides, and not the order of the map."""
    errors = ErrorMap({OSError: "external.os", Exception: "any.thing", TimeoutError: "external.timeout"})
    found = [failure_of(exc, errors).type for exc in (Outer.Timeout(), ConnectionError(), KeyError())]
    assert found == ["external.timeout", "external.os", "any.thing"]
    assert failure_of(KeyboardInterrupt(), errors).type == "builtins.KeyboardInterrupt"


class LeftAndRight(ConnectionError, LookupError):
    pass


def test_the_first_base_comes_first() -> None:
    """Python itself looks names up in this order."""
    errors = ErrorMap({LookupError: "right", ConnectionError: "left"})
    assert failure_of(LeftAndRight(), errors).type == "left"


@pytest.mark.requirement("RET-08")
def test_a_map_may_bring_a_response_code() -> None:
    """Handlers that raise their own exceptions get codes without being touched."""
    errors = ErrorMap({KeyError: ("payment.card_stolen", "DEAD_LETTER")})
    assert failure_of(KeyError("k"), errors) == Failure("payment.card_stolen", "'k'", "DEAD_LETTER")


def test_a_mapped_exception_has_no_second_name() -> None:
    """An owner who gives an exception another name means it."""
    failure = failure_of(ValueError(), ErrorMap({ValueError: "validation.any"}))
    assert (failure.type, failure.alias) == ("validation.any", None)


def test_a_later_map_wins() -> None:
    """The task's map wins over the bridge's, class by class; None is no map."""
    errors = ErrorMap({ValueError: "app.value", KeyError: "app.key"}, None, {ValueError: "task.value"})
    assert [failure_of(exc, errors).type for exc in (ValueError(), KeyError())] == ["task.value", "app.key"]


def test_a_response_is_never_mapped() -> None:
    """The handler's word comes before the map's."""
    assert failure_of(Fail("a.b"), ErrorMap({Exception: "any.thing"})).type == "a.b"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"Timeout": "a.b"}, "errors: the key 'Timeout' must be an exception class or the dotted name"),
        ({"int": "a.b"}, "errors: the key 'int' must be an exception class or the dotted name"),
        ({"shop.no such": "a.b"}, "errors: the key 'shop.no such' must be an exception class or the dotted"),
        ({int: "a.b"}, "errors: the key <class 'int'> must be an exception class"),
        ({ValueError: ""}, "errors[ValueError]: '' must be"),
        ({ValueError: None}, "errors[ValueError]: None must be"),
        ({ValueError: ("a.b", "DROP")}, "errors[ValueError]: ('a.b', 'DROP') must be"),
        ({ValueError: ("a.b", [])}, "errors[ValueError]: ('a.b', []) must be"),
        ({ValueError: ("a.b",)}, "errors[ValueError]: ('a.b',) must be"),
    ],
)
def test_a_map_that_makes_no_sense(entries: Any, message: str) -> None:
    """The error comes at start-up, and names the key."""
    with pytest.raises(ConfigurationError) as error:
        ErrorMap(entries)
    assert str(error.value).startswith(message)


def test_long_texts_are_cut_with_a_mark() -> None:
    """Types, messages and details have limits."""
    failure = failure_of(Fail("t" * 10_000, "m" * 10_000, details={"d": "d" * 10_000}))
    assert failure.type == "t" * (MAX_TYPE - len(CUT)) + CUT
    assert failure.message == "m" * (MAX_MESSAGE - len(CUT)) + CUT
    assert failure.details == {"cut": cut(json.dumps({"d": "d" * 10_000}), MAX_DETAILS)}


@given(st.text(max_size=40), st.integers(len(CUT), 40))
def test_cut_is_exact(text: str, limit: int) -> None:
    """A text is never longer than the limit, and is untouched within it."""
    assert len(cut(text, limit)) == min(len(text), limit)
    assert (cut(text, limit) == text) == (len(text) <= limit or text[limit - len(CUT) :] == CUT)


class Silent:
    """Says nothing about itself."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def circular() -> dict[str, Any]:
    """A mapping that holds itself."""
    loop: dict[str, Any] = {}
    loop["self"] = loop
    return loop


def deep() -> dict[str, Any]:
    """A mapping too deep for any JSON."""
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"d": nested}
    return nested


@pytest.mark.parametrize(
    ("details", "plain"),
    [
        ({}, {}),
        (None, {}),
        ({"a": [1, 2.5, None, True, {"b": "c"}]}, {"a": [1, 2.5, None, True, {"b": "c"}]}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ({1: "one"}, {"1": "one"}),
        ({"when": timedelta(1)}, {"when": "datetime.timedelta(days=1)"}),
        ({"raw": b"\xff"}, {"raw": "b'\\xff'"}),
        ({"odd": Silent()}, {"odd": "<Silent whose repr() raises>"}),
        ({"ratio": math.nan}, {"repr": "{'ratio': nan}"}),
        ({"ratio": math.inf}, {"repr": "{'ratio': inf}"}),
        ({(1, 2): 3}, {"repr": "{(1, 2): 3}"}),
        ({(1, 2): Silent()}, {"repr": "<dict whose repr() raises>"}),
        (circular(), {"repr": "{'self': {...}}"}),
        ({"n": 10**5000}, {"repr": "<dict whose repr() raises>"}),
        (["not", "a", "mapping"], {"repr": "['not', 'a', 'mapping']"}),
        (7, {"repr": "7"}),
    ],
)
def test_details_that_json_cannot_hold(details: Any, plain: dict[str, Any]) -> None:
    """The details become values of JSON, and are always an object."""
    assert plain_details(details) == plain


def test_details_too_deep_for_json() -> None:
    """Neither the encoder nor repr() can follow such details."""
    (text,) = plain_details(deep()).values()
    assert isinstance(text, str)


def test_a_short_backtrace() -> None:
    """The backtrace has file, line and function, the oldest first, and no source."""
    backtrace = failure_of(raised(lambda: json.loads("{"))).backtrace
    assert backtrace[0].startswith(f"{__file__}:")
    assert backtrace[0].endswith(" in raised")
    assert backtrace[-1].endswith(" in raw_decode") or "decoder.py" in backtrace[-1]


def dive(depth: int) -> None:
    """Fail at a depth."""
    if not depth:
        innermost()
    dive(depth - 1)


def innermost() -> None:
    """Fail."""
    raise ValueError("deep down")


def test_a_deep_backtrace_keeps_its_innermost_frames() -> None:
    """The backtrace has fifty frames: it shows where the error came, not where the run began."""
    backtrace = failure_of(raised(lambda: dive(200))).backtrace
    assert len(backtrace) == MAX_FRAMES
    assert backtrace[-1].endswith(" in innermost")
    assert all(frame.endswith(" in dive") for frame in backtrace[:-1])


def test_a_wide_backtrace_keeps_its_innermost_frames() -> None:
    """The backtrace has at most 10,000 characters, in whole frames."""
    wide: dict[str, Any] = {}
    source = "def dive(n):\n    return dive(n - 1) if n else 1 / 0"
    exec(compile(source, "/" + "long/" * 150 + "task.py", "exec"), wide)
    backtrace = failure_of(raised(lambda: wide["dive"](40))).backtrace
    assert MAX_BACKTRACE - 800 < sum(map(len, backtrace)) <= MAX_BACKTRACE
    assert len(backtrace) < 20
    assert all(frame.endswith("task.py:2 in dive") for frame in backtrace)


def test_an_exception_that_was_never_raised_has_no_backtrace() -> None:
    """A framework may report an exception that was never raised."""
    assert failure_of(ValueError("no")).backtrace == ()


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ForgotSuper(DeadLetter):
    def __init__(self) -> None:
        pass


class ForgotSuperWithType(DeadLetter):
    def __init__(self) -> None:
        self.type = "payment.card_stolen"


class ForgotSuperOfRetry(Retry):
    def __init__(self) -> None:
        self.type = "external.timeout"


class ForgotInSnooze(Snooze):
    def __init__(self) -> None:
        pass


class TypeIsNoText(Discard):
    def __init__(self) -> None:
        self.type = 5  # type: ignore[assignment]


class OddFields(Retry):
    def __init__(self) -> None:
        super().__init__("a.b")
        self.message = 7  # type: ignore[assignment]
        self.details = ["x"]  # type: ignore[assignment]
        self.after = "PT5S"  # type: ignore[assignment]
        self.code = "BANANA"  # type: ignore[misc, assignment]


class BrokenProperty(Retry):
    @property
    def details(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no details")

    def __init__(self) -> None:
        self.type = "a.b"


class Backwards(Snooze):
    def __init__(self) -> None:
        self.after = timedelta(seconds=-5)


class NoModule(Exception):
    __module__ = None  # type: ignore[assignment]


class SilentModule(Exception):
    __module__ = Silent()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("exc", "error_type", "code", "message"),
    [
        (NoText(), f"{__name__}.NoText", "RETRY", "<NoText whose str() raises>"),
        (ForgotSuperWithType(), "payment.card_stolen", "DEAD_LETTER", "payment.card_stolen"),
        (ForgotSuperOfRetry(), "external.timeout", "RETRY", "external.timeout"),
        (ForgotSuper(), f"{__name__}.ForgotSuper", "DEAD_LETTER", "<ForgotSuper whose str() raises>"),
        (ForgotInSnooze(), f"{__name__}.ForgotInSnooze", "RETRY", "<ForgotInSnooze whose str() raises>"),
        (TypeIsNoText(), f"{__name__}.TypeIsNoText", "DISCARD", "<TypeIsNoText whose str() raises>"),
        (OddFields(), "a.b", "RETRY", "7"),
        (Backwards(), f"{__name__}.Backwards", "RETRY", "snoozed for -1 day, 23:59:55"),
        (NoModule("no"), "None.NoModule", "RETRY", "no"),
        (SilentModule("no"), "<Silent whose str() raises>.SilentModule", "RETRY", "no"),
        (BrokenProperty(), "a.b", "RETRY", "a.b"),
        (Exception(Silent()), "builtins.Exception", "RETRY", "<Exception whose str() raises>"),
    ],
)  # fmt: skip
def test_exceptions_that_are_hard_to_read(exc: Exception, error_type: str, code: str, message: str) -> None:
    """The failure keeps all that can be understood, the response code above all."""
    failure = failure_of(exc)
    assert (failure.type, failure.code, failure.message) == (error_type, code, message)
    assert failure.retry_after is None


UNPRINTABLE = st.builds(pow, st.just(10), st.just(5000))
arguments = st.recursive(
    st.none() | st.text() | st.binary() | st.floats() | st.integers() | st.builds(Silent) | UNPRINTABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
EXCEPTIONS = [
    Exception,
    ValueError,
    KeyError,
    OSError,
    SystemExit,
    KeyboardInterrupt,
    NoText,
    Retry,
    Fail,
    Snooze,
]


@given(st.sampled_from(EXCEPTIONS), st.lists(arguments, max_size=3), st.dictionaries(st.text(), arguments))
def test_whatever_is_raised_has_an_outcome(
    cls: type[BaseException], args: list[Any], attributes: dict[str, Any]
) -> None:
    """The outcome is never an error, is within the limits, and is written as JSON."""
    exc = cls.__new__(cls, *args)
    exc.__dict__.update(attributes)
    failure = outcome_of(exc, NOTHING)
    assert isinstance(failure, Failure)
    assert failure.code in CODES
    assert 0 < len(failure.type) <= MAX_TYPE
    assert len(failure.message) <= MAX_MESSAGE
    json.dumps([failure.type, failure.message, dict(failure.details)], allow_nan=False)


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("type", "message", "details", "code", "after"), arguments)
    )
)
def test_whatever_a_response_carries_has_an_outcome(attributes: dict[str, Any]) -> None:
    """A subclass of a response may set any value."""
    exc = Retry("a.b")
    exc.__dict__.update(attributes)
    failure = failure_of(exc)
    assert failure.code in CODES
    json.dumps([failure.type, failure.message, dict(failure.details)], allow_nan=False)


@given(st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), arguments))
def test_any_details_become_a_json_object(details: dict[Any, Any]) -> None:
    """The object is within the limit, and is the same after a round trip."""
    plain = plain_details(details)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert len(json.dumps(plain)) <= 12 * MAX_DETAILS


LONE = os.fsdecode(b"caf\xe9")
#: Encoders that users give to Dramatiq: each refuses something that Python's own JSON takes.
ENCODERS: dict[str, Callable[[Any], object]] = {
    "utf-8": lambda value: json.dumps(value, ensure_ascii=False).encode(),
    "orjson": orjson.dumps,
    "msgpack": msgpack.packb,
    "yaml": lambda value: yaml.safe_dump(value).encode(),
}


def raised_in_a_file_of_that_name() -> BaseException:
    return raised(lambda: exec(compile("1 / 0", "", "exec").replace(co_filename=f"/srv/{LONE}.py")))


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    "exc",
    [
        OSError(LONE),
        type("Odd", (Exception,), {"__module__": LONE})("x"),
        Retry("a.b", LONE, details={LONE: [LONE, "\U0001f600", "\\ud800"], "n": 2**70, "m": -(2**64)}),
        Discard(f"a.{LONE}", details={"far": {"deep": LONE}}),
        DeadLetter("a.b", "x" * MAX_MESSAGE + LONE),
        raised_in_a_file_of_that_name(),
    ],
    ids=["message", "module", "details", "type", "long", "backtrace"],
)
def test_any_encoder_takes_a_failure(encoder: str, exc: BaseException) -> None:
    """What is written of a failure must not change how its job is retried."""
    failure = failure_of(exc)
    entry = Job("j", "t", "q").failed(failure, at=datetime.now(timezone.utc)).errors[0]
    assert ENCODERS[encoder](entry)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_any_encoder_takes_the_errors_of_a_header_with_lone_surrogates(encoder: str) -> None:
    """Another client may have written them."""
    state = {"v": 1, "attempt": 2, "errors": [{"attempt": 1, "message": LONE, "details": {"a": [LONE]}}]}
    for written in (state, json.dumps(state)):
        (entry,) = decode(written, Job("j", "t", "q", 2)).errors
        assert (entry["message"], entry["details"]) == ("caf\\udce9", {"a": ["caf\\udce9"]})
        assert ENCODERS[encoder](entry)
        assert entries_of(state["errors"]) == [entry]


def test_what_is_spelt_out() -> None:
    failure = failure_of(Retry("a.b", LONE, details={"a": [LONE, "\U0001f600", "\\ud800", 2**64 - 1, 2**64]}))
    assert failure.message == "caf\\udce9"
    assert failure.details == {"a": ["caf\\udce9", "\U0001f600", "\\ud800", 2**64 - 1, str(2**64)]}
    assert cut(LONE * MAX_MESSAGE, MAX_MESSAGE).endswith(CUT)


class SoldOut(OSError):
    pass


def test_a_class_may_stand_by_its_name_and_by_that_of_another_module() -> None:
    """It is found among what is imported; the nearest class wins, and then the later map."""
    shop = SimpleNamespace(Full=SoldOut)
    errors = ErrorMap(
        {"OSError": "any.os", "shop.Full": "shop.full", "gone.Error": "gone"},
        {f"{__name__}.Declined": ("bank.no", "DISCARD"), KeyError: "by.class"},
        loaded={"shop": shop},
    )
    found = [failure_of(e, errors) for e in (SoldOut(), PermissionError(), Declined("no"), KeyError(1))]
    assert [failure.type for failure in found] == ["shop.full", "any.os", "bank.no", "by.class"]
    later = ErrorMap({"shop.Full": "first"}, {SoldOut: "later"}, loaded={"shop": shop})
    assert failure_of(SoldOut(), later).type == "later"


class Declined(OJSError):
    code = "DISCARD"


class Throttled(OJSError):
    type = "bank.throttled"
    retry_after = "PT30S"

    def __init__(self, seconds: int) -> None:
        super().__init__(f"wait {seconds} s")
        self.details = {"seconds": seconds}


def test_an_applications_own_error_says_its_type_and_its_code() -> None:
    said = failure_of(Throttled(7))
    assert (said.type, said.code, said.message) == ("bank.throttled", "RETRY", "wait 7 s")
    assert (said.retry_after, said.details) == (timedelta(seconds=30), {"seconds": 7})
    plain = failure_of(Declined("no"))
    assert (plain.type, plain.code, plain.alias) == (f"{__name__}.Declined", "DISCARD", "Declined")
    mapped = failure_of(Declined("no"), ErrorMap({Declined: "bank.declined"}))
    assert (mapped.type, mapped.code) == ("bank.declined", "DISCARD")
    own = Throttled(7)
    own.retry_after, own.code = timedelta(seconds=5), "DEAD_LETTER"  # type: ignore[assignment]
    assert (failure_of(own).retry_after, failure_of(own).code) == (timedelta(seconds=5), "DEAD_LETTER")


@pytest.mark.parametrize(
    ("said", "message"),
    [({"code": "DROP"}, "Odd.code: 'DROP'"), ({"retry_after": "5s"}, "is not an ISO 8601")],
)
def test_an_own_error_that_says_what_is_not_known_is_refused_where_it_is_written(
    said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        type("Odd", (OJSError,), said)


class TimeLimitExceeded(Exception):
    """Is written as billiard's own."""

    def __str__(self) -> str:
        return f"TimeLimitExceeded{self.args}"


@pytest.mark.parametrize(
    ("exc", "message"),
    [
        (OSError(), "OSError"),
        (OSError(" "), "OSError"),
        (Discard("auth.expired"), "auth.expired"),
        (Declined(), "Declined"),
        (TimeLimitExceeded(), "TimeLimitExceeded: the time limit has passed"),
        (TimeLimitExceeded(2), "TimeLimitExceeded: the time limit has passed"),
    ],
)
def test_an_error_that_says_nothing_is_told_by_its_name(exc: BaseException, message: str) -> None:
    assert failure_of(exc, ErrorMap({TimeLimitExceeded: "timeout"})).message == message


@pytest.mark.parametrize("name", hostile.ERRORS)
def test_an_error_that_fights_back_still_has_a_type(name: str) -> None:
    error = hostile.ERRORS[name]("down")
    failure = failure_of(error)
    json.dumps([failure.type, failure.message, failure.details, failure.backtrace])
    assert failure.type in ("shop.full", "down") or failure.type.endswith((".Hostile", ".ExceptionGroup"))
    assert failure.code == "RETRY"
