"""What anybody can say is read in a time that grows with its length at most, or is refused by a bound.

Each reader is given long texts of many shapes, and the same shapes eight times as long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ojs_bridge.cli.letters import time_from
from ojs_bridge.config.policies import read_file, read_toml
from ojs_bridge.errors import BridgeError
from ojs_bridge.messages import read_message
from ojs_bridge.operations.letters import loaded
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.rules.job import Job, decode, encode, parse_time
from ojs_bridge.rules.notations import check_pattern, matches, parse_duration
from ojs_bridge.rules.policy import RetryPolicy, check_errors
from ojs_bridge.store import to_json
from tests.http.doors import API, House, client_at, house, unlimited
from tests.store.test_store import letter

NOW = datetime(2026, 11, 26, tzinfo=timezone.utc)
SHORT, TIMES = 8_000, 8
#: A cost that grows with the square is 64 times as much. A shorter time than two milliseconds tells nothing.
MOST, LEAST = 24, 0.002

UNITS = [
    "1",
    "0",
    "9.",
    "a.",
    "a",
    "1_",
    "*a",
    "[",
    "]",
    "{",
    '{"a":',
    '"',
    "'",
    "\\",
    "é",
    "\ud800",
    " ",
    "\n",
]
UNITS += [
    ",",
    ";",
    ":",
    "::1",
    "/",
    "=",
    "&",
    "%41",
    "-",
    "T",
    "Z",
    "PT1",
    "1M",
    "{}",
    "[1],",
    '"a",',
    "#",
    "a=1\n",
]
UNITS += ["/site-packages/", "/lib/python3", ":1 in ", "0x", "@a", "<", "[a]\n", "e", "+00:00"]


def texts(length: int) -> Iterator[str]:
    """Yield texts of units that are repeated, alone and after a beginning that many readers know."""
    for beginning in ("", "P", "2026-11-26T10:00:00.", "1:"):
        yield from (beginning + text for text in alone(length))


def alone(length: int) -> Iterator[str]:
    """Yield texts of units that are repeated."""
    for unit in UNITS:
        yield unit * (length // len(unit))


def duration(text: str) -> None:
    for around in ("{}", "P{}Y", "PT{}S", "PT0.{}S", "PT{}M{}S"):
        with suppress(ValueError):
            parse_duration(around.replace("{}", text))


def header(state: Any) -> None:
    with suppress(BridgeError):
        job = decode(state, Job("j", "a.b", "default"))
        policy = RetryPolicy.merge(job.retry)
        check_errors(job.retry)
        policy.non_retryable_pattern(Failure("a" * 255))
        encode(job.failed(Failure("a.b", "down"), at=NOW))


def header_text(text: str) -> None:
    header(text)
    for field in ("attempt", "next_retry_at", "chain", "retry", "errors"):
        header(f'{{"v": 1, "{field}": {text}}}')
        header({"v": 1, field: text})
    for around in ([text], {text: text}):
        header({"v": 1, "retry": around})
        header({"v": 1, "errors": [around] * 12})


def policy(text: str) -> None:
    for name in RetryPolicy.model_fields:
        for value in (text, [text] * 9, {text: text}):
            header({"v": 1, "retry": {name: value}})


def wide_policy(text: str) -> None:
    many = {f"{text[:3]}{n}": text[:3] for n in range(len(text) // 4)}
    header({"v": 1, "retry": many})
    for value in ([*many], [""] * len(many), many):
        header({"v": 1, "retry": {"non_retryable_errors": value}})


def kept(text: str) -> None:
    read_message({"encoded": text, "encoding": "utf-8", "parameters": [text]})
    body = {"body": text, "body_encoding": "utf-8", "content_type": "application/json"}
    read_message({**body, "headers": {"x": text}})
    read_message({**body, "body_encoding": "base64", "headers": {}})


def times(text: str) -> None:
    for read in (parse_time, lambda text: time_from("since", text, NOW)):
        with suppress(ValueError):
            read(text)


def pattern(text: str) -> None:
    with suppress(ValueError):
        check_pattern("type", text)
        matches("a" * 255, text)


def fault(text: str) -> None:
    fingerprint("a.b", "c.d", text, [text, f"{text}:1 in f", *[f"{text[:50]}:1 in f"] * (len(text) // 50)])


def imported(text: str) -> None:
    line = json.loads(to_json(letter("j-1")))
    for value in (text, {text: text}, [{"backtrace": [text], "message": text}] * 2):
        for name in ("errors", "message", "retry"):
            with suppress(ValueError):
                loaded(1, json.dumps({**line, name: value})).group  # noqa: B018 - it reads
    with suppress(ValueError):
        loaded(1, text)


def settings(text: str) -> None:
    for around in ("{}", "a = {}", "a = [{}]", "[{}]", 'a = "{}"', 'a = """{}', "{} = 1", "a = {b = {}}"):
        with suppress(ValueError, RecursionError):
            read_toml(around.replace("{}", text))


