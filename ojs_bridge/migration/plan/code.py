"""Reads the compiled code of a fleet's functions, and finds lines that ask for retries; runs nothing."""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from . import Open

FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"

#: The code of the frameworks and of the bridge is not read.
_FRAMEWORKS = {"amqp", "billiard", "celery", "dramatiq", "kombu", "ojs_bridge", "vine"}
#: Instrumentations run what they wrap, and ask for no retries; what they wrap is read.
_WATCHERS = {"ddtrace", "elasticapm", "logfire", "newrelic", "opentelemetry", "scout_apm", "sentry_sdk"}
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_HOLDERS = (staticmethod, classmethod, type(Path().exists))
#: Stands for an object that exists only while the function runs.
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Mention:
    """A word in a function's code.

    Its kind is `name` or `attribute` (the function reads it), `sets` (it sets an attribute), `text`, or `key`
    (it sets an item). The word of a computed key is empty.
    """

    kind: str
    word: str
    line: int
    #: The local variable that has the attribute, if any.
    of: str = ""


@cache
def mentions(code: CodeType) -> tuple[Mention, ...]:
    """Return the words in a function's code and in the functions inside it."""
    return tuple(_mentions(code))


def _mentions(code: CodeType) -> Iterator[Mention]:
    lines = {offset: line or 0 for start, end, line in code.co_lines() for offset in range(start, end)}
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        line = lines.get(step.offset, 0)
        if isinstance(step.argval, CodeType):
            yield from mentions(step.argval)
        if step.opname == "STORE_SUBSCR" and before:
            yield Mention("key", before.argval if before.opname == "LOAD_CONST" else "", line)
        for kind, word in _words(step.opname, step.argval):
            yield Mention(kind, word, line, _local(before))
        before = step


def _words(operation: str, value: Any) -> Iterator[tuple[str, str]]:
    if operation in ("STORE_ATTR", "DELETE_ATTR"):
        yield "sets", value
    elif operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
        yield "attribute", value
    elif operation.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "IMPORT_")):
        yield "name", value
    elif operation in ("LOAD_CONST", "KW_NAMES", "RETURN_CONST"):
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield "text", text


def _local(step: dis.Instruction | None) -> str:
    """Return the local variable that an instruction puts on the stack."""
    if step is None or not step.opname.startswith("LOAD_FAST"):
        return ""
    return str(step.argval[-1] if isinstance(step.argval, tuple) else step.argval)


def _resolve(function: FunctionType, name: str) -> object:
    """Return the object of a name in a function, from a closure or a module."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    with suppress(ValueError):  # an empty cell
        for variable, cell in cells:
            if variable == name:
                return cell.cell_contents
    return function.__globals__.get(name, _NOTHING)


def may_be(
    function: FunctionType, words: Collection[Mention], name: str, framework: str, known: Collection[object]
) -> bool:
    """Return whether a name in a function is, or may be, one of the known objects of a framework.

    A name that the function itself imports is not resolved: it may be any object of that framework.
    """
    found = _resolve(function, name)
    if found is _NOTHING:
        return any(x.word.split(".")[0] == framework for x in words)
    return any(found is one for one in known)


def wrapped(function: Any) -> list[FunctionType]:
    """Return a function and the functions that its decorators wrap, as far as they are the user's."""
    seen: list[FunctionType] = []
    ahead = [function]
    while ahead:
        one = ahead.pop(0)
        one = getattr(one, "__func__", one) if type(one) in _HOLDERS else one
        if _is_watching(type(one)):
            ahead.append(getattr(one, "__wrapped__", None))
        if type(one) is not FunctionType or one in seen:
            continue
        seen.append(one)
        ahead.append(vars(one).get("__wrapped__"))
        for cell in one.__closure__ or ():
            with suppress(ValueError):
                ahead.append(cell.cell_contents)
    return [one for one in seen if _is_the_users(str(one.__globals__.get("__name__")))]


def unwatched(function: Any) -> Any:
    """Return a function or method without the wrappers that instrumentations have put around it."""
    while hasattr(function, "__wrapped__") and _is_watching(function):
        function = function.__wrapped__
    return function


def _is_watching(thing: Any) -> bool:
    """Return whether an instrumentation has made a class, a function, or the class of an object."""
    kind = type(thing)
    if kind is FunctionType:
        return _package(str(thing.__globals__.get("__name__"))) in _WATCHERS
    return _package(str((thing if issubclass(kind, type) else kind).__module__)) in _WATCHERS


def methods(cls: type, names: Collection[str] | None = None) -> Iterator[tuple[str, FunctionType]]:
    """Yield a class's own methods and the functions of its properties; with `names`, only these."""
    for name, value in vars(cls).items():
        if names is None or name in names:
            parts = (value.fget, value.fset) if type(value) is property else (value,)
            yield from ((name, function) for part in parts for function in wrapped(part))


