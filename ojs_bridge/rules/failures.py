"""Failures: any exception of a handler, translated (spec sections 6 and 7).

Exception
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
from operator import itemgetter
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TypeAlias, cast, get_args

from ..errors import ConfigurationError
from .hints import Heard, heard_in, read
from .notations import read_duration
from .responses import ANSWERS, OJSError, ResponseCode, Retry, Snooze

#: In the place of a response code: the error is no failure, and its job runs again later.
SNOOZE: Literal["SNOOZE"] = "SNOOZE"
Code: TypeAlias = "ResponseCode | Literal['SNOOZE']"
CODES = (*get_args(ResponseCode), SNOOZE)
#: What an error map says of an error: its error type, or its type and a response code.
Mapped: TypeAlias = "str | tuple[str, Code]"
#: The error map's value for an exception class; a callable gets the error, and None is "go on to its bases".
Entry: TypeAlias = "Mapped | Callable[[Any], Mapped | None]"
_Said: TypeAlias = "tuple[str, Code] | Callable[[Any], Mapped | None]"
#: An error map: its keys are exception classes, or their dotted names.
Errors: TypeAlias = "Mapping[type[BaseException], Entry] | Mapping[str, Entry] | Mapping[Any, Entry]"

MAX_TYPE = 255
MAX_MESSAGE = 4_000
MAX_DETAILS = 4_000
MAX_IGNORED = 300
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
    retry_after: timedelta | Heard | None = None
    backtrace: tuple[str, ...] = ()
    alias: str | None = None
    final: str | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The job runs again later, and uses no attempt: its handler asked, or a message says why.

    Without a time the job waits as long as before its first retry.
    """

    after: timedelta | Heard | None
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
    """Maps exception classes to error types; the nearest class in the MRO decides, and then the later entry.

    A class may be given by its dotted name, such as `"requests.Timeout"`, or `"TimeoutError"`. It is not
    imported: when an error of it is raised, its module is one of the `loaded` ones. A value may be a callable
    that is given the error. Raises ConfigurationError for a key or a value that is none of these.
    """

    def __init__(self, *maps: Errors | None, loaded: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Later maps win over earlier ones for the same class."""
        #: Each entry has its place, by which a later one of the same class wins.
        self._mapped: dict[type[BaseException], tuple[int, _Said]] = {}
        self._named: dict[str, tuple[int, _Said]] = {}
        self._loaded = loaded
        entries = [entry for entries in maps for entry in (entries or {}).items()]
        for place, (key, value) in enumerate(entries):
            # A name without a dot is a class of Python's own.
            known = vars(builtins).get(key) if isinstance(key, str) and "." not in key else key
            is_name = isinstance(known, str) and all(map(str.isidentifier, known.split(".")))
            if not (is_name or (isinstance(known, type) and issubclass(known, BaseException))):
                raise ConfigurationError(
                    f"errors: the key {key!r} must be an exception class or the dotted name of one"
                )
            said = value if callable(value) and not isinstance(value, type) else _pair(value)
            if said is None:
                raise ConfigurationError(
                    f"errors[{key if isinstance(key, str) else key.__qualname__}]: {value!r} must be an "
                    "error type such as 'external.timeout', or a pair of one and a response code of "
                    f"{', '.join(CODES)}, or a callable that returns one of these or None"
                )
            entries_of: dict[Any, tuple[int, _Said]] = self._named if is_name else self._mapped
            entries_of[known] = place, said
        #: The names whose classes are not known yet.
        self._unknown = tuple(self._named)
        #: Whether the answers in errors are asked when to try again: an entry asks for that.
        self.hears = any(getattr(value, "hears", False) is True for _, value in entries)

    def find(self, error: BaseException) -> tuple[tuple[str, Code] | None, str]:
        """Return an error's type and response code, or None where no entry covers it.

        Beside it stands what is wrong with a callable that was asked, if anything is.
        """
        if self._unknown:
            self._resolve()
        wrong = ""
        for base in _MRO(type(error)):
            found = [self._mapped.get(base), self._named.get(name_of(base)) if self._named else None]
            _, said = max(filter(None, found), default=(0, None), key=itemgetter(0))
            if not callable(said):
                if said:
                    return said, wrong
                continue
            try:
                answer = said(error)
                mapped = _pair(answer)
                problem = "" if answer is None or mapped else f"returned {answer!r:.100}"
            except BaseException as broken:  # noqa: BLE001 - a callable of the user's may not lose the job
                mapped, problem = None, f"raised {safe_repr(broken):.100}"
            if mapped:
                return mapped, wrong
            if problem:
                wrong = f"the error map's entry for {name_of(base)} {problem}"
        return None, wrong

    def _resolve(self) -> None:
        """Find the classes of names whose modules are loaded by now."""
        unknown = []
        for name in self._unknown:
            module, _, attribute = name.rpartition(".")
            named = getattr(self._loaded.get(module), "__dict__", {}).get(attribute)
            if not isinstance(named, type):
                unknown.append(name)
            elif self._mapped.get(named, (-1,))[0] < self._named[name][0]:
                self._mapped[named] = self._named[name]
        self._unknown = tuple(unknown)


def _pair(value: object) -> tuple[str, Code] | None:
    """Return a type and a response code, or None for a value that is neither one nor both."""
    error_type, code = value if isinstance(value, tuple) and len(value) == 2 else (value, "RETRY")  # noqa: PLR2004
    if not (isinstance(error_type, str) and error_type and code in CODES):
        return None
    return error_type, cast("Code", code)


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
    name, mapped, wrong = _QUALNAME(cls), None, ""
    with suppress(Exception):  # its module may be deleted, and a metaclass may have no hash
        name = f"{text_of(_MODULE(cls))}.{name}"
        mapped, wrong = errors.find(exc)
    type_, code = mapped or (name, "RETRY")
    alias = None if mapped else _NAME(cls)
    details, after = ({}, None) if answer is None else (answer.details, answer.retry_after)
    if answer is not None and answer.code != "RETRY":
        code = answer.code
    if after is None and errors.hears:
        after, nonsense = heard_in(exc)
        wrong = ", ".join(filter(None, (wrong, nonsense)))
    if wrong:
        details = {**details, "ignored": cut(wrong, MAX_IGNORED)}
    message, said_by = text_of(exc), _NAME(cls)
    # Billiard's time limits say nothing but their class and their arguments.
    is_call = message.startswith(f"{said_by}(") and message == f"{said_by}{safe_repr(args_of(exc))}"
    if is_call or not message.strip():
        message = f"{said_by}: the time limit has passed" if type_ == TIMEOUT else said_by
    if code == SNOOZE:
        if final is None:
            return Snoozed(after, cut(f"{type_}: {message}", MAX_MESSAGE))
        code = "RETRY"
    error_type, backtrace = cut(type_, MAX_TYPE), backtrace_of(traceback_of(exc))
    return Failure(error_type, cut(message, MAX_MESSAGE), code, details, after, backtrace, alias, final)


def _answer(exc: Any) -> Failure | Snoozed | None:
    """Return what a response or a snooze says of itself; None for a snooze without a time."""
    is_own = issubclass(type(exc), OJSError)
    after = read(exc, "retry_after" if is_own else "after")
    with suppress(Exception):
        after = read_duration(after) if is_own and after is not None else after
    after = after if issubclass(type(after), timedelta) and after >= timedelta(0) else None
    if issubclass(type(exc), Snooze):
        return None if after is None else Snoozed(after)
    said, code = read(exc, "type"), read(exc, "code")
    error_type = cut(text_of(said), MAX_TYPE) if issubclass(type(said), str) else ""
    return Failure(
        type=error_type,
        message=cut(text_of(exc if is_own else read(exc, "message")), MAX_MESSAGE) or error_type,
        code=code if type(code) is str and code in get_args(ResponseCode) else "RETRY",  # type: ignore[arg-type]
        details=plain_details(read(exc, "details")),
        retry_after=after if issubclass(type(exc), (Retry, OJSError)) else None,
        backtrace=backtrace_of(traceback_of(exc)),
    )


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
