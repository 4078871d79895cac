"""The names in a function that is given a Celery task, their values, and the methods that hand a call on."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable
from types import FunctionType, ModuleType
from typing import Any

import celery
from celery import Task
from celery.local import PromiseProxy

from ....celery import compat
from ..code import (
    NOTHING,
    READING,
    WRITING,
    FunctionNode,
    attribute_of,
    called_as,
    mentions,
    resolve,
    source_of,
    wrapped,
)
from ..expressions import DEPTH, Scope

#: The options that `Task.retry` and the automatic retries read of a task.
SETTINGS = frozenset(
    (
        *("max_retries", "default_retry_delay", "autoretry_for", "dont_autoretry_for", "retry_kwargs"),
        *("retry_backoff", "retry_backoff_max", "retry_jitter", "override_max_retries"),
    )
)
#: Parts of the names of functions that may refuse by an error.
_REFUSING = ("lock", "raise", "acquire", "check", "ensure", "require", "validate", "unique", "once")
#: Managers that swallow what is raised in them.
SWALLOWING = frozenset(("suppress", "ExitStack", "AsyncExitStack", "raises"))
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class Values(Scope):
    """The names of a function, and the values that are known in one run, before it begins."""

    def __init__(self, task: Task, function: FunctionType, retries: int, position: int | str | None) -> None:
        """Take a function that is given the task at a position, by a name, or not at all."""
        self.node = source_of(function)
        super().__init__(function, self.node)
        self.task, self.retries = task, retries
        self._counts = any(x.word == "retries" for x in mentions(function.__code__))
        self.holders: set[str] = set()
        #: The name of `*args` that begin with the task.
        self.packed = ""
        #: The values of variables.
        self._assigned: dict[str, list[ast.expr]] = {}
        if self.node is not None:
            self._take(self.node, position)

    def _take(self, node: FunctionNode, position: int | str | None) -> None:
        names = [x.arg for x in (*node.args.posonlyargs, *node.args.args)]
        if isinstance(position, str):
            self.holders = {position}
        elif position is not None and position < len(names):
            self.holders = {names[position]}
        elif position == len(names) and node.args.vararg:
            self.packed = node.args.vararg.arg
        for one in ast.walk(node):
            match one:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AugAssign(target=ast.Name(id=name), value=value)
                ):
                    self._assigned.setdefault(name, []).append(value)
        # `task = self` and `task = args[0]` are other names of the task.
        names = [name for name, value in self.values.items() if self.is_task(value)]
        self.holders.update(names)

    def is_task(self, node: ast.AST) -> bool:
        """Return whether an expression is the task itself."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)):
                return name == self.packed
            case ast.Name(id=name) if name in self.holders:
                return True
            case ast.Name(id=name) if name not in self.own:
                thing = resolve(self.function, name)
                if issubclass(type(thing), PromiseProxy):
                    return bool(compat.get_current_object(thing)() is self.task)
                return thing is self.task or thing is celery.current_task
        return False

    def is_retries(self, node: ast.AST) -> bool:
        """Return whether an expression is the task's `request.retries`."""
        match node:
            case ast.Attribute(attr="retries", value=ast.Name(id=name)) if name in self.values:
                node = ast.Attribute(self.values[name], "retries", ast.Load())
        match node:
            case ast.Attribute(attr="retries", value=ast.Attribute(attr="request", value=value)):
                return self.is_task(value)
        return False

    def tells(self, node: ast.AST, depth: int = 0) -> bool:
        """Return whether an expression depends on the number of retries."""
        if not self._counts:
            return False
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and depth < DEPTH:
                if any(self.tells(x, depth + 1) for x in self._assigned.get(one.id, ())):
                    return True
            elif self.is_retries(one):
                return True
        return False

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """Return the value of an expression of numbers; NOTHING where it cannot be computed."""
        if self.is_retries(node):
            return self.retries
        match node:
            case ast.Attribute(value=value, attr=attr) if self.is_task(value) and attr in SETTINGS:
                setting = vars(self.task).get(attr, attribute_of(self.task, attr))
                return setting if setting is None or type(setting) in (int, float, bool, dict) else NOTHING
        return super().value(node, depth)


