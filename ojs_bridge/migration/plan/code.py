"""Reads the compiled code of a fleet's functions, and finds lines that ask for retries; runs nothing."""

from __future__ import annotations

import ast
import builtins
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

from ...adapters import frameworks
from . import Open

FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"

#: Instrumentations run what they wrap, and ask for no retries; what they wrap is read.
_WATCHERS = {"ddtrace", "elasticapm", "logfire", "newrelic", "opentelemetry", "scout_apm", "sentry_sdk"}
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
#: Instructions that put a variable on the stack.
_VARIABLES = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_HOLDERS = (staticmethod, classmethod, type(Path().exists))
#: The longest piece of code that a reason shows.
_LONGEST = 60
#: Stands for an object that exists only while the function runs.
NOTHING = object()


@dataclass(frozen=True, slots=True)
class Mention:
    """A word in a function's code.

    Its kind is `name` or `attribute` (the function reads it), `sets` (it sets an attribute), `text`, or `key`
    (it sets an item). The word of a computed key is empty.
    """

    kind: str
    word: str
    line: int
    #: The variable that has the attribute, if any.
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
            of = before.argval if before and before.opname.startswith(_VARIABLES) else ""
            yield Mention(kind, word, line, str(of[-1] if isinstance(of, tuple) else of))
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


def resolve(function: FunctionType, name: str) -> object:
    """Return the object of a name in a function, from a closure, a module or Python; else NOTHING."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    with suppress(ValueError):  # an empty cell
        for variable, cell in cells:
            if variable == name:
                return cell.cell_contents
    return function.__globals__.get(name, vars(builtins).get(name, NOTHING))


def may_be(
    function: FunctionType, words: Collection[Mention], name: str, framework: str, known: Collection[object]
) -> bool:
    """Return whether a name in a function is, or may be, one of the known objects of a framework.

    A name that the function itself imports is not resolved: it may be any object of that framework.
    """
    value = resolve(function, name)
    if value is NOTHING:
        return any(x.word.split(".")[0] == framework for x in words)
    return any(value is one for one in known)


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
    return [one for one in seen if is_the_users(str(one.__globals__.get("__name__")))]


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
            yield from ((name, function) for function in _parts(value))


def _parts(value: Any) -> list[FunctionType]:
    """Return the functions of a method or a property."""
    parts = (value.fget, value.fset) if type(value) is property else (value,)
    return [function for part in parts for function in wrapped(part)]


def is_the_users(module: str) -> bool:
    """Return whether a module is neither Python's nor a framework's, nor an instrumentation's."""
    package = _package(module)
    if package == "ojs_bridge" or package in _WATCHERS or package in sys.stdlib_module_names:
        return False
    return not any(package in framework.packages for framework in frameworks())


def _package(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class OwnedFunction:
    """A function of a fleet, and the class that it is a method of, if it is one."""

    function: FunctionType
    owner: type | None = None


def functions_around(
    framework: str, functions: Iterable[FunctionType], things: Collection[object]
) -> dict[str, list[OwnedFunction]]:
    """Return by name the functions of the modules around a fleet.

    These are the modules of some functions, the modules that hold one of `things`, and the user's modules
    that those refer to. Of installed packages only those count that refer to the framework.
    """
    ids = {id(thing) for thing in things}
    ahead = [str(function.__globals__.get("__name__")) for function in functions]
    ahead += [name for name, module in [*sys.modules.items()] if not ids.isdisjoint(map(id, _values(module)))]
    seen: set[str] = set()
    functions_by_name: dict[str, list[OwnedFunction]] = {}
    while ahead:
        name = ahead.pop()
        module = sys.modules.get(name)
        if name in seen or type(module) is not ModuleType or not _is_read(module, framework):
            continue
        seen.add(name)
        ahead += {module_of(value) for value in _values(module)}
        for called, one in _functions_in(module):
            functions_by_name.setdefault(called, []).append(one)
    return functions_by_name


def functions_imported(framework: str) -> Iterator[FunctionType]:
    """Yield the functions of the user's modules that are imported, by the rules of `functions_around`."""
    for module in [*sys.modules.values()]:
        if type(module) is ModuleType and _is_read(module, framework):
            yield from (one.function for _, one in _functions_in(module))


def _values(module: object) -> list[object]:
    return [*vars(module).values()] if type(module) is ModuleType else []


def _is_read(module: ModuleType, framework: str) -> bool:
    """Return whether a module is the project's own, or an installed one that refers to the framework."""
    if not is_the_users(module.__name__):
        return False
    file = vars(module).get("__file__")
    is_own = isinstance(file, str) and not file.startswith(_INSTALLED)
    return is_own or any(module_of(value).split(".")[0] == framework for value in _values(module))


def module_of(value: object) -> str:
    """Return the module that a value comes from. A lazy object is not woken for that."""
    kind = type(value)
    if kind is ModuleType:
        return str(vars(value).get("__name__"))
    name = inspect.getattr_static(value if issubclass(kind, (FunctionType, type)) else kind, "__module__", "")
    return name if isinstance(name, str) else ""


def _functions_in(module: ModuleType) -> Iterator[tuple[str, OwnedFunction]]:
    """Yield the functions that a module defines, and the names by which code may call them."""
    for name, value in [*vars(module).items()]:
        if not issubclass(type(value), type):
            yield from ((name, OwnedFunction(x)) for x in wrapped(value) if x.__module__ == module.__name__)
        elif module_of(value) == module.__name__:
            for method, function in methods(value):
                yield (name if method.startswith("__") else method), OwnedFunction(function, value)


def place(function: FunctionType, line: int = 0) -> str:
    """Return the place of a line of a function, by default its first line, as `path:line`."""
    path = Path(function.__code__.co_filename)
    with suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line or function.__code__.co_firstlineno}"


