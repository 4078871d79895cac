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
from .parked_retries import RetryNotFound
from .policy import PartialPolicy, RetryPolicy
from .retention import Retention
from .storage_retry import StorageRetry
from .store import Letter, Page, Parked, ParkedPage, Stats, Store, StoreError, open_store

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
    "Parked",
    "ParkedPage",
    "PartialPolicy",
    "Response",
    "Retention",
    "Retry",
    "RetryNotFound",
    "RetryPolicy",
    "Snooze",
    "Stats",
    "StorageRetry",
    "Store",
    "StoreError",
    "open_store",
]
