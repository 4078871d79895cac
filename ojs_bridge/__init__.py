"""Open Job Spec retry semantics for the Celery and Dramatiq fleets that already run."""

from .bridge import Bridge
from .config.policies import PolicyEntry
from .engine.events import Event, Listener
from .engine.redaction import Redaction
from .engine.storage_retry import StorageRetry
from .errors import (
    BridgeError,
    ConfigurationError,
    DependencyNotFound,
    HoldNotFound,
    InvalidRetryPolicy,
    InvalidState,
    JobNotFound,
    LetterNotFound,
    NotExpressible,
    NotFound,
    NothingMatched,
    NotInTransaction,
    NotResumable,
    NotUndoable,
    OperationNotFound,
    StoreError,
    Unpublishable,
    Unreachable,
    Unroutable,
    Unstorable,
)
from .messages import Reading
from .operations.audit import Mark, Record
from .operations.bulk import Preview
from .operations.editing import EditedLetter
from .operations.group import ErrorGroup
from .operations.groups import Timeline
from .operations.health import Health
from .operations.operation import Operation
from .operations.rates import RateHistory
from .operations.replaying import Bulk, ReplayRule
from .operations.retention import Retention
from .operations.undoing import Undone
from .operations.waiting import Drained
from .operations.webhooks import Webhook
from .rules.backoff import Intervals, Jitter, Seeded
from .rules.breaker import Breaker
from .rules.budget import Budget
from .rules.dependencies import Dependency
from .rules.edits import Edits
from .rules.failures import HandlerFailed
from .rules.policy import PartialPolicy, RetryPolicy
from .rules.responses import DeadLetter, Discard, Fail, OJSError, Response, Retry, Snooze
from .rules.standard_errors import standard_errors
from .store import Filter, Letter, Page, Parked, ParkedPage, Stats, Store, open_store

_CELERY = dict.fromkeys(("ojs_task", "OJSTask"), "ojs_bridge.celery")
_DRAMATIQ = dict.fromkeys(("OJSRetries", "bridge_of"), "ojs_bridge.dramatiq")
#: Names of the adapters, and names that a reader may take for them, with the lines that import what is meant.
_ELSEWHERE = {
    **{name: f"from {home} import {name}" for name, home in (_CELERY | _DRAMATIQ).items()},
    **dict.fromkeys(
        ("task", "Task", "shared_task", "ojs_shared_task"), "from ojs_bridge.celery import ojs_task"
    ),
    **dict.fromkeys(
        ("OJSMiddleware", "OJSRetry", "OjsRetries", "Retries", "Middleware"),
        "from ojs_bridge.dramatiq import OJSRetries",
    ),
    **dict.fromkeys(
        ("install", "celery_install", "dramatiq_install"),
        "from ojs_bridge.celery import install, or from ojs_bridge.dramatiq import install",
    ),
    **dict.fromkeys(("Policy", "OJSPolicy", "OJSRetryPolicy"), "from ojs_bridge import RetryPolicy"),
}


def __getattr__(name: str) -> object:
    if name in _ELSEWHERE:
        # An AttributeError would not reach the reader of `from ojs_bridge import ...`.
        raise ImportError(f"ojs_bridge has no {name}: {_ELSEWHERE[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Breaker",
    "Bridge",
    "BridgeError",
    "Budget",
    "Bulk",
    "ConfigurationError",
    "DeadLetter",
    "Dependency",
    "DependencyNotFound",
    "Discard",
    "Drained",
    "EditedLetter",
    "Edits",
    "ErrorGroup",
    "Event",
    "Fail",
    "Filter",
    "HandlerFailed",
    "Health",
    "HoldNotFound",
    "Intervals",
    "InvalidRetryPolicy",
    "InvalidState",
    "Jitter",
    "JobNotFound",
    "Letter",
    "LetterNotFound",
    "Listener",
    "Mark",
    "NotExpressible",
    "NotFound",
    "NotInTransaction",
    "NotResumable",
    "NotUndoable",
    "NothingMatched",
    "OJSError",
    "Operation",
    "OperationNotFound",
    "Page",
    "Parked",
    "ParkedPage",
    "PartialPolicy",
    "PolicyEntry",
    "Preview",
    "RateHistory",
    "Reading",
    "Record",
    "Redaction",
    "ReplayRule",
    "Response",
    "Retention",
    "Retry",
    "RetryPolicy",
    "Seeded",
    "Snooze",
    "Stats",
    "StorageRetry",
    "Store",
    "StoreError",
    "Timeline",
    "Undone",
    "Unpublishable",
    "Unreachable",
    "Unroutable",
    "Unstorable",
    "Webhook",
    "open_store",
    "standard_errors",
]
