"""The fingerprint of a fault, the pattern of its message, and the frame of the user's own code."""

from __future__ import annotations

import time
import timeit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.fingerprint import MOST, READ, fingerprint, frame_of, is_fingerprint, pattern_of
from tests.servers import eventually

PATTERNS = {
    "": "",
    "no connection": "no connection",
    "Connection to 10.0.0.1:5432 refused after 30.5 s": "Connection to # refused after # s",
    "KeyError: 'order_17'": "KeyError: 'order_#'",
    "'user@example.com' and 'a b' and '17'": "<quoted> and <quoted> and <quoted>",
    f"no '{'x' * 40}'": "no <quoted>",
    'relation "orders" does not exist': 'relation "orders" does not exist',
    "401 Client Error: Unauthorized for https://a.example/7": "401 Client Error: Unauthorized for <url>",
    "Server error '503 Service Unavailable' for url 'https://a.example/'": (
        "Server error '503 Service Unavailable' for url <quoted>"
    ),
    "HTTP/1.1 404 Not Found": "HTTP/1.1 404 Not Found",
    "status_code=429, statusCode: 500, HTTP 502": "status_code=429, statusCode: 500, HTTP 502",
    "user 404 is slow, error 5021, error 404.5, code 17": "user # is slow, error 5021, error #, code 17",
    "can't open the host's file": "can't open the host's file",
    'constraint "orders_pkey" (id)=(17)': 'constraint "orders_pkey" (id)=(#)',
    "[Errno 2] No such file: /var/run/x.sock": "[Errno 2] No such file: <path>",
    "open ~/.ssh/id, ../a.py and C:\\Users\\me\\x.txt": "open <path> and <path>",
    "10000000.5 of 5.5 s, 20000101T1200Z": "# of # s, #",
    "read/write and/or 5 / 6": "read/write and/or # / #",
    "user 550e8400-e29b-41d4-a716-446655440000 is gone": "user # is gone",
    "at 2026-11-21T10:00:02.345Z": "at #",
    "12:30 PM": "# PM",
    "mail to a.b+c@mail.example.com failed": "mail to <email> failed",
    "GET https://api.example.com/v1/orders/17?x=1 returned 502": "GET <url> returned 502",
    "<Foo object at 0x7f3a2b4c5d6e>": "<Foo object at #>",
    "commit deadbeef42, order 8f7G2kQ": "commit #, order #",
    "order_123, job-9, task#7": "order_#, job-#, task##",
    "ids [1, 2, 3, 4]": "ids [#]",
    "no \u201ca b\u201d and no \u2018c\u2019": "no <quoted> and no \u2018c\u2019",
    "two\n  lines\tof text": "two lines of text",
    "an effaced, defaced facade": "an effaced, defaced facade",
}
#: Letters in the stores of users have these fingerprints: they stay as they are from release to release.
PINNED = {
    ("a.b", "external.timeout", "slow"): "1810e3e345213e23",
    ("charge", "builtins.KeyError", "'order_17'", ("/srv/shop/tasks.py:7 in charge",)): "54bd805619a93820",
    ("", "requests.ConnectionError", "Connection to 10.0.0.1:5432 refused after 30.5 s"): "fffcc46a5c1edd49",
    ("", "Unknown", ""): "b1e554a3c080f222",
    ("j\udc80", "e\udc80", "\udc80 7", ("/srv/\udc80.py:7 in f",)): "70418f092447ad14",
}


@pytest.mark.parametrize("message", PATTERNS)
def test_a_pattern_leaves_out_what_differs(message: str) -> None:
    """Names stand for numbers, ids, long quoted parts and paths; status codes and quoted words stay."""
    assert pattern_of(message) == PATTERNS[message]


