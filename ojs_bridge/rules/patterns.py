"""The one pattern language: `*` stands for any characters, everything else for itself, in its own case."""

from __future__ import annotations

import fnmatch

from ..errors import InvalidRetryPolicy
from .policy import AnyPartial, RetryPolicy

_ERRORS = "non_retryable_errors"


def matches(text: str, pattern: str) -> bool:
    """Return whether a text such as `billing.charge` matches a pattern such as `billing.*`."""
    return fnmatch.fnmatchcase(text, to_glob(pattern))


def to_glob(pattern: str) -> str:
    """Return a pattern as a glob, with `?` and `[` escaped."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def check_pattern(name: str, pattern: object) -> None:
    """Raise ValueError for an argument that is no pattern; None is no pattern at all, and valid."""
    if pattern is not None and not (pattern and isinstance(pattern, str)):
        raise ValueError(f"{name}: {pattern!r} must be a name, or a pattern such as 'billing.*'")


def check_errors(policy: AnyPartial | None) -> None:
    """Raise InvalidRetryPolicy for an owner's non-retryable error in a form that the spec does not have.

    The spec has a whole type and `prefix.*`. The entries of a message are not checked: by the spec, each is a
    type like any other.
    """
    named = policy.non_retryable_errors if isinstance(policy, RetryPolicy) else (policy or {}).get(_ERRORS)
    for place, text in enumerate(named or ()):
        if isinstance(text, str) and ("*" in text.removesuffix(".*") or text == ".*"):
            wrong = "must be a whole type, or a prefix with .* at its end such as 'external.*'"
            raise InvalidRetryPolicy([f"{_ERRORS}[{place}]: {text!r} {wrong}"])
