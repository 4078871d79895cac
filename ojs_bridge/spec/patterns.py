"""The one pattern language: `*` stands for any characters, everything else for itself, in its own case."""

from __future__ import annotations

import fnmatch

from ..errors import InvalidRetryPolicy
from .policy import AnyPartial, RetryPolicy

_ERRORS = "non_retryable_errors"


def matches(text: str, pattern: str) -> bool:
    """Return whether a text, such as `billing.charge`, is of a pattern, such as `billing.*`."""
    return fnmatch.fnmatchcase(text, to_glob(pattern))


def to_glob(pattern: str) -> str:
    """Return a pattern as a glob, in which `?` and `[` are special characters, too."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def check_pattern(name: str, pattern: object) -> None:
    """Raise ValueError for what is no pattern, which `name` gives; None is the absence of one."""
    if pattern is not None and not (pattern and isinstance(pattern, str)):
        raise ValueError(f"{name}: {pattern!r} must be a name, or a pattern such as 'billing.*'")


def check_errors(policy: AnyPartial | None) -> None:
    """Raise InvalidRetryPolicy where an owner gives a non-retryable error in a form that the spec lacks.

    The spec knows a whole type and `prefix.*`. A message's entries are not checked: to the specification each
    is a type like any other.
    """
    named = policy.non_retryable_errors if isinstance(policy, RetryPolicy) else (policy or {}).get(_ERRORS)
    for place, text in enumerate(named or ()):
        if isinstance(text, str) and ("*" in text.removesuffix(".*") or text == ".*"):
            wrong = "must be a whole type, or a prefix with .* at its end such as 'external.*'"
            raise InvalidRetryPolicy([f"{_ERRORS}[{place}]: {text!r} {wrong}"])