#: Real messages with a code at {}, and two codes: they are two faults.
CODES = [
    ("{} Client Error: Not Found for url: https://a.example/7", 404, 410),
    ("Client error '{} Not Found' for url 'https://a.example/7'", 404, 410),
    ("{}, message='Not Found', url='https://a.example/7'", 404, 401),
    ("HTTP Error {}: Forbidden", 403, 500),
    ("HTTP/1.1 {} Service Unavailable", 503, 500),
    ("HTTP {}", 502, 404),
    ("Request failed with status code {}", 429, 500),
    ("status_code={}, body=''", 429, 500),
    ("bank answered {} for http://x/y", 503, 500),
    ("got {} from bank", 503, 401),
    ("expected 200, got {}", 503, 401),
    ("bank: {}", 503, 404),
    ("[{}] upstream", 503, 429),
    ("upstream replied with {}", 503, 429),
    ("the gateway said {}.", 502, 504),
    ("Max retries exceeded (Caused by ResponseError('too many {} error responses'))", 503, 502),
    ("An error occurred ({}) when calling the HeadObject operation: Not Found", 404, 403),
    ("Error code: {} - {{'error': {{'message': 'x'}}}}", 400, 429),
    ("(1{}, 'Lock wait timeout exceeded; try restarting transaction')", 205, 213),
    ('({}, "Access denied for user")', 1045, 1049),
    ("ERROR {} (28000): Access denied", 1045, 1049),
    ("ORA-{}: table or view does not exist", "00942", "00001"),
    ("SQLSTATE[{}]: Serialization failure", "40001", "23000"),
    ("[{}] [Microsoft][ODBC Driver 18 for SQL Server] failed", "42S02", "HYT00".replace("HYT", "HY0")),
    ("SQL0911N failed: SQLCODE=-{}, SQLSTATE=40001", 911, 803),
    ("Msg {}, Level 16, State 1", 208, 547),
    ("E{} duplicate key error collection: shop.orders", 11000, 11600),
    ("({}, b'5.7.1 Rejected')", 554, 421),
    ("{} 5.7.1 Message rejected", 550, 554),
    ("550 {} rejected", "5.7.1", "5.1.1"),
    ("{} Login incorrect.", 530, 550),
    ("[Errno {}] Connection refused", 111, 113),
    ("[WinError {}] No connection could be made", 10061, 10060),
    ("Multiple exceptions: [Errno {}] Connect call failed ('::1', 5432, 0, 0)", 111, 113),
    ("curl: ({}) Failed to connect", 7, 28),
    ("Command '['convert']' returned non-zero exit status {}.", 1, 127),
    ("process exited with code {}", 137, 139),
    ("worker died with signal {}", 9, 11),
    ("(0, 0): ({}) ACCESS_REFUSED - Login was refused", 403, 404),
    ("Channel.open: ({}) NOT_FOUND - no queue 'x'", 404, 406),
    ("Kafka error code {}", 3, 7),
    ("LDAP result code {} - invalidCredentials", 49, 32),
]
#: Real messages with a number at {} that is no code: one fault.
NUMBERS = [
    "order {} not found",
    "user {} is slow",
    "KeyError: {}",
    "ValueError: {} is not a valid order",
    "{}",
    "job {} failed",
    "no row with id {}",
    "id: {}",
    "ids [{}]",
    "customer #{} has no card",
    "Order matching query {} does not exist",
    "timed out after {} ms",
    "{} rows were skipped",
    "got {} rows",
    "received {} bytes",
    "returned {} items",
    "amount {} exceeds the limit",
    "connection to 10.0.0.7:{} refused",
    "port {} is in use",
    "line {}, in charge",
    "pid {} is gone",
    "zip code {} is unknown",
    "invoice-{}.pdf is missing",
    "chunk {} of 503",
    "Key (order_id)=({}) is not present in table",
    "took {} s",
    "shard {}: timeout",
    "user: {}",
]


@pytest.mark.parametrize(("message", "one", "other"), CODES, ids=[code[0][:40] for code in CODES])
def test_a_code_tells_faults_apart(message: str, one: object, other: object) -> None:
    """Of HTTP, SQL, SMTP, the system or a process, in the words of any library or of one's own."""
    assert pattern_of(message.format(one)) != pattern_of(message.format(other))
    assert pattern_of(f"user 17: {message.format(one)} at 2026-11-26") == pattern_of(
        f"user 18: {message.format(one)} at 2026-11-27"
    )


@pytest.mark.parametrize("message", NUMBERS)
def test_an_id_or_a_count_tells_no_faults_apart(message: str) -> None:
    """Though it looks like a status."""
    patterns = {pattern_of(message.format(number)) for number in (404, 503, 1205, 8841)}
    assert len(patterns) == 1, patterns


@pytest.mark.parametrize("error", PINNED)
def test_a_fingerprint_is_the_same_in_every_release(error: tuple[Any, ...]) -> None:
    """A group is found by it for as long as its letters are kept."""
    assert fingerprint(*error) == PINNED[error]


#: Faults that have once been one group, and are not the same: each line has another reason.
FAULTS: list[tuple[Any, ...]] = [
    ("billing.charge", "builtins.KeyError", "'order'"),
    ("billing.refund", "builtins.KeyError", "'order'"),
    ("billing.charge", "builtins.LookupError", "'order'"),
    ("billing.charge", "builtins.KeyError", "'customer'"),
    ("billing.charge", "builtins.KeyError", "'order'", ["/srv/shop/tasks.py:7 in charge"]),
    ("billing.charge", "builtins.KeyError", "'order'", ["/srv/shop/tasks.py:7 in total"]),
    ("billing.charge", "builtins.KeyError", "'order'", ["/srv/shop/money.py:7 in charge"]),
    ("billing.charge", "requests.HTTPError", "401 Client Error: Unauthorized for url: https://a.example/1"),
    (
        "billing.charge",
        "requests.HTTPError",
        "503 Server Error: Service Unavailable for url: https://a.example/1",
    ),
    ("billing.charge", "psycopg.UndefinedTable", 'relation "orders" does not exist'),
    ("billing.charge", "psycopg.UndefinedTable", 'relation "documents" does not exist'),
    ("billing.charge", "builtins.TimeoutError", "timed out", ["/srv/shop/mail.py:1 in send"]),
    ("billing.charge", "builtins.TimeoutError", "timed out", ["/srv/shop/cards.py:1 in send"]),
    ("a", "b", ""),
    ("a b", "", ""),
]


