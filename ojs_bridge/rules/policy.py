"""The retry policy: the spec's seven fields and a strategy (spec sections 2 to 8, 11 and 14)."""

from __future__ import annotations

import json
import math
import operator
import random
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import Self, Unpack

from ..errors import InvalidRetryPolicy, NotExpressible
from .backoff import SPEC_JITTER, CustomJitter, CustomStrategy, Intervals, Rng, Strategy
from .failures import MAX_TYPE, Failure
from .notations import DURATION, format_interval, read_duration


class PolicyFields(TypedDict, total=False):
    """Some fields of a policy, as a type checker knows them; None counts as absent."""

    max_attempts: int | None
    initial_interval: str | timedelta | None
    backoff_coefficient: float | None
    max_interval: str | timedelta | None
    jitter: bool | CustomJitter | None
    non_retryable_errors: list[str] | tuple[str, ...] | None
    on_exhaustion: Literal["discard", "dead_letter"] | None
    backoff_strategy: Strategy | Literal["constant"] | CustomStrategy | None


PartialPolicy: TypeAlias = "PolicyFields | RetryPolicy"
"""A partial policy: some of the fields, or a policy of which only the explicitly set fields count."""
#: A partial policy that a type checker cannot know: it comes from a file or a message.
AnyPartial: TypeAlias = "Mapping[str, Any] | RetryPolicy"

#: The largest `max_attempts`: other languages and databases hold no larger number.
LARGEST = 2**63 - 1
#: The most fields of a partial policy that are looked at, and the most non-retryable errors.
MAX_FIELDS, MAX_PATTERNS = 50, 1_000
#: An error type has 255 characters at most, and a prefix ends in `.*`.
MAX_PATTERN = MAX_TYPE + 2
_ERRORS = "non_retryable_errors"
_LARGEST_FLOAT = int(sys.float_info.max)


def _read_interval(value: object) -> timedelta:
    try:
        return read_duration(value)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _read_strategy(value: object) -> object:
    return "none" if isinstance(value, str) and value == "constant" else value


def _no_class(jitter: object) -> object:
    if isinstance(jitter, type):
        raise ValueError("must not be a class")
    return jitter


def _read_patterns(value: object) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be an array of strings")
    if len(value) > MAX_PATTERNS:
        raise ValueError(f"must have at most {MAX_PATTERNS:,} entries, not {len(value):,}")
    return tuple(value)


Attempts: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, le=LARGEST), WithJsonSchema({"type": "integer", "minimum": 0})
]
Duration = TypeVar("Duration", bound=timedelta)
Interval: TypeAlias = Annotated[
    Duration,
    BeforeValidator(_read_interval),
    PlainSerializer(format_interval, return_type=str),
    WithJsonSchema({"type": "string", "pattern": DURATION}),
]
Positive: TypeAlias = Annotated[timedelta, Field(gt=timedelta(0))]
ErrorPattern: TypeAlias = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_PATTERN)]


