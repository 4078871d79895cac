"""Which values the arguments of dead letters have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.operations.arguments import NAMES, TOLD
from tests.conftest import store_url
from tests.store.test_store import letter


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def bridge(request: pytest.FixtureRequest) -> Iterator[Bridge]:
    """A bridge with a store of each kind, which redacts cards."""
    bridge = Bridge(store_url(request.param, request), redact=["card"])
    yield bridge
    bridge.stop()


def bury(bridge: Bridge, number: int, *args: Any, **kwargs: Any) -> None:
    """Bury a letter of a job with these arguments."""
    assert bridge.store
    message = {"args": [*args], "kwargs": kwargs, "options": {}}
    bridge.store.letters.bury(letter(f"l{number}", framework="dramatiq", message=message))


def told(bridge: Bridge, **where: Any) -> dict[str, tuple[list[tuple[Any, int]], bool]]:
    """The values of each argument, and whether it has only one."""
    found = bridge.dead_letters.by_argument(**where).to_ojs()
    return {
        one["name"]: ([(each["value"], each["count"]) for each in one["values"]], one["one_value"])
        for one in found["arguments"]
    }


def test_the_values_of_the_arguments(bridge: Bridge) -> None:
    """What all have in common comes first; a list and a long text are told in short."""
    for n in range(3):
        order = {"country": "CH", "lines": [n, n]}
        bury(bridge, n, n % 2 == 0, 7, order, customer=f"c{n % 2}", note="x" * 999, nothing=None)
    found = told(bridge)
    assert [*found][:4] == ["1", "2.country", "note", "nothing"]
    assert found["2.country"] == ([("CH", 3)], True)
    assert found["1"] == ([(7, 3)], True)
    assert found["nothing"] == ([(None, 3)], True)
    assert found["0"] == ([(True, 2), (False, 1)], False)
    assert found["customer"] == ([("c0", 2), ("c1", 1)], False)
    assert sorted(found["2.lines"][0]) == [("[0, 0]", 1), ("[1, 1]", 1), ("[2, 2]", 1)]
    assert found["note"] == ([("x" * 200 + "…", 3)], True)
    assert told(bridge, type="none.*") == {}


def test_a_redacted_argument_is_not_told(bridge: Bridge) -> None:
    """And neither is one that has the same text."""
    for n in range(2):
        bury(bridge, n, card="4111-1111", order={"card": "4111-1111", "total": 7}, note="card 4111-1111")
    assert told(bridge) == {"order.total": ([(7, 2)], True)}


def test_the_newest_are_counted_and_much_is_cut(bridge: Bridge) -> None:
    for n in range(12):
        bury(bridge, n, **{f"name{n}": 1, "id": n, **{f"n{place}": place for place in range(NAMES)}})
    found = bridge.dead_letters.by_argument(limit=11)
    assert (found.counted, found.of, len(found.arguments)) == (11, 12, NAMES)
    ids = [len(one.values) for one in bridge.dead_letters.by_argument().arguments if one.name == "id"]
    assert ids in ([], [TOLD])
    with pytest.raises(ValueError, match=r"^limit: 0 must be a number of letters above zero$"):
        bridge.dead_letters.by_argument(limit=0)
    with pytest.raises(ValueError, match=r"^text: 'x': arguments are not searched for a text; leave it out$"):
        bridge.dead_letters.by_argument(text="x")


def test_one_letter_has_nothing_in_common_with_others(bridge: Bridge) -> None:
    bury(bridge, 1, country="CH")
    assert told(bridge) == {"country": ([("CH", 1)], False)}
    assert bridge.dead_letters.by_argument().to_ojs()["of"] == 1