def test_each_fault_has_a_group_of_its_own() -> None:
    """Job type, error type, place in the code, a quoted word, a status code: each tells faults apart."""
    assert len({fingerprint(*fault) for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_the_same_after_a_deploy_and_below_other_libraries() -> None:
    """Lines, folders of releases, and what the user's code has called make no difference."""
    before = ["/srv/releases/20260101/shop/tasks.py:7 in charge", "requests/api.py:5 in get"]
    after = [
        "celery/app/trace.py:2 in run",
        "/opt/app/v43/shop/tasks.py:9 in charge",
        "requests/sessions.py:8 in send",
    ]
    same = [
        fingerprint("a", "b", f"user {n} is slow", trace, "celery") for n, trace in enumerate((before, after))
    ]
    assert same[0] == same[1]


#: The frames below the user's code, and above it: none is the user's own.
BELOW = ["/work/x/ojs_bridge/celery/task.py:3 in __call__", "celery/app/trace.py:1 in trace_task"]
ABOVE = [
    "requests/api.py:2 in get",
    "/usr/lib/python3/dist-packages/urllib3/pool.py:9 in open",
    "/usr/lib/python3.13/json/decoder.py:3 in decode",
    "/opt/uv/cpython-3.14t/lib/python3.14t/socket.py:3 in connect",
    "C:\\Python313\\Lib\\socket.py:3 in connect",
    "C:\\venv\\Lib\\site-packages\\requests\\api.py:2 in get",
    "<string>:3 in __init__",
    "<frozen importlib._bootstrap>:3 in _load",
    "no frame at all",
]
FRAMES: list[tuple[str, list[Any], str]] = [
    ("billing.charge", ["/srv/shop/billing/tasks.py:12 in charge"], "billing/tasks.py in charge"),
    ("charge", ["/srv/a.py:1 in charge", "/srv/shop/b.py:2 in help"], "shop/b.py in help"),
    ("charge", ["/a.py:1 in charge"], "a.py in charge"),
    ("charge", ["C:\\shop\\v42\\tasks.py:7 in charge"], "v#/tasks.py in charge"),
    ("charge", ["/srv/shop/tasks.py:12 in <lambda>"], "shop/tasks.py in <lambda>"),
    # The user's code is an installed package.
    (
        "billing.charge",
        ["sentry_sdk/x.py:1 in wrap", "billing/tasks.py:1 in charge"],
        "billing/tasks.py in charge",
    ),
    ("charge", ["billing/tasks.py:1 in charge", "billing/cards.py:2 in pay"], "billing/cards.py in pay"),
    ("charge", [], ""),
]


@pytest.mark.parametrize(("job_type", "own", "frame"), FRAMES)
def test_the_frame_is_the_innermost_one_of_the_users_own_code(
    job_type: str, own: list[Any], frame: str
) -> None:
    """Not one of the framework, the bridge, another package or the standard library."""
    above = ABOVE if own else ABOVE[2:5] + ABOVE[6:]
    assert frame_of(job_type, [*BELOW, *own, *above, 7, None], "celery") == frame


NUMBERS = st.integers(0, 10**12)


@given(NUMBERS, NUMBERS, st.uuids(), st.text(alphabet="abc XYZ/:", max_size=20))
def test_errors_that_differ_in_numbers_ids_and_long_quoted_parts_are_of_one_group(
    first: int, second: int, job: object, quoted: str
) -> None:
    """Whatever they are."""
    message = f"job {job} of user {first} failed after {second} s: no 'a {quoted}' in /srv/{first}/x"
    assert pattern_of(message) == ("job # of user # failed after # s: no <quoted> in <path>")


@given(st.text(), st.text(), st.text())
def test_every_text_has_a_short_pattern_and_a_fingerprint(job_type: str, message: str, frame: str) -> None:
    """No text raises."""
    assert len(pattern_of(message)) <= MOST
    assert is_fingerprint(fingerprint(job_type, "", message, [frame, f"{frame}:1 in {message}"]))


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
    "error ",
    "503 ",
    "'a'",
]


def seconds(message: str) -> float:
    """The least time of this thread that a message's pattern takes."""
    return min(timeit.repeat(lambda: pattern_of(message), number=1, repeat=7, timer=time.thread_time))


@pytest.mark.parametrize("part", HOSTILE)
def test_a_hostile_message_takes_time_in_proportion_to_its_length(part: str) -> None:
    """Eight times the text takes about eight times the time; a square would take 64 times, at any load."""
    long, short = part * (READ // len(part)), part * (READ // 8 // len(part))
    eventually(lambda: seconds(long) < 24 * seconds(short), seconds=10)


def test_only_the_beginning_of_a_message_is_read() -> None:
    """However long it is."""
    assert pattern_of(" " * READ + "7") == ""


@pytest.mark.parametrize("text", ["", "5d91ed39bcd01aa", "5D91ED39BCD01AA0", "5d91ed39bcd01aa0\n", None, 7])
def test_what_is_no_fingerprint(text: object) -> None:
    """It has 16 hexadecimal digits, in lower case."""
    assert not is_fingerprint(text)
