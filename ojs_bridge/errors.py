"""The errors that this library raises. Those that a handler raises stand in `rules/failures.py`.

BridgeError
├── ConfigurationError        a ValueError: the bridge is set up in a way that cannot work
├── InvalidRetryPolicy        a ValueError: a policy breaks a rule
├── InvalidState              a ValueError: the retry state of a message cannot be read
├── NotExpressible            a ValueError: the Open Job Spec cannot express a policy
├── StoreError                the store did not do what it was asked
│   └── Unstorable            the store can never keep what it was given
├── NotInTransaction          a ValueError: a job cannot be a part of a transaction
├── Unreachable               the broker does not take a message now
├── Unpublishable             no broker will ever take this message
├── Unroutable                no queue takes this message as things are
├── NotResumable              a bulk operation is done, or runs elsewhere
├── NotUndoable               a deletion is no deletion, still runs, or has nothing in the bin
└── NotFound                  a KeyError
    ├── LetterNotFound
    ├── OperationNotFound
    ├── NothingMatched
    ├── HoldNotFound
    ├── DependencyNotFound
    └── JobNotFound
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
    """The retry state of a message cannot be read: it is damaged, or of an unknown version."""

    type: ClassVar[str] = "validation.state_invalid"


class NotExpressible(BridgeError, ValueError):
    """A policy uses a custom strategy or jitter, which the Open Job Spec cannot express."""


class ConfigurationError(BridgeError, ValueError):
    """The bridge is set up in a way that cannot work; the message names the setting and the rule."""


class StoreError(BridgeError):
    """The store did not do what it was asked: it is out of reach, or a newer version has written it."""


class Unstorable(StoreError):
    """The store can never keep what it was given: a text that its encoding lacks, or one that is too long.

    It is no outage: other jobs go on.
    """


class NotInTransaction(BridgeError, ValueError):
    """A job cannot be a part of a transaction: none is open, it has failed, or its database has no store."""


class Unreachable(BridgeError):
    """The broker did not take a message, and may take it later."""


class Unpublishable(BridgeError):
    """This message can never be published."""


class Unroutable(BridgeError):
    """No queue takes this message: its queue is gone, and RabbitMQ refuses to declare it again.

    Other messages go on; this one stays where it was.
    """


class NotFound(BridgeError, KeyError):
    """The store has nothing with this id for the caller."""

    def __str__(self) -> str:
        return str(self.args[0])


class LetterNotFound(NotFound):
    """There is no dead letter of this id, or another replay holds it at this moment."""


class NotResumable(BridgeError):
    """A bulk operation is done, or another process carries it out."""


class NotUndoable(BridgeError):
    """A deletion cannot be undone: nothing of it is in the bin, it still runs, or it is no deletion."""


class OperationNotFound(NotFound):
    """There is no bulk operation of this id, or no longer."""


class NothingMatched(NotFound):
    """A bulk operation was not begun: its filter has no letter, or no job, now."""


class HoldNotFound(NotFound):
    """No hold of this id, or of these jobs, is on."""


class DependencyNotFound(NotFound):
    """No dependency has this name."""


class JobNotFound(NotFound):
    """The store does not know a job of this id, no such job waits there, or it is being published now."""
