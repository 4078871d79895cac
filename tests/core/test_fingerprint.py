"""The fingerprint of an error, and the pattern of its message."""

from __future__ import annotations

import time
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.spec.fingerprint import MOST, READ, fingerprint, is_fingerprint, pattern_of

PATTERNS = {
    "": "",
    "no connection": "no connection",
    "Connection to 10.0.0.1:5432 refused after 30.5 s": "Connection to # refused after # s",
    "KeyError: 'order_17'": "KeyError: <quoted>",
    "can't open the host's file": "can't open the host's file",
    'constraint "orders_pkey" (id)=(17)': "constraint <quoted> (id)=(#)",
    "[Errno 2] No such file: /var/run/x.sock": "[Errno #] No such file: <path>",
    "open ~/.ssh/id, ../a.py and C:\\Users\\me\\x.txt": "open <path> and <path>",
    "10000000.5 of 5.5 s, 20000101T1200Z": "# of # s, #",
    "read/write and/or 5 / 6": "read/write and/or # / #",
    "user 550e8400-e29b-41d4-a716-446655440000 is gone": "user # is gone",
    "at 2026-11-21T10:00:02.345Z": "at #",
    "12:30 PM": "# PM",
    "mail to a.b+c@mail.example.com failed": "mail to <email> failed",
    "GET https://api.example.com/v1/orders/17?x=1 returned 502": "GET <url> returned #",
    "<Foo object at 0x7f3a2b4c5d6e>": "<Foo object at #>",
    "commit deadbeef42, order 8f7G2kQ": "commit #, order #",
    "order_123, job-9, task#7": "order_#, job-#, task##",
    "ids [1, 2, 3, 4]": "ids [#]",
    "no \u201ca b\u201d and no \u2018c\u2019": "no <quoted> and no <quoted>",
    "two\n  lines\tof text": "two lines of text",
    "an effaced, defaced facade": "an effaced, defaced facade",
}
#: Letters in the stores of users have these fingerprints: they stay as they are from release to release.
PINNED = {
    ("external.timeout", "slow"): "5d91ed39bcd01aa0",
    ("builtins.KeyError", "'order_17'"): "e844958cbafe2b93",
    ("requests.ConnectionError", "Connection to 10.0.0.1:5432 refused after 30.5 s"): "cf840d39c5bc449f",
    ("Unknown", ""): "3fe48b830328325d",
    ("e\udc80", "\udc80 7"): "08731b65c0d048c5",
}


@pytest.mark.parametrize("message", PATTERNS)
def test_a_pattern_leaves_out_what_differs(message: str) -> None:
    """Names stand for numbers, ids, quoted parts and paths."""
    assert pattern_of(message) == PATTERNS[message]


@pytest.mark.parametrize("error", PINNED)
def test_a_fingerprint_is_the_same_in_every_release(error: tuple[str, str]) -> None:
    """A group is found by it for as long as its letters are kept."""
    assert fingerprint(*error) == PINNED[error]


def test_the_type_is_part_of_the_fingerprint() -> None:
    """The same message of two types makes two groups, and no text is taken for both."""
    assert fingerprint("a", "slow") != fingerprint("b", "slow")
    assert fingerprint("a", "b") != fingerprint("a b", "")


NUMBERS = st.integers(0, 10**12)


@given(NUMBERS, NUMBERS, st.uuids(), st.text(alphabet="abc XYZ/:", max_size=20))
def test_errors_that_differ_in_numbers_ids_and_quoted_parts_are_of_one_group(
    first: int, second: int, job: object, quoted: str
) -> None:
    """Whatever they are."""
    message = f"job {job} of user {first} failed after {second} s: no '{quoted}' in /srv/{first}/x"
    assert pattern_of(message) == ("job # of user # failed after # s: no <quoted> in <path>")


@given(st.text(), st.text())
def test_every_text_has_a_short_pattern_and_a_fingerprint(error_type: str, message: str) -> None:
    """No text raises."""
    assert len(pattern_of(message)) <= MOST
    assert is_fingerprint(fingerprint(error_type, message))


HOSTILE = [
    "'",
    '"',
    "a.",
    "a'b",
    "0",
    "/",
    "a@",
    "1-",
    "<a> ",
    "http:",
    "a1",
    "ab",
    "~",
    "A:\\",
    "é",
    "1 ",
    "1-1a",
    "\u201c",
    "\u2018",
    "\u201ca \u2018",
]


def seconds(message: str) -> float:
    """The least time that a message's pattern takes."""
    return min(timeit.repeat(lambda: pattern_of(message), number=1, repeat=7, timer=time.process_time))


@pytest.mark.parametrize("part", HOSTILE)
def test_a_hostile_message_takes_time_in_proportion_to_its_length(part: str) -> None:
    """Eight times the text takes about eight times the time; a square would take 64 times."""
    assert seconds(part * (READ // len(part))) < 24 * seconds(part * (READ // 8 // len(part)))


def test_only_the_beginning_of_a_message_is_read() -> None:
    """However long it is."""
    assert pattern_of(" " * READ + "7") == ""


@pytest.mark.parametrize("text", ["", "5d91ed39bcd01aa", "5D91ED39BCD01AA0", "5d91ed39bcd01aa0\n", None, 7])
def test_what_is_no_fingerprint(text: object) -> None:
    """It has 16 hexadecimal digits, in lower case."""
    assert not is_fingerprint(text)
