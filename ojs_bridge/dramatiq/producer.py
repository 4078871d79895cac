"""What a message asks of its retries, checked where it is enqueued and written into its `ojs` header."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import dramatiq

from ..spec.job import VERSION
from .translate import HEADER, RETRY_OPTION

#: Makes the header of a message that brings its own partial policy; raises InvalidRetryPolicy.
HeaderOf: TypeAlias = Callable[[dramatiq.Message[Any], Any], dict[str, Any]]

_NESTS = ("pipe_target", "group_completion_callbacks")
#: What a message brings that has a policy of its own, or carries messages that may.
WISHING = frozenset((RETRY_OPTION, *_NESTS))
#: What a message brings that is not plain: retry state, and wishes for itself or those it carries.
READ = frozenset((HEADER, *WISHING, "throws", "max_retries", "min_backoff", "max_backoff"))


def add_headers(message: dramatiq.Message[Any], header_of: HeaderOf) -> None:
    """Turn the `ojs_retry` of a message, and of those it will send on, into `ojs` headers: all or none."""
    found = [m for m in (message, *_nested(message.options)) if RETRY_OPTION in m.options]
    wishes = [m.options[RETRY_OPTION] for m in found]
    headers = [None if wish is None else header_of(m, wish) for m, wish in zip(found, wishes, strict=True)]
    for each, header in zip(found, headers, strict=True):
        del each.options[RETRY_OPTION]
        if header is not None:
            each.options[HEADER] = header


def carry_wishes(options: dict[str, Any]) -> None:
    """Write the `ojs_retry` that no producer has read into headers, of a message and those it carries.

    The worker that runs the message judges it: what has been sent can no longer be refused.
    """
    for each in (options, *(message.options for message in _nested(options))):
        wish = each.pop(RETRY_OPTION, None)
        if wish is not None and HEADER not in each:
            each[HEADER] = {"v": VERSION, "attempt": 1, "retry": wish}


def _nested(options: Mapping[str, Any]) -> Iterator[dramatiq.Message[Any]]:
    """Return the messages that a message carries: the rest of its pipeline, its group's callbacks."""
    target, callbacks = (options.get(name) for name in _NESTS)
    for fields in (*([target] if target else []), *(callbacks or [])):
        message = dramatiq.Message[Any](**fields)
        yield message
        yield from _nested(message.options)
