"""The models: each of their scenes keeps the promises, and each broken twin is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models import slots
from models.job import SCENES, TWINS, explore, found_in_twin

README = (Path(__file__).parents[1] / "models" / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_breaks_no_promise_but_what_it_names(name: str) -> None:
    rules, remains = SCENES[name]
    result = explore(rules)
    assert result.states > 100
    assert set(result.wrong) == remains, result.wrong


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_found(name: str) -> None:
    assert found_in_twin(name).seen


@pytest.mark.parametrize("name", slots.SCENES)
def test_no_slot_is_lost_or_given_twice(name: str) -> None:
    count, wrong = slots.explore(slots.SCENES[name])
    assert count > 1000
    assert wrong == {}


@pytest.mark.parametrize("name", slots.TWINS)
def test_a_broken_twin_of_the_slots_is_found(name: str) -> None:
    assert slots.found_in_twin(name)


def test_the_page_names_code_that_is_there() -> None:
    package = Path(__file__).parents[1] / "ojs_bridge"
    named = re.findall(r"`((?!tests)\w+/[\w/]+\.(?:py|lua))`(?:, `(\w+)`)?", README)
    assert len(named) > 10
    for file, name in named:
        text = (package / file).read_text("utf-8")
        assert not name or re.search(rf"\b{name}\b", text), f"{name} in {file}"
