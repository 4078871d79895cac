"""Open Job Spec retry semantics for the Celery and Dramatiq fleets that already run."""

from .backoff import Intervals, Jitter, Seeded
from .bridge import Bridge
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
from .patterns import PolicyEntry
from .policy import PartialPolicy, RetryPolicy
from .reading import Reading
from .redaction import Redaction
from .replay_rules import ReplayRule
from .replaying import Bulk, LetterNotFound
from .retention import Retention
from .storage_retry import StorageRetry
from .store import Letter, Page, Parked, ParkedPage, Stats, Store, StoreError, open_store

__all__ = [
    "Bridge",
    "Bulk",
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
    "PolicyEntry",
    "Reading",
    "Redaction",
    "ReplayRule",
    "Response",
    "Retention",
    "Retry",
    "RetryNotFound",
    "RetryPolicy",
    "Seeded",
    "Snooze",
    "Stats",
    "StorageRetry",
    "Store",
    "StoreError",
    "open_store",
]
