"""The audit over HTTP: tokens have names, and each write is a record."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import Mount
from starlette.testclient import TestClient

from ojs_bridge import ConfigurationError
from ojs_bridge.http import app_for
from ojs_bridge.http.guarding import Access, tokens_of
from tests.forking import started
from tests.http.doors import (
    API,
    JOBS,
    LETTERS,
    OPERATOR,
    OWN,
    READER,
    WAITING,
    House,
    client_at,
    house,
    with_token,
)
from tests.http.test_letters import refused
from tests.http.test_operations import begin, ended
from tests.servers import eventually
from tests.servers.ports import free_port

AUDIT = f"{API}/audit"
ALICE, CI = "alices-own-secret-token", "the-readers-ci-token"
NAMED = f"alice:operator:{ALICE}, ci:reader:{CI}"


@pytest.fixture
def door(tmp_path: Any) -> House:
    """A door to a SQLite store with three letters and a parked retry."""
    found = house(f"sqlite:///{tmp_path}/ojs.db")
    for n in range(3):
        found.bury(f"j-{n}")
    found.park("r-1")
    return found


def listed(client: TestClient, **query: str) -> list[dict[str, Any]]:
    answer = client.get(AUDIT, params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["records"]
    return found


def test_a_token_has_a_name(door: House) -> None:
    """The name is the actor's; a reader's token reads the audit, and writes nothing."""
    client = client_at(door.bridge, Access(tokens_of(OPERATOR, READER, NAMED)))
    for token, reason in ((OPERATOR, None), (ALICE, "ticket 12")):
        body = {} if reason is None else {"reason": reason}
        path = f"{LETTERS}/j-{int(token == ALICE)}"
        assert client.request("DELETE", path, json=body, headers=with_token(token)).status_code == 200
    assert client.delete(f"{LETTERS}/j-2", headers=with_token(CI)).status_code == 403
    client.headers.update(with_token(CI))
    found = listed(client)
    assert [(r["who"], r["via"], r["address"], r["reason"], r["subject"]["ids"]) for r in found] == [
        ("alice", "http", "testclient", "ticket 12", ["j-1"]),
        ("operator", "http", "testclient", "", ["j-0"]),
    ]
    assert listed(client, who="op*") == found[1:]


def test_each_write_takes_a_reason(door: House) -> None:
    """The reason stands in the body, also beside the filters of a query."""
    client, why = door.client, {"reason": "ticket 12"}
    for n, type_ in enumerate(("sent", "gone", "deleted")):
        door.bury(f"b-{n}", type=type_)
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"{LETTERS}/j-0/retry", {}),
        ("DELETE", f"{LETTERS}/j-1", {}),
        ("POST", f"{LETTERS}/retry", {"confirm": True, "filter": {"type": "sent"}}),
        ("DELETE", f"{LETTERS}?confirm=true&type=gone", {}),
        ("DELETE", LETTERS, {"confirm": True, "filter": {"type": "deleted"}}),
        ("POST", f"{WAITING}/r-1/run", {}),
        ("POST", f"{WAITING}/r-1/move", {"at": "2030-01-01T00:00:00Z"}),
        ("DELETE", f"{JOBS}/r-1", {}),
    ]
    for method, path, body in asked:
        answer = client.request(method, path, json={**body, **why})
        assert answer.status_code == 200, answer.text
    begun = begin(door, action="purge", **why)
    ended(door, begun["id"])
    found = listed(client)
    assert len(found) == len(asked) + 1
    assert {(r["who"], r["reason"]) for r in found} == {("anonymous", "ticket 12")}
    assert (found[0]["subject"]["operation"], found[0]["count"]) == (begun["id"], 1)
    too_long = client.request("DELETE", f"{LETTERS}/j-1", json={"reason": "x" * 1001})
    assert refused(too_long, 400, "invalid_request")["message"].startswith("reason: ")


def test_pages_and_wrong_queries(door: House) -> None:
    for n in range(3):
        door.client.delete(f"{LETTERS}/j-{n}")
    first = door.client.get(AUDIT, params={"limit": 2}).json()
    rest = door.client.get(AUDIT, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [r["subject"]["ids"][0] for r in first["records"] + rest["records"]] == ["j-2", "j-1", "j-0"]
    assert rest["next_cursor"] is None
    for query in ("limit=0", "cursor=x", "since=soon", "colour=red", "who="):
        refused(door.client.get(f"{AUDIT}?{query}"), 400, "invalid_request")


class Login(AuthenticationBackend):
    """A login that believes a header, as a shop's own would not."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
        """Return the user of a connection."""
        return AuthCredentials(), SimpleUser(conn.headers["x-login"])


