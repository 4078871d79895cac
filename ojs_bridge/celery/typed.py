"""What `@ojs_task` makes of a function, in the words of a type checker; nothing of it is used at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from celery.result import AsyncResult

from ..spec.policy import PartialPolicy
from .task import CheckedSignature, OJSTask

P = ParamSpec("P")
R = TypeVar("R")


class TaskOf(OJSTask, Generic[P, R]):
    """A task that takes what its function takes."""

    run: Callable[P, R]
    delay: Callable[P, AsyncResult]
    s: Callable[..., CheckedSignature]
    si: Callable[P, CheckedSignature]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.run(*args, **kwargs)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *more: Any,
        ojs_retry: PartialPolicy | None = None,
        **options: Any,
    ) -> AsyncResult: ...


class Decorator(Protocol):
    """What makes a task of a function; of `@ojs_task` without parentheses it is the task itself.

    A checker that does not know Celery's types cannot tell an app from a function.
    """

    @overload
    def __call__(self, fun: Callable[P, R], /) -> TaskOf[P, R]: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...


class BindingDecorator(Protocol):
    """What makes a task of a function whose first parameter is the task."""

    def __call__(self, fun: Callable[Concatenate[Any, P], R], /) -> TaskOf[P, R]: ...
