"""The one filter: checked when it is made, written as JSON and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge.store import EVERYTHING, Filter

NOW = datetime(2026, 11, 25, tzinfo=timezone.utc)
#: A filter as an operation keeps it.
WRITTEN = {
    "queue": "mail",
    "type": "a.*",
    "error_type": "x.*",
    "since": "2020-01-01T00:00:00.000Z",
    "until": "2026-01-01T00:00:00.000Z",
    "text": "Ann",
    "group": "0123456789abcdef",
}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"queue": ""}, "queue: '' must be a text with at least one character"),
        ({"queue": 7}, "queue: 7 must be a text with at least one character"),
        ({"text": ""}, "text: '' must be a text with at least one character"),
        ({"type": ""}, "type: '' must be a name, or a pattern such as 'billing.*'"),
        ({"error_type": 3}, "error_type: 3 must be a name, or a pattern such as 'billing.*'"),
        ({"since": "2026"}, "since: '2026' must be a time with a zone"),
        (
            {"until": NOW.replace(tzinfo=None)},
            f"until: {NOW.replace(tzinfo=None)!r} must be a time with a zone",
        ),
        ({"group": "x"}, "group: 'x' must be a fingerprint, 16 hexadecimal digits"),
    ],
)
def test_it_is_checked_when_it_is_made(fields: Any, error: str) -> None:
    for make in (Filter, lambda **given: replace(EVERYTHING, **given)):
        with pytest.raises(ValueError) as raised:
            make(**fields)
        assert str(raised.value) == error


def test_what_is_written_is_read_and_written_alike() -> None:
    where = Filter.from_json(WRITTEN)
    assert (where.queue, where.text, where.since) == (
        "mail",
        "Ann",
        datetime(2020, 1, 1, tzinfo=timezone.utc),
    )
    assert where.to_json() == WRITTEN
    assert Filter.from_json({}) == EVERYTHING
    assert EVERYTHING.to_json() == {}
    but = Filter(but_queues=frozenset({"b", "a"}), until=NOW)
    assert Filter.from_json(json.loads(json.dumps(but.to_json()))) == but


def test_a_field_of_a_newer_version_is_not_left_out() -> None:
    with pytest.raises(ValueError, match=r"^attempts: 3: a filter of this version has no such field$"):
        Filter.from_json({"queue": "mail", "attempts": 3})


def test_until_now_and_plain() -> None:
    assert Filter("mail").until_now(NOW).until == NOW + timedelta(milliseconds=1)
    assert Filter(until=NOW - timedelta(days=1)).until_now(NOW).until == NOW - timedelta(days=1)
    assert Filter("mail", "a.*").is_plain
    assert not Filter("mail", text="x").is_plain