def last_name(node: ast.AST) -> str:
    """Return the name by which an expression is known."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Starred(value=value) | ast.Subscript(value=value) | ast.Call(func=value):
            return last_name(value)
    return ""


class Overriding:
    """A method of a fleet's class that takes the place of a framework's method."""

    def __init__(
        self, function: FunctionType, owner: type, original: Any, kept: Collection[str], given: str = ""
    ) -> None:
        """Take the names of the arguments that count, and the name of a keyword that is surely given."""
        self._function, self._owner, self._kept, self._given = function, owner, {*kept}, given
        self._places = inspect.getfullargspec(original).args[1:]
        node = source_of(function)
        self._node = node if isinstance(node, ast.FunctionDef) else None
        arguments = node.args if node else ast.parse("lambda: 0", mode="eval").body.args  # type: ignore[attr-defined]
        self._own = [x.arg for x in (*arguments.posonlyargs, *arguments.args)][1:]
        self._named = {*self._own, *(x.arg for x in arguments.kwonlyargs)}
        self._rest = arguments.vararg.arg if arguments.vararg else ""
        self._options = arguments.kwarg.arg if arguments.kwarg else ""

    def hands_on(self) -> bool:
        """Return whether it surely calls the framework's method, with the arguments that count unchanged."""
        if self._node is None:
            return False
        calls = [x for x in ast.walk(self._node) if self._is_on(x)]
        unchanged = all(self._is_unchanged(call) for call in calls if isinstance(call, ast.Call))
        return unchanged and self._keeps_arguments(self._node) and self._block(self._node.body) is True

    def _is_on(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Call(func=ast.Name(id="super")))):
                return name == self._function.__name__
        return False

    def _is_unchanged(self, call: ast.Call) -> bool:
        passed: set[str] = set()
        for at, value in enumerate(call.args):
            name = value.value if isinstance(value, ast.Starred) else value
            said = name.id if isinstance(name, ast.Name) else ""
            if isinstance(value, ast.Starred):
                if said != self._rest or at != len(self._own):
                    return False
            elif at < len(self._places) and self._places[at] in self._kept and said != self._places[at]:
                return False
            passed.add(said)
        for keyword in call.keywords:
            said = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
            if (keyword.arg is None and said != self._options) or keyword.arg in self._kept - {said}:
                return False
            passed.add(said)
        collected = {self._rest, self._options} - {""}
        return passed >= collected | (self._kept & self._named) and (
            bool(collected) or self._kept <= self._named
        )

    def _keeps_arguments(self, node: ast.FunctionDef) -> bool:
        """Return whether nothing in the method writes an argument that counts."""
        counting = {self._rest, self._options} | self._kept & self._named
        above = {child: one for one in ast.walk(node) for child in ast.iter_child_nodes(one)}
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and one.id in counting - {""}:
                of = above[one]
                if not isinstance(one.ctx, ast.Load):
                    if not (isinstance(of, ast.Assign) and self._is_kept(of.value)):
                        return False
                elif one.id == self._options and not self._only_reads(one, of, above.get(of)):
                    return False
        return True

    def _only_reads(self, options: ast.Name, of: ast.AST, call: ast.AST | None) -> bool:
        match of:
            case ast.Subscript(slice=ast.Constant(value=key)):
                return isinstance(of.ctx, ast.Load) or key not in self._kept
            case ast.Attribute(attr=name) if isinstance(call, ast.Call):
                keys = [x.value for x in call.args[:1] if isinstance(x, ast.Constant)]
                return name in READING or (name in WRITING and bool(keys) and keys[0] not in self._kept)
            case ast.keyword(arg=None) | ast.Compare() | ast.BoolOp() | ast.If() | ast.UnaryOp():
                return True
        return isinstance(of, ast.Dict) and options in of.values

    def _is_kept(self, value: ast.expr | None) -> bool:
        """Return whether a new value of the options is the old one, with others that do not count."""
        match value:
            case ast.Name(id=name):
                return name == self._options
            case ast.Dict(keys=keys, values=values):
                spread = [x for key, x in zip(keys, values, strict=True) if key is None]
                said = {key.value if isinstance(key, ast.Constant) else None for key in keys if key}
                return not {None, *self._kept} & said and all(
                    self._is_kept(x) or self._is_kept(self._made(x)) for x in spread
                )
        return False

    def _made(self, node: ast.expr) -> ast.Dict | None:
        """Return the items of a variable that is a plain mapping, and has no other value."""
        assigned = [x for x in ast.walk(self._node) if isinstance(x, ast.Assign)] if self._node else []
        name = node.id if isinstance(node, ast.Name) else ""
        made = [x.value for x in assigned for to in x.targets if isinstance(to, ast.Name) and to.id == name]
        is_plain = len(made) == 1 and isinstance(made[0], ast.Dict) and None not in made[0].keys
        return made[0] if is_plain else None  # type: ignore[return-value]

    def _block(self, block: Iterable[ast.stmt]) -> bool | None:
        """Return whether a block hands on; None if it does not, and goes on."""
        return next((x for x in map(self._statement, block) if x is not None), None)

    def _statement(self, statement: ast.stmt) -> bool | None:
        within = [*ast.walk(statement)]
        deciding = any(isinstance(x, _LEAVING) or self._is_on(x) for x in within)
        match statement:
            case (
                ast.Return(value=value)
                | ast.Expr(value=value)
                | ast.Assign(value=value)
                | ast.Raise(exc=value)
            ):
                if not self._is_harmless(statement):
                    return False
                return True if self._is_on(value) else False if deciding else None
            case ast.If(test=test, body=body, orelse=orelse):
                answer = self._answer(test)
                if answer is not None:
                    return self._block(body if answer else orelse)
                ends = [self._block(block) for block in (body, orelse)]
                returns = any(isinstance(block[-1], _LEAVING) for block in (body, orelse) if block)
                both = ends[0] if ends[0] is ends[1] else None if False not in ends and returns else False
                return both if self._is_harmless(test) else False
            case ast.With(items=items, body=body):
                plain = all(self._is_harmless(x) and self._lets_out(x.context_expr) for x in items)
                return self._block(body) if plain else False
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
                again = all(isinstance(x.body[-1], ast.Raise) for x in handlers)
                leaves = any(isinstance(x, _LEAVING) for one in last for x in ast.walk(one))
                plain = (again or not deciding) and not leaves
                return self._block([*body, *orelse, *last]) if plain else False
        return False if deciding or not self._is_harmless(statement) else None

    def _answer(self, test: ast.expr) -> bool | None:
        """Return the answer to a question that asks only for the keyword that is surely given."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                answer = self._answer(operand)
                return None if answer is None else not answer
            case (
                ast.Call(
                    func=ast.Attribute(attr="get", value=ast.Name(id=name)),
                    args=[ast.Constant(value=key), *_],
                )
                | ast.Compare(left=ast.Constant(value=key), ops=[ast.In()], comparators=[ast.Name(id=name)])
            ):
                return True if name == self._options and key == self._given != "" else None
        return None

    def _lets_out(self, manager: ast.expr) -> bool:
        name = last_name(manager)
        callee = resolve(self._function, name)
        is_own = type(callee) is FunctionType and bool(wrapped(callee))
        return name not in SWALLOWING and not is_own and not called_as(callee)

    def _is_harmless(self, node: ast.AST) -> bool:
        """Return whether no call in some code is one that may refuse by an error."""
        return all(self._is_harmless_call(x) for x in ast.walk(node) if isinstance(x, ast.Call))

    def _is_harmless_call(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(attr=name, value=ast.Name(id="self")):
                callee = attribute_of(self._owner, name)
            case ast.Attribute(attr=name, value=ast.Name(id=module)):
                base = resolve(self._function, module)
                callee = vars(base).get(name) if type(base) is ModuleType else NOTHING
            case ast.Name(id=name):
                callee = resolve(self._function, name)
            case _:
                name, callee = getattr(call.func, "attr", ""), NOTHING
        refuses = any(part in name.lower() for part in _REFUSING) or any(map(_raises, wrapped(callee)))
        return self._is_on(call) or not refuses


def _raises(function: FunctionType) -> bool:
    """Return whether a function raises an error of its own; without source it may."""
    node = source_of(function)
    return node is None or any(isinstance(x, ast.Raise) for x in ast.walk(node))