class RetryPolicy(BaseModel):
    """How a job is retried when its handler fails (spec section 2); frozen, hashable, always valid.

    Raises InvalidRetryPolicy, with one line per broken rule (spec section 11).
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        json_schema_extra={
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://openjobspec.org/schemas/v1/retry-policy.json",
            "title": "OJS Retry Policy",
            "description": "Defines how a job should be retried on failure.",
        },
    )

    max_attempts: Attempts = Field(
        default=3,
        description="Total number of attempts including the first execution. 0 means no retry.",
    )
    initial_interval: Interval[Positive] = Field(
        default=timedelta(seconds=1), description="ISO 8601 duration for the delay before the first retry."
    )
    backoff_coefficient: float = Field(
        default=2.0,
        strict=True,
        ge=1.0,
        allow_inf_nan=False,
        description="Multiplier for successive retry delays. Must be >= 1.0.",
    )
    max_interval: Interval[timedelta] = Field(
        default=timedelta(minutes=5), description="ISO 8601 duration cap on the computed backoff delay."
    )
    jitter: Annotated[
        Annotated[bool, Field(strict=True)] | Callable[..., Any],
        AfterValidator(_no_class),
        PlainSerializer(operator.truth, return_type=bool),
        WithJsonSchema({"type": "boolean"}, mode="validation"),
    ] = Field(
        default=True, description="Whether to add randomness to prevent thundering herd on mass retries."
    )
    non_retryable_errors: Annotated[
        tuple[ErrorPattern, ...],
        BeforeValidator(_read_patterns),
        WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}}),
    ] = Field(
        default=(),
        description="Error type strings that bypass retry and go directly to exhaustion behavior.",
    )
    on_exhaustion: Literal["discard", "dead_letter"] = Field(
        default="discard",
        description="Action when max_attempts is reached: discard the job or move to dead letter queue.",
    )
    backoff_strategy: Annotated[
        Strategy | Callable[..., Any],
        BeforeValidator(_read_strategy),
        WithJsonSchema({"type": "string", "enum": ["exponential", "linear", "polynomial", "none"]}),
    ] = Field(default="exponential", description="How the delay grows over successive retries.")

    def __init__(self, /, **fields: Unpack[PolicyFields]) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidRetryPolicy(_problems(error, fields)) from None

    @model_validator(mode="after")
    def _cap_is_not_below_the_first_interval(self) -> Self:
        longest = self.initial_interval
        name = "initial_interval"
        if isinstance(self.backoff_strategy, Intervals):
            longest, name = (
                max(self.backoff_strategy.intervals),
                "the longest of backoff_strategy's Intervals",
            )
        if self.max_interval < longest:
            default = "" if "max_interval" in self.model_fields_set else ", the default,"
            raise ValueError(
                f"max_interval: {_show(self.max_interval)}{default} must be >= {name}, {_show(longest)}"
            )
        return self

    @classmethod
    def merge(cls, *partials: AnyPartial | None) -> Self:
        """Lay partial policies over the spec's default, later ones win field by field (spec section 8.1).

        `None`, and a field that is None, count as absent. Raises InvalidRetryPolicy for the merged result.
        """
        fields: dict[str, Any] = {}
        for partial in partials:
            fields.update(fields_of(partial))
        return cls(**fields)

    @property
    def runs(self) -> int:
        """The most times the handler may run: `max_attempts`, where 0 and 1 both mean once."""
        return max(self.max_attempts, 1)

    def delay(self, n: int, *, rng: Rng = random, failure: Failure | None = None) -> float:
        """Return the seconds before retry n, capped before and after jitter (spec sections 3, 5.1 and 5.3).

        `rng` draws the jitter; Python's own generator by default. Never raises for a large n. Raises the
        error of a custom strategy or jitter, and ValueError where it returns a number out of range.
        """
        return self.jittered(n, self.backoff(n, failure), rng=rng)

    def backoff(self, n: int, failure: Failure | None = None) -> float:
        """Return the seconds before retry n, uncapped and without jitter (spec Appendix A).

        Infinity where the result is larger than a float: the cap brings it back. Raises as `delay` does.
        """
        strategy, initial = self.backoff_strategy, self.initial_interval.total_seconds()
        n = min(n, _LARGEST_FLOAT)
        try:
            match strategy:
                case "none":
                    return initial
                case "linear":
                    return initial * n
                case "exponential":
                    return initial * math.pow(self.backoff_coefficient, n - 1)
                case "polynomial":
                    return initial * math.pow(n, self.backoff_coefficient)
        except OverflowError:
            return math.inf
        seconds = float(strategy(n, failure))
        if not seconds >= 0:
            raise ValueError(f"the custom backoff strategy returned {seconds} for retry {n}")
        return seconds

    def jittered(self, n: int, seconds: float, *, rng: Rng = random) -> float:
        """Return the delay before retry n, capped before and after jitter; raises as `delay` does."""
        cap = self.max_interval.total_seconds()
        effective = min(seconds, cap)
        jitter = self.jitter
        if jitter is False:
            return effective
        if jitter is True:
            return min(effective * SPEC_JITTER.factor(rng), cap)
        return min(_jittered(jitter, n, effective, rng), cap)

    def non_retryable_pattern(self, failure: Failure) -> str | None:
        """Return the first entry of `non_retryable_errors` that matches, or None (spec section 6.2)."""
        # The type, and the class name of an exception that no error map names.
        names = (failure.type,) if failure.alias is None else (failure.type, failure.alias)
        for pattern in self.non_retryable_errors:
            if pattern in names:
                return pattern
            if pattern.endswith(".*"):
                for name in names:
                    if name.startswith(pattern[:-1]):
                        return pattern
        return None

    def to_ojs(self, *, only: AnyPartial | None = None) -> dict[str, Any]:
        """Return the policy as the JSON object of the spec (section 2), or just the fields that `only` sets.

        A whole policy names no strategy if it is exponential: the schema of section 14 has no such field.
        Raises NotExpressible for a custom strategy or jitter, which only Python code can hold.
        """
        names = set(type(self).model_fields if only is None else fields_of(only))
        if only is None and self.backoff_strategy == "exponential":
            names.remove("backoff_strategy")
        _check_expressible(self, names)
        return self.model_dump(mode="json", include=names)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the spec's section 14, plus `backoff_strategy`."""
        return cls.model_json_schema(schema_generator=_SpecSchema)