def test_an_app_tells_its_user(door: House) -> None:
    """An app with a login of its own names the user; a header alone names nobody."""
    page = app_for(door.bridge, open_to_all=True, user=lambda request: request.user.username)
    app = Starlette(
        routes=[Mount("/jobs", page)], middleware=[Middleware(AuthenticationMiddleware, backend=Login())]
    )
    client = TestClient(app, headers={**OWN, "X-Login": "dora"})
    client.delete(f"/jobs{LETTERS}/j-0")
    plain = TestClient(app_for(door.bridge, open_to_all=True), headers={**OWN, "X-Forwarded-User": "eve"})
    plain.delete(f"{LETTERS}/j-1")
    assert [record["who"] for record in listed(door.client)] == ["anonymous", "dora"]
    numbered = TestClient(app_for(door.bridge, open_to_all=True, user=lambda _: 42), headers=OWN)
    assert numbered.post(f"{API}/marks", json={"text": "v42"}).json()["by"] == "42"


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (ALICE, "tokens: entry 1: it must be NAME:ROLE:TOKEN"),
        (f"{NAMED},", "tokens: entry 3: it must be NAME:ROLE:TOKEN"),
        (f"al ice:operator:{ALICE}", "tokens: entry 1: its name must be letters, digits and _.@-"),
        (f"alice:admin:{ALICE}", "tokens: alice: its role must be operator, replayer or reader"),
        ("alice:operator:short", "tokens: alice: it must be 16 or more ASCII characters, no space"),
        (f"{NAMED},bob:reader:{ALICE}", "tokens: bob: it must differ from the tokens: alice"),
        (f"{NAMED},alice:reader:{ALICE}2", "tokens: alice: the name stands twice"),
        (f"ci:reader:{CI}", "tokens: ci: it needs an operator_token beside it, or an operator's"),
    ],
)
def test_tokens_that_cannot_be(tokens: str, told: str, door: House) -> None:
    """The error names the entry and the rule, and no token."""
    opens: Callable[[], object]
    for opens in (lambda: tokens_of(named=tokens), lambda: app_for(door.bridge, tokens=tokens)):
        with pytest.raises(ConfigurationError) as error:
            opens()
        assert str(error.value).startswith(told)
        assert ALICE not in str(error.value)
        assert CI not in str(error.value)
    assert ALICE not in repr(tokens_of(named=NAMED))


def test_marks(door: House) -> None:
    client = client_at(door.bridge, Access(tokens_of(named=NAMED)))
    client.headers.update(with_token(ALICE))
    made = client.post(f"{API}/marks", json={"text": "v42", "at": "2026-11-21T10:00:00Z"}).json()
    assert (made["text"], made["at"], made["by"]) == ("v42", "2026-11-21T10:00:00.000Z", "alice")
    assert client.get(f"{API}/marks").json() == {"marks": [made]}
    assert client.get(f"{API}/marks", params={"since": "2026-11-22T00:00:00Z"}).json() == {"marks": []}
    for wrong in ({}, {"text": ""}, {"text": " "}, {"text": "v1", "at": "soon"}):
        refused(client.post(f"{API}/marks", json=wrong), 400, "invalid_request")


def test_a_server_with_named_tokens(door: House, tmp_path: Path) -> None:
    """OJS_BRIDGE_TOKENS names the tokens; a proxy may name the user, where the operator has asked for it."""
    port = free_port()
    words = [
        "serve",
        "--store",
        f"sqlite:///{tmp_path}/ojs.db",
        "--port",
        str(port),
        "--user-header",
        "X-Forwarded-User",
    ]
    variables = {**os.environ, "OJS_BRIDGE_TOKENS": f"alice:operator:{ALICE}"}
    process = started(["ojs-bridge", *words], env=variables, log=tmp_path / "log", cwd=tmp_path)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(address).status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(answers, seconds=60)
        for number, more in enumerate(({}, {"X-Forwarded-User": "dora"})):
            headers = {**with_token(ALICE), **more}
            assert httpx.delete(f"{address}{LETTERS}/j-{number}", headers=headers).status_code == 200
        assert httpx.get(f"{address}{API}/audit").status_code == 401
    finally:
        process.terminate()
        process.wait(90)
    found = listed(door.client)
    assert [(r["who"], r["via"], r["address"]) for r in found] == [
        ("dora", "http", "127.0.0.1"),
        ("alice", "http", "127.0.0.1"),
    ]
    assert "OJS_BRIDGE_TOKENS" not in (tmp_path / "log").read_text()
