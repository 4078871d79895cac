"""What a worker calls for a task, and what that calls in turn, with the arguments it gives."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

from celery import Task

from .bodies import NOTHING, Argument, Body


def entries(task: Task) -> Iterator[tuple[FunctionType, bool]]:
    """Yield what a worker calls, and what that wraps, each with whether it is given the task first."""
    call = _method(type(task), "__call__")
    if call is not None:
        yield call, True
    retry = _method(type(task), "retry") if "_orig_run" in vars(task) else None
    if retry is not None:
        yield retry, True
    run: Any = vars(task).get("_orig_run", task.run)
    bound = inspect.ismethod(run)
    for function in _unwrapped(getattr(run, "__func__", run)):
        if isinstance(function, FunctionType) and _is_the_users(function):
            yield function, bound


def _unwrapped(function: Any) -> list[Any]:
    found: list[Any] = []
    while function is not None and function not in found:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


def is_celerys_retry(body: Body, call: ast.Call) -> bool:
    """Return whether a call is one of Celery's own `Task.retry`, and not of an override."""
    return body.path(call.func) == ".retry" and _called_method(body, call) is None


def callee(body: Body, call: ast.Call) -> Body | None:
    """Return the user's function that a call reaches, with what it is given; None if that cannot be told."""
    arguments, whole = _given(body, call)
    keywords = {k.arg: _argument(body, k.value) for k in call.keywords if k.arg}
    method = _called_method(body, call)
    if method is not None:
        return body_of(body.task, method, [body.task, *arguments], keywords, whole=whole)
    function = body.resolve(call.func)
    if type(function) is not FunctionType or not _is_the_users(function):
        return None
    return body_of(body.task, function, arguments, keywords, whole=whole)


def is_hidden_retry(body: Body, call: ast.Call) -> bool:
    """Return whether a call gives the task's `retry` away, or is one of something that may be the task."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if any(body.path(node) == ".retry" for node in given):
        return type(body.resolve(call.func)) is not BuiltinFunctionType
    named = {keyword.arg for keyword in call.keywords} & {"countdown", "eta", "exc", "max_retries"}
    is_retry = isinstance(call.func, ast.Attribute) and call.func.attr == "retry"
    return is_retry and bool(named) and body.path(call.func) is None and body.resolve(call.func) is NOTHING


def is_out_of_sight(body: Body, call: ast.Call) -> bool:
    """Return whether a call gives the task to something of the user's that cannot be told or read."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if body.path(call.func) is not None or not any(_is_the_task(body, node) for node in given):
        return False
    reached = body.resolve(call.func)
    kind = type(reached)
    if issubclass(kind, type):
        return _is_the_users_module(reached.__module__)
    return kind not in (FunctionType, BuiltinFunctionType)


def _is_the_task(body: Body, node: ast.expr) -> bool:
    if isinstance(node, ast.Starred):
        return isinstance(node.value, ast.Name) and node.value.id == body.packed
    return body.path(node) == ""


def body_of(
    task: Task, function: FunctionType, args: Sequence[object], kwargs: Mapping[str, object], *, whole: bool
) -> Body | None:
    """Return a function with what it is given; unless that is the whole, other parameters may be anything.

    None for arguments that it does not take.
    """
    signature = _signature(function)
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    packed = [n for n, value in bound.items() if isinstance(value, tuple) and value[:1] == (task,)]
    body = Body(task, function, frozenset(n for n in bound if bound[n] is task), packed[0] if packed else "")
    given = {name: value for name, value in bound.items() if isinstance(value, Argument)}
    if whole:
        given.update(_defaults(body, signature, bound))
    return replace(body, arguments=given)


def _signature(function: FunctionType) -> inspect.Signature:
    """Return a function's parameters, without its annotations, which newer Pythons would work out for it."""
    bare = FunctionType(function.__code__, {}, "bare", function.__defaults__, function.__closure__)
    bare.__kwdefaults__ = function.__kwdefaults__
    return inspect.signature(bare)


def _defaults(
    body: Body, signature: inspect.Signature, bound: Mapping[str, object]
) -> Iterator[tuple[str, Argument]]:
    for name, parameter in signature.parameters.items():
        if name not in bound and parameter.default is not parameter.empty:
            yield name, Argument(body, ast.Constant(parameter.default))


def _is_the_users(function: FunctionType) -> bool:
    return _is_the_users_module(str(function.__globals__.get("__name__")))


def _is_the_users_module(name: str) -> bool:
    package = name.split(".", maxsplit=1)[0]
    return package not in ("celery", "ojs_bridge") and package not in sys.stdlib_module_names


def _method(cls: type, name: str, after: type | None = None) -> FunctionType | None:
    """Return a method of the user's own classes, or of those after one; None where there is Celery's own."""
    mro = cls.__mro__
    for base in mro[mro.index(after) + 1 if after in mro else 0 :]:
        found = vars(base).get(name)
        if found is not None and not base.__module__.startswith("ojs_bridge."):
            return found if isinstance(found, FunctionType) and _is_the_users(found) else None
    return None


def _called_method(body: Body, call: ast.Call) -> FunctionType | None:
    """Return the user's own method that a call on the task, or on `super()`, reaches."""
    path = body.path(call.func)
    if not path or path.count(".") != 1:
        return None
    after = body.super_of(call.func.value) if isinstance(call.func, ast.Attribute) else None
    return _method(type(body.task), path[1:], after)


def _given(body: Body, call: ast.Call) -> tuple[list[Task | Argument], bool]:
    """Return a call's positional arguments up to the first `*`, and whether those are all there are."""
    given: list[Task | Argument] = []
    for node in call.args:
        if isinstance(node, ast.Starred):
            return [*given, body.task] if _is_the_task(body, node) else given, False
        given.append(_argument(body, node))
    return given, all(keyword.arg for keyword in call.keywords)


def _argument(body: Body, node: ast.expr) -> Task | Argument:
    return body.task if body.path(node) == "" else Argument(body, node)
