"""The one pattern language: a whole type, or `prefix.*`."""

from __future__ import annotations

from ..errors import InvalidRetryPolicy
from .policy import AnyPartial, RetryPolicy

_ERRORS = "non_retryable_errors"


def check_pattern(name: str, text: str | None) -> None:
    """Raise ValueError for what is neither a whole type nor `prefix.*`, and so would match nothing."""
    if isinstance(text, str) and ("*" in text.removesuffix(".*") or text == ".*"):
        raise ValueError(
            f"{name}: {text!r} must be a whole type, or a prefix with .* at its end such as 'external.*'"
        )


def check_errors(policy: AnyPartial | None) -> None:
    """Raise InvalidRetryPolicy where an owner names a non-retryable error by a pattern that there is not.

    What a message brings is not checked: to the specification such an entry is a type like any other.
    """
    named = policy.non_retryable_errors if isinstance(policy, RetryPolicy) else (policy or {}).get(_ERRORS)
    for place, text in enumerate(named or ()):
        try:
            check_pattern(f"{_ERRORS}[{place}]", text)
        except ValueError as error:
            raise InvalidRetryPolicy([str(error)]) from None
