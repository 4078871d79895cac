"""Failures: the exceptions by which a handler decides, and any exception translated (spec sections 6 and 7).

Exception
├── Response              a handler's word on its own failure
│   ├── Retry             try again, after a hint if there is one; still an attempt
│   ├── Discard           drop the job, keep no dead letter
│   ├── DeadLetter        keep the job as a dead letter at once
│   └── Fail              a recognised permanent failure; behaves like Discard
├── OJSError              the base of an application's own errors that say what becomes of their jobs
├── Snooze                not a failure: run again later, no attempt used
└── HandlerFailed         not raised: stands for an exception that a framework cannot show, store or send
"""

from __future__ import annotations

import builtins
import json
import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from ..errors import ConfigurationError
from .notations import read_duration

ResponseCode: TypeAlias = Literal["RETRY", "DISCARD", "DEAD_LETTER", "FAIL"]


class Response(Exception):
    """A handler's structured failure: dot-namespaced type, message, details (spec section 7.3).

    Raise one of the subclasses. Raises TypeError when the type is not a string, ValueError when it is empty.
    """

    code: ClassVar[ResponseCode] = "RETRY"
    message: str = ""
    details: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, type: str, message: str = "", *, details: Mapping[str, Any] | None = None) -> None:  # noqa: A002
        if not isinstance(type, str):
            raise TypeError(f"the error type must be a string such as 'payment.card_stolen', not {type!r}")
        if not type:
            raise ValueError("the error type must not be empty")
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Retry(Response):
    """Retry under the job's policy (spec section 7.1, RETRY).

    `after`, an ISO 8601 duration or a timedelta, replaces the computed delay; `max_interval` still caps it.
    Raises TypeError or ValueError when `after` is not a duration.
    """

    code: ClassVar[ResponseCode] = "RETRY"
    after: timedelta | None = None

    def __init__(
        self,
        type: str,  # noqa: A002
        message: str = "",
        *,
        after: str | timedelta | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(type, message, details=details)
        self.after = None if after is None else read_duration(after, "after")


class Discard(Response):
    """Drop the job: no retry, no dead letter (spec section 7.1, DISCARD)."""

    code: ClassVar[ResponseCode] = "DISCARD"


class DeadLetter(Response):
    """Move the job to the dead letters at once (spec section 7.1, DEAD_LETTER)."""

    code: ClassVar[ResponseCode] = "DEAD_LETTER"


class Fail(Response):
    """Fail for good: like Discard, but a recognised permanent failure (spec section 7.1, FAIL)."""

    code: ClassVar[ResponseCode] = "FAIL"


class OJSError(Exception):
    """An application's own error that says its type and its response code (spec section 7.3).

    A subclass sets what it says as attributes; an instance may set them, too. Without a `type` the type is
    that of any other exception: the error map's, else `module.QualName`. `retry_after`, an ISO 8601 duration
    or a timedelta, is the hint of a RETRY. A subclass with a wrong one raises ValueError or TypeError.
    """

    type: str = ""
    code: ResponseCode = "RETRY"
    retry_after: str | timedelta | None = None
    details: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        code, hint = vars(cls).get("code", "RETRY"), vars(cls).get("retry_after")
        if isinstance(code, str) and code not in get_args(ResponseCode):
            codes = ", ".join(get_args(ResponseCode))
            raise ValueError(f"{cls.__qualname__}.code: {code!r} must be one of {codes}")
        if hint is not None and not hasattr(hint, "__get__"):
            read_duration(hint, f"{cls.__qualname__}.retry_after")


class Snooze(Exception):
    """Run the job again after a while; not a failure, and no attempt is used.

    `after` is an ISO 8601 duration or a timedelta. Raises TypeError or ValueError when it is neither.
    """

    def __init__(self, after: str | timedelta) -> None:
        super().__init__(after)
        self.after = read_duration(after, "after")

    def __str__(self) -> str:
        return f"snoozed for {self.after}"


#: By these a handler says what becomes of its job: it may raise or return them.
ANSWERS = (Response, OJSError, Snooze)

#: The error map's value for an exception class: its error type, or its type and a response code.
Mapped: TypeAlias = "str | tuple[str, ResponseCode]"
#: An error map: its keys are exception classes, or their dotted names.
Errors: TypeAlias = "Mapping[type[BaseException], Mapped] | Mapping[str, Mapped] | Mapping[Any, Mapped]"

MAX_TYPE = 255
MAX_MESSAGE = 4_000
MAX_DETAILS = 4_000
#: The deepest nesting of details. A header holds them, and may nest deeper.
MAX_DETAILS_DEPTH = 100
MAX_FRAMES = 50
MAX_BACKTRACE = 10_000
CUT = "…[cut]"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, in the words of the spec (section 7.3).

    `final` says why it is not retried: the task does not ask for it (`retry_on`), or an option of the
    framework (such as Dramatiq's `throws`) forbids it. DISCARD, FAIL and DEAD_LETTER still come first.
    """

    type: str
    message: str = ""
    code: ResponseCode = "RETRY"
    details: Mapping[str, Any] = field(default_factory=dict)
    retry_after: timedelta | None = None
    backtrace: tuple[str, ...] = ()
    alias: str | None = None
    final: str | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The job runs again later, and uses no attempt: its handler asked, or a message says why."""

    after: timedelta
    message: str = ""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker shut down gracefully before the handler had ended."""


#: The outcome of a handler's run; None is success.
Outcome: TypeAlias = Failure | Snoozed | Interrupted | None

#: The error type of an attempt whose time limit has passed.
TIMEOUT = "timeout"
#: The error type of an attempt whose reservation expired (spec section 9.2).
VISIBILITY_TIMEOUT = "visibility_timeout"
#: The error type of an attempt whose process is known to have died.
WORKER_DEATH = "worker_death"


class ErrorMap:
    """Maps exception classes to error types; the nearest class in the MRO decides.

    A class may be given by its dotted name, such as `"requests.Timeout"`, or `"TimeoutError"`. It is not
    imported: when an error of it is raised, its module is one of the `loaded` ones. Raises ConfigurationError
    for a key that is neither, or a value that is neither a type nor a pair of type and response code.
    """

    def __init__(self, *maps: Errors | None, loaded: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Later maps win over earlier ones for the same class."""
        self._mapped: dict[type[BaseException], tuple[str, ResponseCode]] = {}
        #: What stands by name, and the number of the map in which each key stands.
        self._named: dict[str, tuple[str, ResponseCode]] = {}
        self._places: dict[type[BaseException] | str, int] = {}
        self._loaded = loaded
        for place, entries in enumerate(maps):
            for key, value in (entries or {}).items():
                # A name without a dot is a class of Python's own.
                known = vars(builtins).get(key) if isinstance(key, str) and "." not in key else key
                is_name = isinstance(known, str) and all(map(str.isidentifier, known.split(".")))
                if not (is_name or (isinstance(known, type) and issubclass(known, BaseException))):
                    raise ConfigurationError(
                        f"errors: the key {key!r} must be an exception class or the dotted name of one"
                    )
                pair = value if isinstance(value, tuple) and len(value) == 2 else (value, "RETRY")  # noqa: PLR2004
                error_type, code = pair
                if not (isinstance(error_type, str) and error_type and code in get_args(ResponseCode)):
                    raise ConfigurationError(
                        f"errors[{key if isinstance(key, str) else key.__qualname__}]: {value!r} must be an "
                        "error type such as 'external.timeout', or a pair of one and a response code of "
                        f"{', '.join(get_args(ResponseCode))}"
                    )
                if isinstance(key, str):
                    self._named[key] = error_type, code
                else:
                    self._mapped[key] = error_type, code
                self._places[key] = place

    def find(self, cls: type[BaseException]) -> tuple[str, ResponseCode] | None:
        """Return the error type and response code for a class, or None when no entry covers it."""
        if self._named:
            self._resolve(cls)
        if self._mapped:
            for base in _MRO(cls):
                if entry := self._mapped.get(base):
                    return entry
        return None

    def _resolve(self, cls: type[BaseException]) -> None:
        """Find the classes of names among the bases of a class that was raised."""
        for name in [*self._named]:
            module, _, attribute = name.rpartition(".")
            named = getattr(self._loaded.get(module or "builtins"), "__dict__", {}).get(attribute)
            for base in _MRO(cls):
                is_it = base is named or name_of(base) in (name, f"builtins.{name}")
                if is_it and self._places[name] >= self._places.get(base, 0):
                    self._mapped[base] = self._named[name]


#: What a class is called and where it comes from, and where an error was raised: no class can hide that.
_MODULE, _QUALNAME, _NAME, _MRO = (
    type.__dict__[name].__get__ for name in ("__module__", "__qualname__", "__name__", "__mro__")
)
traceback_of: Callable[[BaseException], TracebackType | None]
cause_of: Callable[[BaseException], BaseException | None]
args_of: Callable[[BaseException], tuple[object, ...]]
traceback_of, cause_of, args_of = (
    BaseException.__dict__[name].__get__ for name in ("__traceback__", "__cause__", "args")
)


class HandlerFailed(Exception):
    """Stands for a handler's exception that a framework cannot show, store or send; MemoryError is one."""

    #: The exception itself, in the process that raised it.
    itself: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException) -> HandlerFailed:
        """Return what stands for an error, with its name, its text and its traceback; never raises."""
        _, _, name = name_of(type(error)).rpartition(".")
        failed = cls(f"{name}: {text_of(error)}").with_traceback(traceback_of(error))
        failed.itself = error
        return failed

    def __reduce__(self) -> tuple[type[HandlerFailed], tuple[Any, ...]]:
        return type(self), self.args


def name_of(cls: type) -> str:
    """Return the dotted name of a class, whatever its metaclass says; never raises."""
    try:
        return f"{text_of(_MODULE(cls))}.{_QUALNAME(cls)}"
    except AttributeError:  # its module was deleted
        return str(_QUALNAME(cls))


def can_be_shown(error: BaseException) -> bool:
    """Return whether code that logs an error, stores it or asks for its class does not raise of it."""
    try:
        traceback.format_exception(type(error), error, error.__traceback__)
        _ = repr(error), str(error), bool(error), vars(error), list(error.args), hash(type(error))
        _ = f"{type(error).__module__}.{type(error).__qualname__}", type(error).__name__, type(error).__mro__
        return error.__class__ is type(error)
    except BaseException:  # noqa: BLE001 - whatever it raises, the other code would raise it, too
        return False


def outcome_of(exc: BaseException, errors: ErrorMap, final: str | None = None) -> Failure | Snoozed:
    """Translate a handler's exception (spec section 7.3); never raises.

    `final` says why the task does not ask to retry it, if it does not. What cannot be read is left out. The
    exception's class is its `type`, as for `except`: its `__class__` may raise.
    """
    cls = type(exc)
    answer = _answer(exc) if issubclass(cls, ANSWERS) else None
    if isinstance(answer, Snoozed) or (answer is not None and answer.type):
        return answer
    name, mapped = _QUALNAME(cls), None
    with suppress(Exception):  # its module may be deleted, and a metaclass may have no hash
        name = f"{text_of(_MODULE(cls))}.{name}"
        mapped = errors.find(cls)
    type_, code = mapped or (name, "RETRY")
    alias = None if mapped else _NAME(cls)
    details, after = ({}, None) if answer is None else (answer.details, answer.retry_after)
    if answer is not None and answer.code != "RETRY":
        code = answer.code
    message, said_by = text_of(exc), _NAME(cls)
    # Billiard's time limits say nothing but their class and their arguments.
    is_call = message.startswith(f"{said_by}(") and message == f"{said_by}{safe_repr(args_of(exc))}"
    if is_call or not message.strip():
        message = f"{said_by}: the time limit has passed" if type_ == TIMEOUT else said_by
    error_type, backtrace = cut(type_, MAX_TYPE), backtrace_of(traceback_of(exc))
    return Failure(error_type, cut(message, MAX_MESSAGE), code, details, after, backtrace, alias, final)


def _answer(exc: Any) -> Failure | Snoozed | None:
    """Return what a response or a snooze says of itself; None for a snooze without a time."""
    is_own = issubclass(type(exc), OJSError)
    after = _read(exc, "retry_after" if is_own else "after")
    with suppress(Exception):
        after = read_duration(after) if is_own and after is not None else after
    after = after if issubclass(type(after), timedelta) and after >= timedelta(0) else None
    if issubclass(type(exc), Snooze):
        return None if after is None else Snoozed(after)
    said, code = _read(exc, "type"), _read(exc, "code")
    error_type = cut(text_of(said), MAX_TYPE) if issubclass(type(said), str) else ""
    return Failure(
        type=error_type,
        message=cut(text_of(exc if is_own else _read(exc, "message")), MAX_MESSAGE) or error_type,
        code=code if type(code) is str and code in get_args(ResponseCode) else "RETRY",  # type: ignore[arg-type]
        details=plain_details(_read(exc, "details")),
        retry_after=after if issubclass(type(exc), (Retry, OJSError)) else None,
        backtrace=backtrace_of(traceback_of(exc)),
    )


def _read(exc: object, name: str) -> Any:
    """Return an attribute of an exception, or None."""
    try:
        return getattr(exc, name)
    except BaseException:  # noqa: BLE001 - nothing that a handler raises may lose its job
        return None


def text_of(value: object) -> str:
    """Return the text of a value, or a substitute where `str` raises."""
    try:
        # A text of a class of its own might raise later.
        return "".join([str(value)])
    except BaseException:  # noqa: BLE001 - a broken __str__ must not lose the job
        return f"<{_NAME(type(value))} whose str() raises>"


def safe_repr(value: object) -> str:
    """Return the repr of a value, or a substitute where `repr` raises."""
    try:
        return "".join([repr(value)])
    except BaseException:  # noqa: BLE001 - a broken __repr__ must not lose the job
        return f"<{_NAME(type(value))} whose repr() raises>"


def cut(text: str, limit: int) -> str:
    """Return the text as any encoder takes it, shortened to `limit` characters with a mark at its end.

    A lone surrogate, as `os.fsdecode` makes it of a byte that is no UTF-8, is spelt out: `\\udce9`.
    """
    sound = text[: limit + 1]
    if not sound.isascii():
        sound = sound.encode("utf-8", "backslashreplace").decode("utf-8")
    return sound if len(sound) <= limit else sound[: limit - len(CUT)] + CUT


def plain_details(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return details that any encoder can carry.

    A value that JSON lacks becomes its repr, and an integer of more than 64 bits its digits. Too much text is
    cut. A lone surrogate is spelt out.
    """
    try:
        text = json.dumps(dict(details or {}), default=safe_repr, allow_nan=False)
        is_short = len(text) <= MAX_DETAILS
        plain: dict[str, Any] = json.loads(sound_json(text), parse_int=_int) if is_short else {}
    except BaseException:  # noqa: BLE001 - circular, NaN, keys that are no strings, hostile objects
        return {"repr": cut(safe_repr(details), MAX_DETAILS)}
    if not is_short or nests_deeper(plain, MAX_DETAILS_DEPTH):
        return {"cut": cut(text, MAX_DETAILS)}
    return plain


def sound_json(text: str) -> str:
    r"""Return ASCII JSON in which each lone surrogate is the text `\udce9` of six characters."""
    if "\\ud" not in text:
        return text
    whole = json.dumps(json.loads(text), ensure_ascii=False)
    return _LONE_SURROGATE.sub(lambda lone: f"\\\\u{ord(lone[0]):04x}", whole)


def nests_deeper(value: object, levels: int) -> bool:
    """Return whether lists and dictionaries nest deeper than some levels, too deep for some encoders."""
    nested = [value] if isinstance(value, (dict, list, tuple)) else []
    for _ in range(levels):
        nested = [
            inner
            for outer in nested
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list, tuple))
        ]
        if not nested:
            return False
    return True


def _int(digits: str) -> int | str:
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits


def backtrace_of(tb: TracebackType | None) -> tuple[str, ...]:
    """Return `file:line in function` for at most the 50 innermost frames, oldest first.

    No source lines: reading them is most of what a failure costs.
    """
    frames: list[str] = []
    while tb is not None:
        code = tb.tb_frame.f_code
        filename = code.co_filename.rpartition("site-packages/")[2]
        frames.append(cut(f"{filename}:{tb.tb_lineno} in {code.co_name}", MAX_BACKTRACE))
        tb = tb.tb_next
    kept, size = list[str](), 0
    for frame in reversed(frames[-MAX_FRAMES:]):
        size += len(frame)
        if size > MAX_BACKTRACE:
            break
        kept.append(frame)
    return tuple(reversed(kept))
