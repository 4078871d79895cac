"""Reads a kept message, without running or importing any code of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The header or option of a message that carries its job's retry state.
HEADER = "ojs"
#: The option of a sender that carries a job's own partial policy.
RETRY_OPTION = "ojs_retry"
#: The option of a task or an actor that names the dependencies of its jobs.
DEPENDS_OPTION = "ojs_depends"
#: The option of a send that names the connection in whose transaction the job is sent; and that of a task or
#: an actor whose jobs are sent in the transaction that there is.
IN_OPTION, OUTBOX_OPTION = "ojs_in", "ojs_outbox"
#: The header in which an instrumented sender on Celery says when a job was sent.
CREATED = "ojs_created_at"
#: The headers and options of a message that belong to the bridge or to a framework.
OWN_META = frozenset(
    {
        "argsrepr", "compression", "errbacks", "eta", "expires", "id", "ignore_result", "kwargsrepr", "lang",
        CREATED, HEADER, RETRY_OPTION, "ojs_delayed_as", "origin", "parent_id",
        "redis_message_id", "replaced_task_nesting", "requeue_timestamp", "retries", "root_id", "shadow",
        "stamped_headers", "stamps", "task", "timelimit", "traceback",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """A message's arguments, and the user's own headers or options.

    `names` are the names of the handler's parameters, where they are known. Where the arguments cannot be
    read, both are None and `note` says why. `hidden` names the fields that a redaction has changed.
    """

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()
    note: str = ""
    hidden: Sequence[str] = ()

    def to_ojs(self) -> dict[str, Any]:
        """Return the fields for the details of dead letters and parked jobs."""
        return {
            "args": self.args,
            "kwargs": self.kwargs,
            "meta": dict(self.meta),
            "note": self.note,
            "parameters": [*self.names],
            "hidden": [*self.hidden],
        }


def shown_errors(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an error history for details: `occurred_at` repeats each timestamp."""
    return [{**entry, "occurred_at": entry.get("timestamp")} for entry in errors]


def read_message(message: Mapping[str, Any]) -> Reading:
    """Read a kept message; never raises, and never unpickles."""
    names = tuple(str(name) for name in message.get("parameters") or ())
    try:
        if "encoded" in message:
            return _encoded(message, names)
        if "body" in message:
            return _with_headers(message, names)
        meta, note = dict(message.get("meta") or {}), str(message.get("note") or "")
        hidden = tuple(message.get("hidden") or ())
        return Reading(message.get("args"), message.get("kwargs"), meta, names, note, hidden)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Reading(names=names, note=f"it cannot be read: {error!r}")


def _encoded(message: Mapping[str, Any], names: Sequence[str]) -> Reading:
    """Read a message as its framework's encoder wrote it, with its options inside."""
    raw = _bytes(message["encoded"], message["encoding"])
    try:
        decoded = json.loads(raw)
    except ValueError:
        return Reading(names=names, note=f"{len(raw)} bytes of an encoder that is not JSON")
    return Reading(list(decoded["args"]), dict(decoded["kwargs"]), _meta(decoded["options"]), names)


def _with_headers(message: Mapping[str, Any], names: Sequence[str]) -> Reading:
    """Read a message whose headers stand beside its body, a list of the arguments and more."""
    meta = _meta(message["headers"])
    content_type = str(message["content_type"])
    raw = _bytes(message["body"], message["body_encoding"])
    if content_type != "application/json":
        what = "pickled" if "pickle" in content_type or "python-serialize" in content_type else content_type
        return Reading(meta=meta, names=names, note=f"{len(raw)} bytes, {what}, which is not opened here")
    if message["headers"].get("compression"):
        return Reading(meta=meta, names=names, note=f"{len(raw)} bytes, compressed")
    args, kwargs, _embed = json.loads(raw)
    return Reading(list(args), dict(kwargs), meta, names)


def _bytes(text: str, encoding: str) -> bytes:
    return base64.b64decode(text) if encoding == "base64" else text.encode("utf-8")


def _meta(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in OWN_META and value is not None}
