"""The request class of a task: the user's class, with the bridge's as its base."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from kombu.utils.imports import symbol_by_name

from .native_options import NATIVE

_OURS = "ojs_bridge.celery.request:OJSRequest"
_NAME = "Request"


class RequestClass:
    """The attribute `Request` of a task under the bridge: the user's class, with the bridge's as its base.

    A user's method comes first, and calls the bridge's by `super()`. A dotted path is imported when a worker
    asks for the class; earlier that might fail.
    """

    def __init__(self, given: Any = None) -> None:
        self._given = given

    def __get__(self, task: Any, cls: type) -> Any:
        """Return the task's request class, or the dotted path of the bridge's."""
        own = (vars(task).get(_NAME) if task is not None else None) or self._given or _inherited(cls)
        return _OURS if own is None else _composed(symbol_by_name(own))

    def __set__(self, task: Any, given: Any) -> None:
        """Take a class that is assigned to a task."""
        vars(task)[_NAME] = given


def keep(cls: type) -> None:
    """Have a request class that a class of bridged tasks names itself composed, too."""
    given = inspect.getattr_static(cls, _NAME)
    if not isinstance(given, RequestClass):
        setattr(cls, _NAME, RequestClass(given))


def _inherited(cls: type) -> Any:
    """Return the request class of the user's own base classes."""
    found = (vars(base).get(_NAME) for base in cls.__mro__ if base.__module__ != NATIVE)
    return next((given for given in found if given is not None and not isinstance(given, RequestClass)), None)


@functools.cache
def _composed(own: type) -> Any:
    from celery.worker.request import Request

    from .request import OJSRequest

    if issubclass(own, OJSRequest):
        return own
    if own is Request:
        return OJSRequest
    return type(own.__name__, (own, OJSRequest), {"__module__": own.__module__})
