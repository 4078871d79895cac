"""Errors of a handler that fight back: whatever is read of them, raises."""

from __future__ import annotations

import builtins
from typing import Any, NoReturn

from ojs_bridge import Retry


class Refusal(Exception):
    """What a hostile error raises by itself."""


class Fatal(BaseException):
    """As Refusal, for code that catches `Exception` alone."""


def _refuses(what: BaseException) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise what

    return refuse


class _Names(type):
    """The type of a class whose names cannot be read."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__name__", "__qualname__", "__mro__"):
            raise Refusal(name)
        return super().__getattribute__(name)


class _Nothing(type):
    """The type of a class of which nothing can be read."""

    def __getattribute__(cls, name: str) -> NoReturn:
        raise Refusal(name)


class _NoText(type):
    """The type of a class whose names are no text."""

    def __getattribute__(cls, name: str) -> Any:
        return 7 if name in ("__module__", "__name__", "__qualname__") else super().__getattribute__(name)


class _Word(str):
    """A text whose own methods raise."""

    __slots__ = ()
    __str__ = __len__ = __getitem__ = __format__ = isascii = encode = _refuses(Refusal("a word"))


def _class(base: type[BaseException] = Exception, meta: type = type, /, **attributes: Any) -> Any:
    return meta("Hostile", (base,), {"__module__": __name__, **attributes})


def _raising(*names: str, what: BaseException | None = None) -> Any:
    return _class(**{name: _refuses(what or Refusal(names)) for name in names})


def _unreadable(*names: str, what: BaseException | None = None) -> Any:
    return _class(**{name: property(_refuses(what or Refusal(names))) for name in names})


def _every(what: BaseException) -> Any:
    return _class(__getattribute__=_refuses(what))


def _within(inner: Any, link: str) -> Any:
    """Return a class of sound errors that have a hostile one as their cause or context."""

    def init(self: BaseException, *args: Any) -> None:
        BaseException.__init__(self, *args)
        setattr(self, link, inner("within"))

    return _class(__init__=init)


def _loads() -> NoReturn:
    raise Refusal("it cannot be loaded")


class Unsayable:
    """A value whose texts cannot be had."""

    __repr__ = __str__ = __format__ = _refuses(Refusal("a value"))  # type: ignore[assignment]
    __reduce__ = __bool__ = __hash__ = __eq__ = __len__ = _refuses(Refusal("a value"))  # type: ignore[assignment]


def _said(self: Retry, *args: Any) -> None:
    Retry.__init__(self, "shop.full", "full", details={"value": Unsayable()})


ERRORS: dict[str, Any] = {
    "args": _unreadable("args"),
    "args that are fatal": _unreadable("args", what=Fatal()),
    "args for which memory lacks": _unreadable("args", what=MemoryError()),
    "no arguments": _unreadable("args", what=AttributeError("args")),
    "names of its class": _class(Exception, _Names),
    "everything of its class": _class(Exception, _Nothing),
    "a class whose names are no text": _class(Exception, _NoText),
    "everything": _every(Refusal("everything")),
    "everything, fatally": _every(Fatal()),
    "__str__": _raising("__str__"),
    "__str__, fatally": _raising("__str__", what=Fatal()),
    "__str__ that ends the process": _raising("__str__", what=SystemExit(3)),
    "__str__ that is interrupted": _raising("__str__", what=KeyboardInterrupt()),
    "__str__ that is out of memory": _raising("__str__", what=MemoryError()),
    "__str__ that recurs": _raising("__str__", what=RecursionError()),
    "__repr__": _raising("__repr__"),
    "__repr__, fatally": _raising("__repr__", what=Fatal()),
    "__str__ and __repr__": _raising("__str__", "__repr__", what=MemoryError()),
    "__str__ that is no text": _class(__str__=lambda _: 7),
    "a text that is hostile": _class(__str__=lambda _: _Word("word"), __repr__=lambda _: _Word("word")),
    "__reduce__": _raising("__reduce__"),
    "__reduce_ex__": _raising("__reduce_ex__", "__reduce__", what=Fatal()),
    "a form that cannot be loaded": _class(__reduce__=lambda _: (_loads, ())),
    "a value without a form": _class(__init__=lambda self, *_: setattr(self, "handle", lambda: None)),
    "a value without a text": _class(__init__=lambda self, *_: BaseException.__init__(self, Unsayable())),
    "arguments that are a value": _class(args=Unsayable()),
    "__class__": _unreadable("__class__"),
    "__class__, fatally": _unreadable("__class__", what=Fatal()),
    "a false __class__": _class(__class__=int),
    "__traceback__": _unreadable("__traceback__"),
    "a false traceback": _class(__traceback__=7),
    "with_traceback": _raising("with_traceback"),
    "__context__": _unreadable("__context__"),
    "__cause__": _unreadable("__cause__"),
    "a false cause": _class(__cause__=7),
    "__suppress_context__": _unreadable("__suppress_context__"),
    "__notes__": _unreadable("__notes__"),
    "__notes__, fatally": _unreadable("__notes__", what=Fatal()),
    "__dict__": _unreadable("__dict__"),
    "__setattr__": _raising("__setattr__", "__delattr__"),
    "__eq__": _raising("__eq__", "__ne__"),
    "__hash__": _raising("__hash__"),
    "__bool__": _raising("__bool__"),
    "__len__": _raising("__len__"),
    "falsehood": _class(__bool__=lambda _: False),
    "no length": _class(__len__=lambda _: 0),
    "everything else": _raising("__eq__", "__hash__", "__bool__", "__iter__", "__getitem__", "__call__"),
    "a hostile cause": _within(_raising("__str__", "__repr__"), "__cause__"),
    "a hostile context": _within(_unreadable("args", "__traceback__", "__notes__"), "__context__"),
    "a context that is fatal": _within(_every(Fatal()), "__context__"),
    "the details of a response": _class(Retry, __init__=_said),
    "the type of a response": _class(Retry, type=property(_refuses(Refusal("type")), lambda *_: None)),
    "the hint of a response": _class(Retry, after=property(_refuses(Fatal()), lambda *_: None)),
    "the message of a response": _class(
        Retry, message=property(lambda _: Unsayable(), lambda *_: None), details=Unsayable()
    ),
    "the code of a response": _class(Retry, code=Unsayable()),
}

if hasattr(builtins, "ExceptionGroup"):
    _Group: Any = builtins.ExceptionGroup  # Python 3.11 and newer
    ERRORS["a group of them"] = lambda word: _Group(word, [ERRORS["__str__"](word), ERRORS["args"](word)])
