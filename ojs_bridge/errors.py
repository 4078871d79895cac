"""What this library raises. What a handler raises stands in `spec/responses.py`.

BridgeError
├── ConfigurationError        a ValueError: the bridge is set up in a way that cannot work
├── InvalidRetryPolicy        a ValueError: a policy breaks a rule
├── InvalidState              a ValueError: a message carries retry state that nobody can read
├── NotExpressible            a ValueError: a policy that the Open Job Spec has no words for
├── StoreError                the store cannot do what was asked
├── Unreachable               the broker does not take a message now
├── Unpublishable             no broker will ever take this message
└── NotFound                  a KeyError
    ├── LetterNotFound
    └── RetryNotFound
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class BridgeError(Exception):
    """The base of every error that this library raises."""


class InvalidRetryPolicy(BridgeError, ValueError):
    """A retry policy breaks a rule; `problems` has one line for each (spec section 11)."""

    type: ClassVar[str] = "validation.retry_policy_invalid"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "invalid retry policy: " + "; ".join(self.problems)

    def under(self, place: str) -> InvalidRetryPolicy:
        """Return the error with the place of the policy before each line."""
        return type(self)([f"{place}: {line}" for line in self.problems])


class InvalidState(BridgeError, ValueError):
    """The retry state that a message carries cannot be read: damaged, or of an unknown version."""

    type: ClassVar[str] = "validation.state_invalid"


class NotExpressible(BridgeError, ValueError):
    """A policy uses what only Python code can express, so it has no Open Job Spec form."""


class ConfigurationError(BridgeError, ValueError):
    """The bridge is set up in a way that cannot work; the message names what and where."""


class StoreError(BridgeError):
    """The store cannot do what was asked: unreachable, or written by a newer version."""


class Unreachable(BridgeError):
    """The broker did not take a message, and may take it later."""


class Unpublishable(BridgeError):
    """This message can never be published."""


class NotFound(BridgeError, KeyError):
    """The store has nothing of this id for the caller."""

    def __str__(self) -> str:
        return str(self.args[0])


class LetterNotFound(NotFound):
    """There is no dead letter of this id, or another replay holds it at this moment."""


class RetryNotFound(NotFound):
    """There is no parked retry of this id, or it is being published at this moment."""
