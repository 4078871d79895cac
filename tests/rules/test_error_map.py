"""The error map: names, callables, and which entry wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, standard_errors
from ojs_bridge.rules.failures import ErrorMap, Failure, outcome_of


class Busy(OSError):
    """An error of a shop."""


class VeryBusy(Busy):
    """Another one."""

    seconds = 7


NAME = f"{__name__}.Busy"
LOADED = {"shop": SimpleNamespace(Full=Busy)}


def failure_of(error: BaseException, *maps: Any) -> Failure:
    failure = outcome_of(error, ErrorMap(*maps, loaded=LOADED))
    assert isinstance(failure, Failure)
    return failure


@pytest.mark.parametrize("first", [NAME, "shop.Full", Busy])
@pytest.mark.parametrize("second", [NAME, "shop.Full", Busy])
def test_the_later_entry_of_a_class_wins_however_it_is_named(first: Any, second: Any) -> None:
    assert failure_of(Busy(), {first: "first"}, {second: "second"}).type == "second"
    assert failure_of(VeryBusy(), {first: "first", OSError: "any"} | {second: "second"}).type == "second"


def test_a_users_own_entries_win_over_the_standard_ones() -> None:
    for own in ("TimeoutError", "builtins.TimeoutError", TimeoutError):
        assert failure_of(TimeoutError(), standard_errors() | {own: "shop.slow"}).type == "shop.slow"
    assert (
        failure_of(TimeoutError(), {TimeoutError: "shop.slow"} | standard_errors()).type == "external.timeout"
    )


def test_a_callable_says_the_type_or_nothing() -> None:
    entries = {
        VeryBusy: lambda error: f"busy.{error.seconds}" if error.args else None,
        Busy: ("busy", "FAIL"),
    }
    assert failure_of(VeryBusy(1), entries).type == "busy.7"
    said = failure_of(VeryBusy(), entries)
    assert (said.type, said.code, said.alias) == ("busy", "FAIL", None)
    nothing = failure_of(VeryBusy(), {VeryBusy: lambda error: None})
    assert (nothing.type, nothing.alias, nothing.details) == (f"{__name__}.VeryBusy", "VeryBusy", {})


def raising(error: BaseException) -> Any:
    def entry(_: BaseException) -> str:
        raise error

    return entry


WRONG = {
    "returned 5": lambda error: 5,
    "returned ''": lambda error: "",
    "returned ('a', 'DROP')": lambda error: ("a", "DROP"),
    "raised KeyError('no')": raising(KeyError("no")),
    "raised SystemExit(3)": raising(SystemExit(3)),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_callable_that_fails_is_passed_over_and_named(problem: str) -> None:
    failure = failure_of(VeryBusy(), {VeryBusy: WRONG[problem], OSError: "any.os"})
    assert failure.type == "any.os"
    assert failure.details == {"ignored": f"the error map's entry for {__name__}.VeryBusy {problem}"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"requests.no such": "a"},
            "errors: the key 'requests.no such' must be an exception class or the dotted",
        ),
        ({"requests.Timeout": 5}, "errors[requests.Timeout]: 5 must be an error type such as "),
        ({OSError: KeyError}, "errors[OSError]: <class 'KeyError'> must be an error type such as "),
        ({OSError: ("a.b", "NO")}, "errors[OSError]: ('a.b', 'NO') must be an error type such as "),
        ({OSError: None}, "errors[OSError]: None must be an error type such as "),
    ],
)
def test_nonsense_is_refused_when_the_bridge_is_made(entries: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Bridge(errors=standard_errors() | entries)
    assert str(error.value).startswith(message)
