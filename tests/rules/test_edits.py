"""Edits of arguments by their names: what becomes of a job's arguments, and which edits cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ojs_bridge.rules.edits import Edits, words_of

NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("edits", "args", "kwargs", "after"),
    [
        (Edits(set={"x": 1}), [], {"x": 0, "y": 2}, ([], {"x": 1, "y": 2})),
        (Edits(set={"x": 1}), [7], {}, ([7], {"x": 1})),
        (Edits(set={"b": [1, {"n": None}]}), [1, 2, 3], {}, ([1, [1, {"n": None}], 3], {})),
        (Edits(set={"d": 4}), [1, 2, 3], {}, ([1, 2, 3], {"d": 4})),
        (Edits(rename={"x": "z"}), [1], {"x": 0, "y": 2}, ([1], {"z": 0, "y": 2})),
        (Edits(rename={"b": "z"}), [1, 2, 3], {"k": 5}, ([1], {"z": 2, "c": 3, "k": 5})),
        (Edits(remove=["x"]), [1], {"x": 0, "y": 2}, ([1], {"y": 2})),
        (Edits(remove=["c"]), [1, 2, 3], {}, ([1, 2], {})),
        (Edits(remove=["a"]), [1, 2, 3], {}, ([], {"b": 2, "c": 3})),
        (Edits(remove=("a",), set={"c": 9}), [1, 2, 3], {}, ([], {"b": 2, "c": 9})),
        (Edits({"y": 1}, {"a": "x"}, ["b"]), [1, 2], {"k": 3}, ([], {"x": 1, "k": 3, "y": 1})),
        # What has no name has its place for one.
        (Edits(set={"4": "five"}), [1, 2, 3, 4, 5], {}, ([1, 2, 3, 4, "five"], {})),
        (Edits(remove=["4"]), [1, 2, 3, 4, 5], {}, ([1, 2, 3, 4], {})),
        (Edits(rename={"4": "e"}), [1, 2, 3, 4, 5], {}, ([1, 2, 3, 4], {"e": 5})),
    ],
)
def test_what_becomes_of_the_arguments(edits: Edits, args: Any, kwargs: Any, after: Any) -> None:
    edited = edits.apply(args, kwargs, NAMES)
    assert (edited.args, edited.kwargs, edited.notes) == (*after, [])


def test_an_edit_of_what_is_not_there_changes_nothing_and_says_so() -> None:
    edited = Edits(rename={"x": "y"}, remove=["z"]).apply([1], {"k": 2}, NAMES)
    assert (edited.args, edited.kwargs) == ([1], {"k": 2})
    assert edited.notes == ["rename: there is no 'x'", "remove: there is no 'z'"]


@pytest.mark.parametrize(
    ("edits", "args", "kwargs", "told"),
    [
        (
            Edits(rename={"x": "y"}),
            [],
            {"x": 1, "y": 2},
            "rename: 'x' to 'y': there is an argument 'y' already",
        ),
        (Edits(rename={"x": "a"}), [1], {"x": 1}, "rename: 'x' to 'a': there is an argument 'a' already"),
        (Edits(rename={"a": "b"}), [1, 2], {}, "rename: 'a' to 'b': there is an argument 'b' already"),
        (Edits(remove=["a"]), [1, 2, 3, 4, 5], {}, "'a' cannot move: an argument behind it has no name"),
        (Edits(set={"x": 1}), [1], {"a": 2}, "one of its arguments is given twice"),
    ],
)
def test_a_job_that_cannot_be_edited(edits: Edits, args: Any, kwargs: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        edits.apply(args, kwargs, NAMES)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], r"changes: \[\] must be an object with set, rename or remove"),
        ({"put": {}}, "changes: 'put' is unknown; set, rename and remove are known"),
        ({"set": ["a"]}, r"set: \['a'\] must be an object"),
        ({"set": {"": 1}}, "set: '' must be the name of an argument"),
        ({"set": {"a": float("nan")}}, "set: 'a': nan must be JSON: "),
        ({"set": {"a": object()}}, "set: 'a': <object .* must be JSON: "),
        ({"rename": "ab"}, "rename: 'ab' must be an object"),
        ({"rename": {"a": 1}}, "rename: 1 must be the name of an argument"),
        ({"rename": {"a": []}}, r"rename: \[\] must be the name of an argument"),
        ({"remove": "a"}, "remove: 'a' must be a list of names"),
        ({"remove": [""]}, "remove: '' must be the name of an argument"),
        ({"remove": ["a", "a"]}, "remove: 'a' must stand in one edit only"),
        ({"rename": {"a": "a"}}, "rename: 'a' must stand in one edit only"),
        ({"rename": {"a": "b", "b": "c"}}, "rename: 'b' must stand in one edit only"),
        ({"set": {"a": 1}, "remove": ["a"]}, "remove: 'a' must stand in one edit only"),
        ({"set": {"b": 1}, "rename": {"a": "b"}}, "rename: 'b' must stand in one edit only"),
    ],
)
def test_edits_that_cannot_be(changes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        Edits.of(changes)


def test_words_have_no_value_and_bear_what_another_version_has_written() -> None:
    changes = {"queue": "q", "edits": Edits({"token": "s3cret"}, {"a": "b"}, ["c"]).to_json()}
    assert words_of(changes) == ["queue", "remove c", "rename a", "set token"]
    assert words_of({"edits": 7, "more": None}) == ["more"]
    assert words_of({"edits": {"copy": {"a": "b"}, "remove": None}}) == []


names = st.sampled_from(["a", "b", "c", "x", "y", "z"])
values = st.none() | st.integers() | st.text(max_size=3)


@given(
    args=st.lists(values, max_size=5),
    kwargs=st.dictionaries(names, values, max_size=4),
    known=st.sampled_from([(), NAMES[:2], NAMES]),
    chosen=st.lists(names, unique=True, max_size=6),
    sizes=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_all_that_no_edit_names_stays(args: Any, kwargs: Any, known: Any, chosen: Any, sizes: Any) -> None:
    """By name or by place, each argument has one value, its own or that of its edit; none comes twice."""
    sets, renames = sizes
    pairs = chosen[sets : sets + 2 * renames]
    edits = Edits(
        dict.fromkeys(chosen[:sets], "new"),
        dict(zip(pairs[::2], pairs[1::2], strict=False)),
        chosen[sets + 2 * renames :],
    )
    assert Edits.of(json.loads(json.dumps(edits.to_json()))).to_json() == edits.to_json()
    before = {**named(args, known), **kwargs}
    try:
        edited = edits.apply(args, kwargs, known)
    except ValueError:
        assume(False)
    after = {**named(edited.args, known), **edited.kwargs}
    assert len(after) == len(edited.args) + len(edited.kwargs)
    wanted = {
        edits.rename.get(name, name): value for name, value in before.items() if name not in edits.remove
    }
    assert after == {**wanted, **edits.set}
    if not edits:
        assert (list(edited.args), edited.kwargs) == (args, kwargs)


def named(args: Any, known: Any) -> dict[str, Any]:
    """The arguments by place, by the names that a call knows them by."""
    return {known[n] if n < len(known) else str(n): value for n, value in enumerate(args)}