def _jittered(jitter: CustomJitter, n: int, seconds: float, rng: Rng) -> float:
    answer = jitter(n, seconds, rng)
    try:
        jittered = float(answer)
    except (TypeError, ValueError, OverflowError):
        jittered = math.nan
    if not jittered >= 0:
        raise ValueError(f"the custom jitter returned {_show(answer)} for the {seconds} s before retry {n}")
    return jittered


#: With these beneath it, only the fields of a partial policy themselves can break a rule.
_LOOSEST = {"initial_interval": timedelta.resolution, "max_interval": timedelta.max}


def attempts_in_words(attempt: int, max_attempts: int, between: str = " of ") -> str:
    """Return the number of attempts that have begun, and their limit, in words."""
    return f"{attempt} (no limit)" if max_attempts >= LARGEST else f"{attempt}{between}{max_attempts}"


def check_partial(partial: AnyPartial | None) -> None:
    """Raise InvalidRetryPolicy for a partial policy that no layer beneath it could make valid."""
    RetryPolicy.merge(_LOOSEST, partial)


def partial_to_ojs(partial: AnyPartial | None) -> dict[str, Any]:
    """Return a partial policy in the spec's JSON form; raises InvalidRetryPolicy and NotExpressible."""
    return RetryPolicy.merge(_LOOSEST, partial).to_ojs(only=partial) if partial else {}


def check_errors(policy: AnyPartial | None) -> None:
    """Raise InvalidRetryPolicy for an owner's non-retryable error that is neither a type nor `prefix.*`.

    The entries of a message are not checked: to the spec, any text is a type.
    """
    named = policy.non_retryable_errors if isinstance(policy, RetryPolicy) else (policy or {}).get(_ERRORS)
    for place, text in enumerate(named or ()):
        if isinstance(text, str) and ("*" in text.removesuffix(".*") or text == ".*"):
            wrong = "must be a whole type, or a prefix with .* at its end such as 'external.*'"
            raise InvalidRetryPolicy([f"{_ERRORS}[{place}]: {text!r} {wrong}"])


