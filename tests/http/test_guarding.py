"""The guard: tokens, foreign pages, limits and headers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.http import app_for, guarding, serve
from ojs_bridge.http.app import document, guarded
from ojs_bridge.http.guarding import (
    LOOPBACK,
    MAX_ADDRESSES,
    Access,
    Bucket,
    Buckets,
    access_at,
    tokens_of,
)
from ojs_bridge.http.routes import MAX_BODY
from ojs_bridge.operations.operation import Ledger
from tests.http.doors import (
    API,
    JOBS,
    LETTERS,
    OPERATOR,
    READER,
    REPLAYER,
    House,
    client_at,
    house,
    with_token,
)
from tests.servers import eventually

OPERATIONS = f"{API}/operations"


@pytest.fixture
def door(tmp_path: Any) -> House:
    """A door to a SQLite store with one letter."""
    found = house(f"sqlite:///{tmp_path}/ojs.db")
    found.bury("j-1")
    return found


def status_of(client: TestClient, method: str, path: str, **headers: str) -> int:
    """Return the status of an answer to a request that has these headers and no other of its own."""
    client.headers.pop("X-OJS-Bridge", None)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.request(method, path, headers=named).status_code


def test_tokens(door: House) -> None:
    """None or a wrong one: 401. The reader's: 403 for writes. The operator's: all. The page needs none."""
    client = client_at(door.bridge, Access(tokens_of(OPERATOR, READER, replayer=REPLAYER)))
    bearers = [with_token(token) for token in ("wrong", "", OPERATOR + "x", "näh")]
    for headers in ({}, {"Authorization": OPERATOR}, {"Authorization": f"Basic {OPERATOR}"}, *bearers):
        encoded = {name: value.encode() for name, value in headers.items()}
        for method, path in (("GET", LETTERS), ("DELETE", f"{LETTERS}/j-1"), ("GET", f"{API}/openapi.json")):
            answer = client.request(method, path, headers=encoded)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "x_unauthorized"
    for token, role in ((READER, "reader"), (REPLAYER, "replayer"), (OPERATOR, "operator")):
        answer = client.get(LETTERS, headers=with_token(token))
        assert (answer.status_code, answer.headers["x-ojs-bridge-role"]) == (200, role)
    assert door.client.get(LETTERS).headers["x-ojs-bridge-role"] == "operator"
    for method, path in (
        ("DELETE", "/j-1"),
        ("POST", "/j-1/retry"),
        ("POST", "/retry"),
        ("DELETE", ""),
        ("PUT", ""),
    ):
        assert client.request(method, LETTERS + path, headers=with_token(READER)).status_code == 403
    assert client.get("/").status_code == 200
    assert client.get("/page/desk.css").status_code == 200
    assert client.delete(f"{LETTERS}/j-1", headers=with_token(OPERATOR)).status_code == 200


#: The writes that a replayer may ask for. Any route is a reader's if it is a GET, and else an operator's.
REPLAYS = {
    ("POST", f"{LETTERS}/retry"),
    ("POST", f"{LETTERS}/{{id}}/retry"),
    ("POST", f"{API}/admin/dead-letter/retry"),
    ("POST", f"{API}/admin/dead-letter/{{id}}/retry"),
    ("POST", f"{API}/admin/jobs/{{id}}/retry"),
    ("POST", OPERATIONS),
    ("POST", f"{OPERATIONS}/{{id}}/resume"),
    ("POST", f"{OPERATIONS}/{{id}}/rest"),
    ("DELETE", f"{OPERATIONS}/{{id}}"),
}
ROLES = {READER: "reader", REPLAYER: "replayer", OPERATOR: "operator"}
DESCRIBED = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}


def at_will(door: House) -> TestClient:
    """Return a client of a server with a token for each role, and no limits."""
    reads, writes = Bucket(10**6, 10**6), Bucket(10**6, 10**6)
    tokens = tokens_of(OPERATOR, READER, replayer=REPLAYER)
    return client_at(door.bridge, Access(tokens, reads=reads, writes=writes))


def served_at(routes: Iterable[Any], under: str = "") -> Iterator[tuple[str, str]]:
    """Yield the methods and paths of an app."""
    for route in routes:
        path = under + route.path
        yield from served_at(getattr(route, "routes", ()), path)
        yield from ((method, path.replace(":path", "")) for method in getattr(route, "methods", ()) or ())


def test_every_write_is_described(door: House) -> None:
    """So the table of roles has it: what is served and not described is only read."""
    hidden = {*served_at(guarded(door.bridge, Access()).routes)} - DESCRIBED
    assert {method for method, _ in hidden} <= {"GET", "HEAD"}
    assert REPLAYS < DESCRIBED


@pytest.mark.parametrize(("method", "path"), sorted(DESCRIBED))
def test_what_a_role_may_do(door: House, method: str, path: str) -> None:
    """Of each route the least role; the refusal names the role that is needed, and a document tells it."""
    least = "reader" if method == "GET" else "replayer" if (method, path) in REPLAYS else "operator"
    assert document()["paths"][path][method.lower()]["x-ojs-bridge-role"] == least
    client, may = at_will(door), False
    for token, role in ROLES.items():
        may = may or role == least
        answer = client.request(method, path.replace("{id}", "x"), headers=with_token(token))
        assert (answer.status_code != 403) is may, answer.text
        if not may:
            assert least in answer.json()["error"]["message"]
    assert door.ids() == ["j-1"]


def test_a_replayer_has_no_detour(door: House) -> None:
    """It neither deletes nor changes, by no operation of its own and by none of an operator's."""
    client, bulk = at_will(door), door.bridge.operations
    changed = {"override": {"args": [2]}}
    sure: dict[str, Any] = {"confirm": True}
    asked: list[tuple[str, str, Any]] = [
        ("POST", f"{LETTERS}/j-1/retry", changed),
        ("POST", f"{LETTERS}/j-1/retry", {"override": {"queue": "other"}}),
        ("POST", f"{LETTERS}/j-1/retry", {"override": {"retry": {"max_attempts": 1}}}),
        ("POST", OPERATIONS, {"action": "retry", **changed, **sure}),
        ("POST", OPERATIONS, {"action": "retry", **changed, "limit": 1, **sure}),
        ("POST", OPERATIONS, {"action": "move", "at": "2030-01-01T00:00:00Z", **sure}),
        *(("POST", OPERATIONS, {"action": action, **sure}) for action in ("purge", "run", "cancel")),
        ("POST", OPERATIONS, {"action": "purge"}),
    ]
    theirs = [
        bulk.begin("purge"),
        bulk.begin("replay", override={"args": [2]}),
        bulk.begin("replay", override={"args": [2]}, limit=1),
    ]
    for one in theirs:
        path = f"{OPERATIONS}/{one.id}"
        asked += [("DELETE", path, None), ("POST", f"{path}/resume", {}), ("POST", f"{path}/rest", {})]
    for method, path, body in asked:
        answer = client.request(method, path, headers=with_token(REPLAYER), json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "x_forbidden"), (path, body)
        assert "needs the role operator" in answer.json()["error"]["message"]
    assert [bulk.get(one.id).state for one in theirs] == ["running"] * 3
    assert (door.ids(), door.outbox.published) == (["j-1"], [])


