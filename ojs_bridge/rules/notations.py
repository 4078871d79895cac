"""Two notations: ISO 8601 durations as retry policies write them (spec section 4), and patterns of names.

There is one language of patterns: `*` stands for any characters, everything else for itself, in its own case.
"""

from __future__ import annotations

import fnmatch
import re
from datetime import timedelta

import isodate

from ..errors import ConfigurationError

#: The pattern of a duration in the spec's JSON Schema (section 14).
DURATION = r"^P(?!$)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?$"

#: The most characters of a duration: the time to read digits grows with the square of their number.
MAX_DURATION = 100
#: The most characters of a pattern: the time to compare grows with them.
MAX_PATTERN = 1_000

#: The bounds of a rate, in a second.
SLOWEST, FASTEST = 1 / 3600, 1_000_000
_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?:/([smh]))?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_GRAMMAR = re.compile(DURATION, re.ASCII)
_HOUR = timedelta(hours=1)
_DAYS_PER_YEAR = 365
_DAYS_PER_MONTH = 30


def parse_duration(text: str) -> timedelta:
    """Read an ISO 8601 duration; a year counts 365 days, a month 30 (spec section 4.2).

    Raises ValueError for a text that the schema's pattern does not allow, and for too long a text or time.
    """
    if len(text) > MAX_DURATION:
        raise ValueError(f"is longer than the {MAX_DURATION} characters that a duration may have")
    if not _GRAMMAR.fullmatch(text):
        raise ValueError("is not an ISO 8601 duration such as PT1S, PT0.5S or PT5M")
    try:
        parsed = isodate.parse_duration(text)
        if isinstance(parsed, timedelta):
            return parsed
        days = int(parsed.years) * _DAYS_PER_YEAR + int(parsed.months) * _DAYS_PER_MONTH
        rest: timedelta = parsed.tdelta
        return timedelta(days=days) + rest
    except (ValueError, ArithmeticError):
        raise ValueError("is longer than any duration this machine can hold") from None


def format_duration(duration: timedelta) -> str:
    """Write a duration as ISO 8601: days, hours, minutes and seconds (spec section 4.1)."""
    return str(isodate.duration_isoformat(duration))


def format_interval(interval: timedelta) -> str:
    """Write an interval as ISO 8601 in hours, minutes and seconds: the spec advises against days (4.2)."""
    hours, rest = divmod(interval, _HOUR)
    if hours <= 0:
        return format_duration(interval)
    return f"PT{hours}H" + (format_duration(rest).removeprefix("PT") if rest else "")


def read_duration(value: object, place: str = "") -> timedelta:
    """Return the duration that Python code gives as an ISO 8601 string or a timedelta.

    Raises TypeError for another type and ValueError for a bad string or a negative timedelta; the error names
    the place and the value, if a place is given.
    """
    if place:
        try:
            return read_duration(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{place}: {value!r:.100} {error}") from None
    if isinstance(value, str):
        return parse_duration(value)
    if not isinstance(value, timedelta):
        raise TypeError("must be an ISO 8601 duration string such as 'PT30S', or a timedelta")
    if value < timedelta(0):
        raise ValueError("must not be negative")
    return value


def duration_at(place: str, value: object, *, may_be_zero: bool = False) -> timedelta:
    """Return the duration of a setting; raises ConfigurationError, which begins with the setting's place."""
    try:
        duration = read_duration(value, place)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None
    if not (duration or may_be_zero):
        raise ConfigurationError(f"{place}: {value!r:.100} must be greater than zero")
    return duration


def rate_at(place: str, value: object) -> float:
    """Return how many a second a setting allows: a number, or a text such as `100/m`, as Celery writes it.

    Raises ConfigurationError, which begins with the setting's place.
    """
    number, unit = value, 1
    if isinstance(value, str) and (read := _RATE.fullmatch(value)):
        number, unit = float(read[1]), _SECONDS[read[2] or "s"]
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigurationError(f"{place}: {value!r:.100} must be a rate, such as '10/s', '100/m' or '5/h'")
    rate = number / unit
    if not SLOWEST <= rate <= FASTEST:
        raise ConfigurationError(f"{place}: {value!r:.100} must be between '1/h' and '{FASTEST:,}/s'")
    return rate


def per_period(rate: float) -> tuple[int, str]:
    """Return a rate in a second as a number, and the duration in which so many begin."""
    for seconds, period in ((1, "PT1S"), (60, "PT1M"), (3600, "PT1H")):
        if (number := round(rate * seconds)) and abs(number - rate * seconds) < number / 1_000_000:
            return number, period
    return 1, format_duration(timedelta(seconds=1 / rate))


def spoken(seconds: float) -> str:
    """Return a length of time for people: 0.5 s, 1 min 30 s, 2 h, 1 d 4 h."""
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.3g} s"
    left, words = round(seconds), list[str]()
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number:
            words.append(f"{number} {unit}")
    return " ".join(words[:2])


def matches(text: str, pattern: str) -> bool:
    """Return whether a text such as `billing.charge` matches a pattern such as `billing.*`."""
    return fnmatch.fnmatchcase(text, to_glob(pattern)) if "*" in pattern else text == pattern


def to_glob(pattern: str) -> str:
    """Return a pattern as a glob, with `?` and `[` escaped."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def check_pattern(name: str, pattern: object) -> None:
    """Raise ValueError for an argument that is no pattern; None means that there is none, and is valid."""
    if pattern is not None and not (pattern and isinstance(pattern, str)):
        raise ValueError(f"{name}: {pattern!r:.100} must be a name, or a pattern such as 'billing.*'")
    if isinstance(pattern, str) and "*" in pattern and len(pattern) > MAX_PATTERN:
        raise ValueError(f"{name}: {pattern!r:.100} must have at most {MAX_PATTERN:,} characters")