@cache
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


def spelled(function: FunctionType, attribute: str, line: int) -> str:
    """Return an attribute with what has it, as the code of a line says: `self.client.retry`."""
    node = source_of(function)
    for one in ast.walk(node) if node else ():
        match one:
            case ast.Attribute(attr=name, end_lineno=end) if name == attribute and end == line:
                return textwrap.shorten(ast.unparse(one), _LONGEST, placeholder=f"(...).{attribute}")
    return attribute


@cache
def lines_with(function: FunctionType, word: str, unless: tuple[object, ...] = ()) -> frozenset[int] | None:
    """Return the lines that do more with a class than to ask whether an error is of it; None without source.

    `except`, `isinstance` and `case` ask that. `unless` leaves out, too, what makes an error of it of a text
    alone, or of a text and one of these values.
    """
    node = source_of(function)
    if node is None:
        return None
    asking = [part for one in ast.walk(node) for part in _asking(one)]
    if unless:
        asking += [x for one in ast.walk(node) for x in _made(one, unless) if _names(x, word)]
    asked = {id(x) for part in asking for x in ast.walk(part)}
    named = [x for x in ast.walk(node) if id(x) not in asked and _names(x, word)]
    return frozenset(line for x in named for line in range(x.lineno, (x.end_lineno or x.lineno) + 1))  # type: ignore[attr-defined]


def _asking(node: ast.AST) -> list[ast.expr]:
    """Return the parts of some code that only ask whether an error is of a class, or that say a type."""
    match node:
        case ast.ExceptHandler(type=ast.expr() as kind) | ast.MatchClass(cls=kind):
            return [kind]
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kind]):
            return [kind]
        case ast.Call(func=ast.Name(id="super"), args=[kind, _]):
            return [kind]
        case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
            return [kind]
    return []


def _made(node: ast.AST, unless: tuple[object, ...]) -> list[ast.expr]:
    """Return what is raised or called, if with a text alone, or with some values beside it."""
    match node:
        case ast.Raise(exc=ast.expr() as kind):
            return [kind]
        case ast.Call(func=kind, args=args, keywords=named):
            beside = [*args[1:], *(x.value for x in named if x.arg not in ("message", "reason"))]
            plain = all(isinstance(x, ast.Constant) and x.value in unless for x in beside)
            return [kind] if plain and not any(isinstance(x, ast.Starred) for x in args) else []
    return []


def _names(node: ast.AST, word: str) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == word
        case ast.alias(name=name, asname=str()):
            return name == word
    return False


#: The methods that read a mapping, and the methods that write one.
READING = frozenset(("get", "keys", "values", "items", "copy", "__contains__", "__getitem__"))
WRITING = frozenset(("pop", "setdefault", "__setitem__", "__delitem__"))