def some(length: int) -> Iterator[str]:
    """Yield some of the texts, for readers of which each text takes long."""
    yield from [*alone(length)][::3]


READERS = {
    duration: texts,
    header_text: some,
    policy: alone,
    wide_policy: some,
    kept: texts,
    times: texts,
    pattern: texts,
    fault: alone,
    imported: some,
    settings: some,
}


def seconds(read: Callable[[str], None], text: str) -> float:
    begun = time.thread_time()
    read(text)
    return time.thread_time() - begun


def dear(read: Callable[[str], None], short: Callable[[int], Iterator[str]]) -> list[str]:
    """Return the shapes whose cost grows faster than their length."""
    found = []
    for one, many in zip(short(SHORT), short(SHORT * TIMES), strict=True):
        # The best of some tries: a test beside this one makes a try slow, and never fast.
        for _ in range(3):
            cost, grown = max(seconds(read, one), LEAST), seconds(read, many)
            if grown <= MOST * cost:
                break
        else:
            found.append(f"{one[:30]!r}: {cost:.3f} s, and {grown:.3f} s")
    return found


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_reader_is_given_long_texts_of_many_shapes(read: Callable[[str], None]) -> None:
    assert dear(read, READERS[read]) == []


def test_a_file_of_policies_is_read_up_to_a_bound(tmp_path: Path) -> None:
    for name in ("p.toml", "p.json"):
        file = tmp_path / name
        file.write_text("#" * 1_100_000)
        [named] = read_file(str(file))
        assert named.problems == ("must have at most 1,048,576 bytes",)


@pytest.fixture(scope="module")
def door() -> House:
    found = house("memory://")
    found.client = client_at(found.bridge, unlimited())
    return found


def test_queries_and_bodies_and_headers(door: House) -> None:
    client: TestClient = door.client

    def asks(text: str) -> None:
        plain = text.encode("ascii", "backslashreplace").decode().replace("\n", " ")[:60_000]
        for name in ("older_than", "since", "cursor", "type", "limit", "offset", "page"):
            client.request("DELETE", f"{API}/dead-letter", params={name: plain[:5_000]})
            client.get(f"{API}/dead-letter", params={name: plain[:5_000]})
        client.get(
            f"{API}/dead-letter", headers={"Accept": f"application/json{plain};", "X-Request-Id": plain}
        )
        client.get(f"{API}/dead-letter/{plain[:5_000].replace('#', '')}")
        client.post(
            f"{API}/dead-letter/retry",
            content=text.encode("utf-8", "replace"),
            headers={"Content-Type": "application/json"},
        )
        for field in ("filter", "rate", "confirm", "override"):
            client.post(
                f"{API}/operations",
                content=f'{{"{field}": {text}}}'.encode("utf-8", "replace"),
                headers={"Content-Type": "application/json"},
            )

    few = [unit * (SHORT // len(unit)) for unit in UNITS[::6]]

    def shapes(length: int) -> Iterator[str]:
        yield from (one * (length // SHORT) for one in few)

    assert dear(asks, shapes) == []


@pytest.mark.parametrize("unit", ["{}&", "{}=1&", "limit=5&", "a=1;{}&"])
def test_a_query_of_many_names(door: House, unit: str) -> None:
    def asks(query: str) -> None:
        assert door.client.get(f"{API}/dead-letter?{query}").status_code == 400

    def queries(length: int) -> Iterator[str]:
        yield "".join(unit.format(n) for n in range(length // 8))[:60_000]

    assert dear(asks, queries) == []
