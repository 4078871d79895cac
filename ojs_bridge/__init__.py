"""Open Job Spec retry semantics for the Celery and Dramatiq fleets that already run."""

from .bridge import Bridge
from .config.policies import PolicyEntry
from .engine.events import Event, Listener
from .engine.redaction import Redaction
from .engine.storage_retry import StorageRetry
from .errors import (
    BridgeError,
    ConfigurationError,
    InvalidRetryPolicy,
    InvalidState,
    LetterNotFound,
    NotExpressible,
    NotFound,
    NotResumable,
    OperationNotFound,
    RetryNotFound,
    StoreError,
    Unpublishable,
    Unreachable,
    Unroutable,
    Unstorable,
)
from .messages import Reading
from .operations.operation import Operation
from .operations.replaying import Bulk, ReplayRule
from .operations.retention import Retention
from .rules.backoff import Intervals, Jitter, Seeded
from .rules.failures import DeadLetter, Discard, Fail, Response, Retry, Snooze
from .rules.policy import PartialPolicy, RetryPolicy
from .store import Filter, Letter, Page, Parked, ParkedPage, Stats, Store, open_store

__all__ = [
    "Bridge",
    "BridgeError",
    "Bulk",
    "ConfigurationError",
    "DeadLetter",
    "Discard",
    "Event",
    "Fail",
    "Filter",
    "Intervals",
    "InvalidRetryPolicy",
    "InvalidState",
    "Jitter",
    "Letter",
    "LetterNotFound",
    "Listener",
    "NotExpressible",
    "NotFound",
    "NotResumable",
    "Operation",
    "OperationNotFound",
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
    "Unpublishable",
    "Unreachable",
    "Unroutable",
    "Unstorable",
    "open_store",
]