class Calls:
    """The functions of a fleet, and the functions that each of them names.

    A name counts for what it stands for. The type of a variable is not known: an attribute of it may be any
    method of that name.
    """

    def __init__(self, functions: Mapping[str, list[OwnedFunction]], common: Collection[str] = ()) -> None:
        """Read functions by name. An attribute with a `common` name is none of them, unless it surely is."""
        self._named = functions
        self._common = common
        self.functions = {one.function: one.owner for same_name in functions.values() for one in same_name}
        self.of = cache(self._of)

    def _of(self, function: FunctionType) -> list[tuple[Mention, list[FunctionType]]]:
        """Return the words of a function, and the functions that each of them may call."""
        words = mentions(function.__code__)
        meant = ((x, self._meant(function, x, words)) for x in words if x.kind in ("name", "attribute"))
        return [(x, called) for x, called in meant if called]

    def _meant(
        self, function: FunctionType, mention: Mention, words: Collection[Mention]
    ) -> list[FunctionType]:
        word, of = mention.word, mention.of
        if mention.kind == "name":
            value = resolve(function, word)
            return self._by_name(word) if value is NOTHING else called_as(value)
        base = NOTHING if of in ("", *_variables_of(function.__code__)) else resolve(function, of)
        if type(base) is ModuleType:
            return called_as(vars(base).get(word))
        if base is not NOTHING and (value := attribute_of(base, word)) is not NOTHING:
            return _parts(value)
        if word in self._common:
            return []
        # A function may import a module itself, and call its functions.
        imported = of and any(x.kind == "name" and of in x.word.split(".") for x in words)
        return self._by_name(word, only_methods=not imported)

    def _by_name(self, word: str, *, only_methods: bool = False) -> list[FunctionType]:
        return [x.function for x in self._named.get(word, ()) if x.owner or not only_methods]


def called_as(value: object) -> list[FunctionType]:
    """Return the user's functions that run when a function, a class or an object is called or entered."""
    if issubclass(type(value), FunctionType):
        return wrapped(value)
    cls = value if issubclass(type(value), type) else type(value)
    return _special_methods(cls)


@cache
def _special_methods(cls: type) -> list[FunctionType]:
    return [x for one in cls.__mro__ for name, x in methods(one) if name.startswith("__")]


def attribute_of(value: object, name: str) -> Any:
    """Return an attribute of a class, or of the class of an object; else NOTHING. Nothing is asked for it."""
    cls: Any = value if issubclass(type(value), type) else type(value)
    return next((vars(one)[name] for one in cls.__mro__ if name in vars(one)), NOTHING)


@cache
def _variables_of(code: CodeType) -> frozenset[str]:
    """Return the variables of a function and of the functions inside it."""
    inner = [_variables_of(x) for x in code.co_consts if isinstance(x, CodeType)]
    return frozenset((*code.co_varnames, *code.co_cellvars)).union(*inner)


class Askers:
    """The functions of a fleet that do something, directly or through the functions that they name."""

    def __init__(
        self, calls: Calls, sign: Callable[[FunctionType, Collection[Mention]], Open | None], what: str
    ) -> None:
        """Ask `sign` for the line of a function that does it directly; `what` says it in words."""
        self._calls = calls
        self._sign = sign
        self._what = what
        signed = ((one, sign(one, mentions(one.__code__))) for one in calls.functions)
        self._said: dict[FunctionType, Open] = {one: x for one, x in signed if x}
        while new := [
            (one, x) for one in calls.functions if one not in self._said and (x := self._called_by(one))
        ]:
            self._said.update(new)

    def signs(self, function: FunctionType, but: Collection[tuple[str, int]] = ()) -> list[Open]:
        """Return a function's first line that does it directly, and its first line that names such a one.

        Words that are read already, each with its line, do not count.
        """
        words = [x for x in mentions(function.__code__) if (x.word, x.line) not in but]
        return [x for x in (self._sign(function, words), self._called_by(function, but)) if x]

    def _called_by(self, function: FunctionType, but: Collection[tuple[str, int]] = ()) -> Open | None:
        for mention, called in self._calls.of(function):
            said = next((self._said[one] for one in called if one in self._said), None)
            if said and (mention.word, mention.line) not in but and not _only_asks(function, mention):
                return Open(place(function, mention.line), f"{mention.word} {self._what} ({said.where})")
        return None


def _only_asks(function: FunctionType, mention: Mention) -> bool:
    """Return whether a function names a class only to ask whether something is of it."""
    if mention.kind != "name" or not issubclass(type(resolve(function, mention.word)), type):
        return False
    lines = lines_with(function, mention.word)
    return lines is not None and mention.line not in lines