def fields_of(partial: object) -> dict[str, Any]:
    """Return the fields that a partial policy sets, with their values; raises InvalidRetryPolicy."""
    if partial is None:
        return {}
    if isinstance(partial, RetryPolicy):
        return {name: getattr(partial, name) for name in partial.model_fields_set}
    if isinstance(partial, Mapping):
        if len(partial) > MAX_FIELDS:
            found, known = len(partial), len(RetryPolicy.model_fields)
            raise InvalidRetryPolicy([f"{_show(partial)}: has {found:,} fields; a retry policy has {known}"])
        bad = [name for name in partial if not (isinstance(name, str) and name.isascii())]
        if bad:
            raise InvalidRetryPolicy([f"{_show(name)}: is not a field of a retry policy" for name in bad])
        return {name: value for name, value in partial.items() if value is not None}
    raise InvalidRetryPolicy([f"{_show(partial)}: must be an object of retry policy fields"])


def known_words(partial: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message's policy that this release knows: a newer one may have sent it."""
    return {name: value for name, value in partial.items() if name in RetryPolicy.model_fields}


def _check_expressible(policy: RetryPolicy, names: set[str]) -> None:
    if "backoff_strategy" in names and not isinstance(policy.backoff_strategy, str):
        raise NotExpressible(
            f"backoff_strategy: {_show(policy.backoff_strategy)} exists only in Python code; "
            "the Open Job Spec has exponential, linear, polynomial and none"
        )
    if "jitter" in names and not isinstance(policy.jitter, bool) and policy.jitter != SPEC_JITTER:
        raise NotExpressible(
            f"jitter: {_show(policy.jitter)} exists only in Python code; "
            "the Open Job Spec has true, a factor in [0.5, 1.5), and false"
        )


class _SpecSchema(GenerateJsonSchema):
    def field_title_should_be_set(self, _schema: Any) -> bool:
        return False


_RULES = {
    "extra_forbidden": "is not a field of a retry policy",
    "int_type": "must be a non-negative integer",
    "greater_than": "must be greater than zero",
    "greater_than_equal": "must be >= {ge}",
    "less_than_equal": "must be <= {le}",
    "float_type": "must be a number >= 1.0",
    "finite_number": "must be a finite number >= 1.0",
    "bool_type": "must be a boolean",
    "string_type": "must be a string",
    "string_too_short": "must not be an empty string",
    "string_too_long": "must have at most {max_length} characters",
    "string_unicode": "must be a string of valid Unicode",
    "literal_error": "must be one of {expected}",
}
_FIELD_RULES = {
    "acks_late": "stands beside a policy, in an entry of `policies`, or is an option of a Celery task",
    "retry_on": "stands beside a policy, in an entry of `policies`, @ojs_task(retry_on=) or ojs_retry_on",
    "jitter": "must be a boolean, or in Python a Jitter or another callable",
    "backoff_strategy": "must be 'exponential', 'linear', 'polynomial' or 'none', or in Python a callable",
}


def _problems(error: ValidationError, fields: Mapping[str, Any]) -> list[str]:
    problems: dict[str, None] = {}
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        if not location:
            problems[problem["msg"].removeprefix("Value error, ")] = None
            continue
        name = str(location[0])
        value = _show(problem["input"] if len(location) > 1 else fields.get(name, problem["input"]))
        problems[f"{_place(location)}: {value} {_rule(name, problem)}"] = None
    return list(problems)


def _place(location: tuple[int | str, ...]) -> str:
    return f"{location[0]!s:.80}" + "".join(f"[{part}]" for part in location[1:] if isinstance(part, int))


def _rule(name: str, problem: Any) -> str:
    if name in _FIELD_RULES:
        return _FIELD_RULES[name]
    rule = _RULES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return str(rule.format_map(problem.get("ctx", {})))


def _show(value: object) -> str:
    if isinstance(value, timedelta):
        return format_interval(value)
    try:
        text = json.dumps(value) if isinstance(value, (str, bool, int, float)) else repr(value)
    except Exception:  # noqa: BLE001 - a hostile repr must not hide the real problem
        text = f"<{type(value).__name__}>"
    limit = 80
    return text if len(text) <= limit else text[:limit] + "…"
