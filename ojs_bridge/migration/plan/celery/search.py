"""Where a task's code calls `self.retry(...)`: in its body, its wrappers, its classes and its helpers.

And where it sets what Celery retries it by.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from types import FunctionType

from celery import Task

from .bodies import Body, NoSource
from .callees import body_of, callee, entries, is_celerys_retry, is_hidden_retry, is_out_of_sight
from .retry_calls import RetryCall, calls_in, place_of, retry_call, settings_in


@dataclass(slots=True)
class Search:
    """The calls found in a task's code, and what else may call `retry`, in words."""

    task: Task
    calls: list[RetryCall] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    #: What of the task it sets itself, and where, such as `self.max_retries in line 12`.
    sets: list[str] = field(default_factory=list)
    _entries: list[FunctionType] = field(default_factory=list)

    def read_all(self) -> None:
        """Search everything that a worker runs for the task."""
        found = list(entries(self.task))
        self._entries = [function for function, _ in found]
        if not found:
            self.unread.append(f"the source of {self.task.name} itself cannot be read")
        for function, bound in found:
            body = body_of(self.task, function, [self.task] if bound else [], {}, whole=False)
            if body is not None:
                self._read(body, ())

    def _read(self, body: Body, through: tuple[FunctionType, ...]) -> None:
        try:
            node = body.node
        except NoSource as error:
            self.unread.append(f"the source of {error} cannot be read")
            return
        self.sets += settings_in(body, node)
        seen = (*through, body.function)
        for call, swallowed in calls_in(node):
            if is_celerys_retry(body, call):
                self.calls.append(retry_call(body, call, swallowed=swallowed))
                continue
            called = callee(body, call)
            if is_hidden_retry(body, call):
                self.unread.append(f"{ast.unparse(call.func)} is not followed in {place_of(body, call)}")
            elif called is None and is_out_of_sight(body, call):
                self.unread.append(f"{ast.unparse(call.func)} is given the task in {place_of(body, call)}")
            if called and called.function not in (*self._entries, *seen) and _may_retry(called):
                self._read(called, seen)


def _may_retry(called: Body) -> bool:
    return called.has_task or called.asks_for_the_task


def search(task: Task) -> Search:
    """Return what is found in a task's code, which is read and not run."""
    found = Search(task)
    found.read_all()
    return found