def _is_the_users(module: str) -> bool:
    """Return whether a module is neither Python's nor a framework's, nor an instrumentation's."""
    return _package(module) not in _FRAMEWORKS | _WATCHERS | sys.stdlib_module_names


def _package(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def functions_around(
    framework: str, functions: Iterable[FunctionType], things: Collection[object]
) -> dict[str, list[FunctionType]]:
    """Return by name the functions of the modules around a fleet.

    These are the modules of some functions, the modules that hold one of `things`, and the user's modules
    that those refer to. Of installed packages only those count that refer to the framework.
    """
    ids = {id(thing) for thing in things}
    ahead = [str(function.__globals__.get("__name__")) for function in functions]
    ahead += [name for name, module in [*sys.modules.items()] if not ids.isdisjoint(map(id, _values(module)))]
    seen: set[str] = set()
    found: dict[str, list[FunctionType]] = {}
    while ahead:
        name = ahead.pop()
        module = sys.modules.get(name)
        if name in seen or type(module) is not ModuleType or not _is_read(module, framework):
            continue
        seen.add(name)
        ahead += {_module_of(value) for value in _values(module)}
        for called, function in _functions_in(module):
            found.setdefault(called, []).append(function)
    return found


def _values(module: object) -> list[object]:
    return [*vars(module).values()] if type(module) is ModuleType else []


def _is_read(module: ModuleType, framework: str) -> bool:
    """Return whether a module is the project's own, or an installed one that refers to the framework."""
    if not _is_the_users(module.__name__):
        return False
    file = vars(module).get("__file__")
    is_own = isinstance(file, str) and not file.startswith(_INSTALLED)
    return is_own or any(_module_of(value).split(".")[0] == framework for value in _values(module))


def _module_of(value: object) -> str:
    """Return the module that a value comes from. A lazy object is not woken for that."""
    kind = type(value)
    if kind is ModuleType:
        return str(vars(value).get("__name__"))
    found = inspect.getattr_static(
        value if issubclass(kind, (FunctionType, type)) else kind, "__module__", ""
    )
    return found if isinstance(found, str) else ""


def _functions_in(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions that a module defines, and the names by which code may call them."""
    for name, value in [*vars(module).items()]:
        if not issubclass(type(value), type):
            yield from ((name, x) for x in wrapped(value) if x.__module__ == module.__name__)
        elif _module_of(value) == module.__name__:
            for method, function in methods(value):
                yield (name if method.startswith("__") else method), function


def place(function: FunctionType, line: int = 0) -> str:
    """Return the place of a line of a function, by default its first line, as `path:line`."""
    path = Path(function.__code__.co_filename)
    with suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line or function.__code__.co_firstlineno}"


def source_of(function: FunctionType) -> FunctionNode | None:
    """Return a function's source; None where there is none, or where the file has changed."""
    code = function.__code__
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        lines, first = inspect.getsourcelines(code)
        (node,) = ast.parse(textwrap.dedent("".join(lines))).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            ast.increment_lineno(node, first - 1)
            return node
    return None


class Askers:
    """The functions of a fleet that ask for retries, directly or through other functions.

    A name or an attribute that is also the name of an asker may call it: values are not followed.
    """

    def __init__(
        self,
        functions: Mapping[str, list[FunctionType]],
        sign: Callable[[FunctionType, list[Mention]], Open | None],
    ) -> None:
        """Read functions by name; `sign` returns a line that asks directly."""
        self._sign = sign
        self._said: dict[str, Open] = {}
        read = [(name, x, [*mentions(x.__code__)]) for name, found in functions.items() for x in found]
        for name, function, words in read:
            if name not in self._said and (found_sign := sign(function, words)):
                self._said[name] = found_sign
        while new := [(n, x) for n, f, w in read if n not in self._said and (x := self._called_by(f, w))]:
            self._said.update(new)

    def signs(self, function: FunctionType, words: list[Mention] | None = None) -> list[Open]:
        """Return a function's first line that asks directly, and its first line that names an asker."""
        words = [*mentions(function.__code__)] if words is None else words
        return [x for x in (self._sign(function, words), self._called_by(function, words)) if x]

    def _called_by(self, function: FunctionType, words: list[Mention]) -> Open | None:
        for mention in words:
            said = self._said.get(mention.word) if mention.kind in ("name", "attribute") else None
            if said and _may_be_called(function, mention):
                why = f"{mention.word} may ask for a retry ({said.where})"
                return Open(place(function, mention.line), why)
        return None


def _may_be_called(function: FunctionType, mention: Mention) -> bool:
    """Return whether a word may be a function or a class."""
    if mention.kind == "attribute":
        return True
    found = _resolve(function, mention.word)
    return found is _NOTHING or issubclass(type(found), (FunctionType, type))
