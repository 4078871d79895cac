"""Sentry: its own integrations report errors, and the bridge adds the facts of the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

try:
    import sentry_sdk
    from sentry_sdk.integrations.logging import ignore_logger
    from sentry_sdk.scope import add_global_event_processor
except ImportError as error:
    raise ImportError("Sentry's SDK is missing: pip install 'ojs-bridge[sentry]'") from error

from ..bridge import Bridge
from ..engine.events import FIELDS
from ..engine.instruments import Instrument
from ..engine.runs import Refuse, Run
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack
from ..rules.fingerprint import fingerprint
from ..rules.responses import Retry, Snooze

_ENDS = ("discarded", "dead-lettered")

_added: set[str] = set()


def instrument(bridge: Bridge) -> None:
    """Add a job's facts to the events that Sentry has of it; call it after `sentry_sdk.init`.

    A failure is reported as Sentry's own integration does it, and the end of a job once.
    """
    if not _added:
        _added.add("lines")
        add_global_event_processor(_of_line)
        # As Sentry's Celery integration does with Celery's: this line comes before the decision.
        ignore_logger("dramatiq.worker.WorkerThread")
    bridge.engine.instrument(_Sentry())


@dataclass
class _Report:
    """The facts of a run, for the events of its scope."""

    framework: str
    run: Run
    decision: Decision | None = None

    def add_to(self, event: Any, hint: dict[str, Any]) -> Any:
        """Return an event with the facts of the run; None for an event that says nothing new."""
        raised = (hint.get("exc_info") or (None, None))[1]
        ended = isinstance(self.decision, (Discarded, DeadLettered))
        # A worker's shutdown is no error of the job that it gives back.
        if isinstance(self.decision, GiveBack) or (isinstance(raised, (Retry, Snooze)) and not ended):
            return None
        if "log_record" in hint and getattr(hint["log_record"], "decision", None) in _ENDS:
            # Sentry's integration reports the error itself.
            return None
        job, failure = self.run.job, getattr(self.decision, "failure", None)
        facts = {"job_id": job.id, "job_type": job.type, "queue": job.queue, "attempt": job.attempt}
        _tag(event, facts)
        if failure is not None and raised is not None:
            _tag(event, {"error_type": failure.type, "ended": str(ended).lower()})
            fault = job.type, failure.type, failure.message, failure.backtrace
            group = fingerprint(*fault, self.framework)
            _tag(event, {"group": group})
            event["fingerprint"] = [group]
        return event


_report: ContextVar[_Report | None] = ContextVar("ojs_bridge_report", default=None)


class _Sentry(Instrument):
    """Adds the facts of a run to each event in the scope that Sentry's integration made for it."""

    def running(self, framework: str, run: Run, carrier: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of a run; without an integration there is no scope for it."""
        return _reporting(_Report(framework, run))

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:  # noqa: ARG002
        """Keep the decision; Sentry's integration reports the error after it."""
        report = _report.get()
        if report and report.run.job.id == run.job.id and not isinstance(decision, Complete):
            report.decision = decision


@contextmanager
def _reporting(report: _Report) -> Iterator[None]:
    client = sentry_sdk.get_client()
    if client.get_integration(report.framework):
        sentry_sdk.get_isolation_scope().add_event_processor(report.add_to)
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def _of_line(event: Any, hint: dict[str, Any]) -> Any:
    """Return an event with the facts of the log line that it was made of."""
    record = hint.get("log_record")
    if isinstance(record, logging.LogRecord) and record.name == "ojs_bridge":
        facts = {name: vars(record)[name] for name in FIELDS if name in vars(record)}
        _tag(event, {**facts, **({"ended": "true"} if facts.get("decision") in _ENDS else {})})
    return event


def _tag(event: Any, facts: dict[str, Any]) -> None:
    event.setdefault("tags", {}).update({f"ojs.{name}": str(value) for name, value in facts.items()})