def test_a_replayer_replays(door: House) -> None:
    """One letter as it is, a probe and its rest, which it may stop and resume; the audit names it."""
    client, bulk = at_will(door), door.bridge.operations
    client.headers.update(with_token(REPLAYER))
    assert client.post(f"{LETTERS}/j-1/retry", json={"override": {}}).status_code == 200
    for n in (2, 3, 4):
        door.bury(f"j-{n}")
    counted = client.post(OPERATIONS, json={"action": "retry"})
    assert (counted.status_code, counted.json()["error"]["details"]["matched"]) == (400, 3)
    probe = client.post(OPERATIONS, json={"action": "retry", "limit": 1, "confirm": True}).json()["id"]
    eventually(lambda: bulk.get(probe).rest == 2)
    rest = client.post(f"{OPERATIONS}/{probe}/rest").json()["id"]
    eventually(lambda: bulk.get(rest).state == "done")
    assert door.ids() == []
    door.bury("j-5")
    theirs = bulk.begin("replay")
    assert client.delete(f"{OPERATIONS}/{theirs.id}").json()["state"] == "stopping"
    asked = bulk.get(theirs.id)
    assert Ledger(door.bridge.engine.context).save(
        replace(asked, state="stopped", revision=asked.revision + 1)
    )
    assert client.post(f"{OPERATIONS}/{theirs.id}/resume").status_code == 200
    eventually(lambda: bulk.get(theirs.id).state == "done")
    assert door.ids() == []
    assert {record["who"] for record in client.get(f"{API}/audit").json()["records"]} >= {"replayer"}


