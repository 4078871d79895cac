"""Open Job Spec retry semantics for the Celery and Dramatiq fleets that already run."""

from .backoff import Intervals, Jitter
from .bridge import Bridge
from .dead_letters import LetterNotFound
from .errors import (
    ConfigurationError,
    DeadLetter,
    Discard,
    Fail,
    InvalidRetryPolicy,
    InvalidState,
    NotExpressible,
    Response,
    Retry,
    Snooze,
)
from .events import Event, Listener
from .policy import PartialPolicy, RetryPolicy
from .store import Letter, Page, Stats, Store, StoreError, open_store

__all__ = [
    "Bridge",
    "ConfigurationError",
    "DeadLetter",
    "Discard",
    "Event",
    "Fail",
    "Intervals",
    "InvalidRetryPolicy",
    "InvalidState",
    "Jitter",
    "Letter",
    "LetterNotFound",
    "Listener",
    "NotExpressible",
    "Page",
    "PartialPolicy",
    "Response",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "Stats",
    "Store",
    "StoreError",
    "open_store",
]