def test_tokens_need_no_other_proof(door: House) -> None:
    """A foreign page has no token, so behind a proxy that changes Host and Origin nothing else is asked."""
    client = client_at(door.bridge, Access(tokens_of(OPERATOR)))
    headers = {**with_token(OPERATOR), "Host": "jobs.example.com", "Origin": "https://elsewhere.example"}
    assert client.post(f"{LETTERS}/j-1/retry", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "[::1", "10.0.0.7"]
)
def test_a_foreign_host(door: House, host: str) -> None:
    """A name that was pointed at the loopback address is not served, not even reads (DNS rebinding)."""
    for method, path in (("GET", LETTERS), ("DELETE", f"{LETTERS}/j-1")):
        assert status_of(door.client, method, path, Host=host) == 403


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8787", "[::1]"])
def test_the_own_host(door: House, host: str) -> None:
    """The server answers under all its own names."""
    assert status_of(door.client, "GET", LETTERS, Host=host) == 200


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        FORM,
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json", "Origin": "http://evil.example"},
        {"Content-Type": "application/json", "Origin": "null"},
        {"Content-Type": "application/json", "Origin": "http://127.0.0.1:9999"},
        {"X-OJS-Bridge": "1", "Origin": "http://evil.example"},
        {"X-OJS-Bridge": "1", "Origin": "http://[::1"},
        {"X-OJS-Bridge": "1", "Sec-Fetch-Site": "cross-site"},
        {"X-OJS-Bridge": "1", "Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_write_that_a_foreign_page_could_send(door: House, headers: dict[str, str]) -> None:
    """The server changes nothing (CSRF)."""
    door.client.headers.pop("X-OJS-Bridge")
    writes = (
        ("POST", f"{LETTERS}/j-1/retry"),
        ("POST", f"{LETTERS}/retry"),
        ("DELETE", f"{LETTERS}/j-1"),
        ("DELETE", f"{LETTERS}?confirm=true"),
        ("DELETE", f"{JOBS}/j-1"),
    )
    for method, path in writes:
        body = b"" if "?" in path else b'{"confirm": true}'
        answer = door.client.request(method, path, headers=headers, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "x_forbidden")
    assert (door.ids(), door.outbox.published) == (["j-1"], [])


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_a_foreign_delete(door: House, origin: str) -> None:
    """The server refuses it, and allows no other server's page to ask."""
    assert status_of(door.client, "DELETE", f"{LETTERS}/j-1", Origin=origin) == 403
    asked = {"Origin": origin, "Access-Control-Request-Method": "DELETE"}
    answer = door.client.options(f"{LETTERS}/j-1", headers=asked)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "headers",
    [
        {"X-OJS-Bridge": "1"},
        {"Content-Type": "application/json"},
        {"Content-Type": "Application/OpenJobSpec+JSON; charset=utf-8"},
        {"X-OJS-Bridge": "1", "Origin": "http://127.0.0.1:8787", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_a_write_of_the_own_page(door: House, headers: dict[str, str]) -> None:
    """The server does it, for its own page or for a program."""
    door.client.headers.pop("X-OJS-Bridge")
    assert door.client.post(f"{LETTERS}/j-1/retry", headers=headers).status_code == 200


def test_a_body_that_is_too_long(door: House) -> None:
    """The server does not read it to its end, whether or not its length is told beforehand."""
    long = b'{"override": {"args": ["' + b"x" * MAX_BODY + b'"]}}'

    def slowly() -> Any:
        yield from (long[:100], long[100:])

    for body in (long, slowly()):
        answer = door.client.post(
            f"{LETTERS}/j-1/retry", content=body, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "x_too_large")
    assert door.ids() == ["j-1"]


def test_a_long_argument(door: House) -> None:
    """A replay takes arguments of megabytes: the broker takes them, too."""
    override = {"args": ["x" * 8_000_000]}
    answer = door.client.post(f"{LETTERS}/j-1/retry", json={"override": override})
    assert (answer.status_code, door.outbox.overrides[0].args) == (200, override["args"])


def test_a_body_of_another_type(door: House) -> None:
    """The server does not read it as JSON (http 4.1)."""
    answer = door.client.post(f"{LETTERS}/j-1/retry", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_too_many_requests(door: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes and reads have limits of their own; answers tell the rest, and when to come again (http 18)."""
    stopped = time.monotonic()
    monkeypatch.setattr(guarding, "time", SimpleNamespace(monotonic=lambda: stopped, time=time.time))
    access = Access(hosts=LOOPBACK, writes=Bucket(2, 0.5))
    client = client_at(door.bridge, access)
    left = [client.delete(f"{LETTERS}/x").headers["x-ratelimit-remaining"] for _ in range(2)]
    assert left == ["1", "0"]
    answer = client.delete(f"{LETTERS}/j-1")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["code"] == "rate_limited"
    assert answer.json()["error"]["details"] == {"retry_after_seconds": 2}
    assert (answer.headers["x-ratelimit-limit"], answer.headers["x-ratelimit-remaining"]) == ("2", "0")
    assert client.get(f"{LETTERS}/j-1").status_code == 200


def test_every_answer_has_the_headers(door: House) -> None:
    """The page, the API and errors have them."""
    for path, status in (
        (LETTERS, 200),
        ("/", 200),
        ("/page/app.js", 200),
        (f"{LETTERS}/x", 404),
        ("/x", 404),
    ):
        answer = door.client.get(path)
        assert answer.status_code == status
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["ojs-version"] == "1.0"
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["cache-control"] == (
            "no-cache" if status == 200 and path != LETTERS else "no-store"
        )


def test_a_request_id_is_carried_on(door: House) -> None:
    """The id comes back, unless it could break out of a header or a log."""
    assert door.client.get(LETTERS, headers={"X-Request-Id": "req_1"}).headers["x-request-id"] == "req_1"
    for told in ("a b", "x" * 101, "<b>", ""):
        assert door.client.get(LETTERS, headers={"X-Request-Id": told}).headers["x-request-id"] != told


def test_versions(door: House) -> None:
    """The server refuses another version of the spec (http 3.2)."""
    assert door.client.get(LETTERS, headers={"OJS-Version": "1.0"}).status_code == 200
    answer = door.client.get(LETTERS, headers={"OJS-Version": "2.0"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unsupported")


Opens = Callable[[Bridge], object]


@pytest.mark.parametrize(
    ("opens", "told"),
    [
        (app_for, "operator_token: give one, or else open_to_all=True"),
        (
            lambda b: app_for(b, operator_token=OPERATOR, open_to_all=True),
            "operator_token: give one, or else",
        ),
        (lambda b: app_for(b, reader_token=READER), "operator_token: give one, or else"),
        (lambda b: app_for(b, operator_token="short"), "operator_token: it must be 16 or more ASCII"),
        (lambda b: app_for(b, operator_token="not one but six words of it"), "operator_token: it must be 16"),
        (
            lambda b: app_for(b, operator_token=OPERATOR, reader_token=OPERATOR),
            "reader_token: it must differ",
        ),
        (
            lambda b: app_for(b, reader_token=READER, open_to_all=True),
            "reader_token: it needs an operator_token",
        ),
        (
            lambda b: app_for(b, replayer_token=REPLAYER, open_to_all=True),
            "replayer_token: it needs an operator_token",
        ),
        (lambda b: serve(b, host="::", replayer_token=REPLAYER), "host: '::' can be reached from elsewhere"),
        (lambda b: serve(b, host="0.0.0.0"), "host: '0.0.0.0' can be reached from elsewhere"),
        (lambda b: serve(b, host="::", reader_token=READER), "host: '::' can be reached from elsewhere"),
        (
            lambda b: serve(b, host="jobs.example.com"),
            "host: 'jobs.example.com' can be reached from elsewhere",
        ),
        (lambda b: serve(Bridge()), "the page and the HTTP API need a store"),
    ],
)
def test_closed_by_default(door: House, opens: Opens, told: str) -> None:
    """The server does not open at all."""
    with pytest.raises(ConfigurationError) as error:
        opens(door.bridge)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    """The server may be called by its name."""
    access = access_at(host, None, None)
    assert (access.tokens, host in (access.hosts or ())) == ((), True)


def test_mounted_in_an_app_of_ones_own(door: House) -> None:
    """A user's app mounts the page and the API under a prefix, with `open_to_all`."""
    app = Starlette(routes=[Mount("/admin/jobs", app_for(door.bridge, open_to_all=True))])
    client = TestClient(app, base_url="https://shop.example")
    assert "ojs-bridge" in client.get("/admin/jobs/").text
    assert client.get("/admin/jobs/page/app.js").headers["content-type"].startswith("text/javascript")
    assert client.get(f"/admin/jobs{LETTERS}/j-1").json()["id"] == "j-1"
    assert client.get(f"/admin/jobs{API}/openapi.json").json()["servers"] == [{"url": "/admin/jobs"}]
    origin = {"Origin": "https://shop.example", "X-OJS-Bridge": "1"}
    assert client.post(f"/admin/jobs{LETTERS}/j-1/retry", headers=origin).status_code == 200
    foreign = {"Origin": "https://evil.example", "X-OJS-Bridge": "1"}
    assert client.delete(f"/admin/jobs{LETTERS}/j-1", headers=foreign).status_code == 403


def test_wrong_tokens_are_limited_for_each_address_and_logged(
    door: House, caplog: pytest.LogCaptureFixture
) -> None:
    """A right token is admitted all the same: behind a proxy all clients have one address."""
    app = guarded(door.bridge, Access(tokens_of(OPERATOR)))
    guess = TestClient(app, client=("192.0.2.7", 1))
    codes = [guess.get(LETTERS, headers=with_token(f"wrong-token-{n}")).status_code for n in range(60)]
    assert codes[:20] == [401] * 20
    assert 30 <= codes.count(429) <= 40
    assert caplog.text.count("a request from '192.0.2.7' has a wrong token") == codes.count(401)
    assert guess.get(LETTERS, headers=with_token(OPERATOR)).status_code == 200
    other = TestClient(app, client=("192.0.2.8", 1))
    assert other.get(LETTERS, headers=with_token("wrong")).status_code == 401
    assert {guess.get(LETTERS).status_code for _ in range(60)} == {401}


def test_probes_are_limited_for_each_address(door: House) -> None:
    app = guarded(door.bridge, Access(tokens_of(OPERATOR), probes=Buckets(20, 0.001)))

    def codes(address: str) -> list[int]:
        client = TestClient(app, client=(address, 1))
        return [client.get(f"{API}/health").status_code for _ in range(15)]

    assert [429 in codes(f"192.0.2.{n}") for n in range(4)] == [False] * 4
    assert 429 in codes("192.0.2.1")
    # A host has a whole network of IPv6.
    assert [429 in codes(f"2001:db8::{n}") for n in range(3)] == [False, True, True]


def test_of_too_many_addresses_the_first_are_forgotten() -> None:
    buckets = Buckets(1, 0.001)
    for n in range(MAX_ADDRESSES + 10):
        buckets.take(str(n))
    assert len(buckets._of) == MAX_ADDRESSES


@pytest.mark.parametrize("mounted", [False, True])
@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (LETTERS, "DELETE, GET, HEAD"),
        (f"{LETTERS}/j-1", "DELETE, GET, HEAD"),
        (f"{LETTERS}/stats", "DELETE, GET, HEAD"),
        (f"{LETTERS}/retry", "DELETE, GET, HEAD, POST"),
        (f"{API}/marks", "GET, HEAD, POST"),
        ("/", "GET, HEAD"),
    ],
)
def test_a_405_names_all_methods(door: House, path: str, allowed: str, mounted: bool) -> None:
    app = guarded(door.bridge, Access(hosts=LOOPBACK))
    outer = Starlette(routes=[Mount("/jobs", app)]) if mounted else app
    client = TestClient(outer, base_url="http://127.0.0.1:8787", headers={"X-OJS-Bridge": "1"})
    answer = client.put(f"/jobs{path}" if mounted else path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
