"""Webhooks and listeners hear of groups that are new, came back or grow, once for a whole fleet."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, Event, Webhook
from ojs_bridge.operations import webhooks
from ojs_bridge.operations.webhooks import Teller
from tests.conftest import store_url
from tests.servers import eventually
from tests.store.test_store import entry, letter

SECRET = "hush"


@dataclass
class Receiver:
    """A server that keeps what it gets, and answers with the next of the answers, the last one again."""

    url: str
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=lambda: [200])


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    received = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            answers = received.answers
            self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            received.got.append(({}, b"redirected"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}/hook/key"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield received
        server.shutdown()


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return store_url(request.param, request)


def bridge_at(url: str, receiver: Receiver, **fields: Any) -> Bridge:
    """A bridge with a webhook of the receiver's."""
    return Bridge(url, webhooks=[Webhook(receiver.url, **fields)])


def die(bridge: Bridge, message: str = "bank <answered> 503", **fields: Any) -> str:
    """Have a job die, and return its group."""
    now = bridge.engine.now()
    assert bridge.store
    made = letter(f"l{now.timestamp()}", discarded_at=now, errors=({**entry(1), "message": message},))
    made = replace(made, **fields)
    bridge.store.letters.bury(made)
    return made.group


def tell(*bridges: Bridge) -> None:
    """Have each bridge tell of the groups now, as a worker of its own does."""
    for bridge in bridges:
        teller = Teller(bridge.engine.context, bridge.groups, bridge.settings.webhooks)
        assert bridge.store
        teller._tell(bridge.store, bridge.settings.webhooks)


def test_a_group_is_posted_once_for_the_whole_fleet(url: str, receiver: Receiver) -> None:
    """With a signature of its time and its body, and a link to its page."""
    fields: dict[str, Any] = {"secret": SECRET, "page_url": "https://ops.example/jobs/"}
    fleet = [bridge_at(url, receiver, **fields) for _ in range(3)]
    group = die(fleet[0])
    threads = [threading.Thread(target=tell, args=(bridge,)) for bridge in fleet]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell(*fleet)
    [(headers, body)] = receiver.got
    signed = hmac.new(SECRET.encode(), f"{headers['x-ojs-timestamp']}.".encode() + body, hashlib.sha256)
    assert headers["x-ojs-signature"] == f"sha256={signed.hexdigest()}"
    assert headers["x-ojs-event"] == "group.new"
    told = json.loads(body)
    assert (told["type"], told["subject"], told["url"]) == (
        "group.new", group, f"https://ops.example/jobs/#groups/{group}",
    )  # fmt: skip
    assert (told["data"]["job_type"], told["data"]["message"]) == ("billing.charge", "bank <answered> 503")
    assert (told["data"]["count"], told["data"]["state"]) == (1, "new")
    die(fleet[0])
    tell(*fleet)
    assert len(receiver.got) == 1
    die(fleet[0], "another fault")
    tell(*fleet)
    assert len(receiver.got) == 2


def test_a_group_that_comes_back_is_posted_in_the_form_of_slack(url: str, receiver: Receiver) -> None:
    """What a chat would read as markup is text. A muted group is not told."""
    bridge = bridge_at(url, receiver, form="slack", page_url="https://ops.example", states=["came_back"])
    message = "@channel ![](https://a.example) ``` <answered> 503"
    group = die(bridge, message)
    tell(bridge)
    bridge.groups.resolve(group)
    at = bridge.engine.now() + timedelta(milliseconds=5)
    die(bridge, message, discarded_at=at, id="again")
    bridge.groups.mute(group)
    tell(bridge)
    assert receiver.got == []
    bridge.groups.unmute(group)
    tell(bridge)
    tell(bridge)
    [(_, body)] = receiver.got
    lines = json.loads(body)["text"].splitlines()
    assert lines[0] == "*Came back:* `billing.charge`  `external.timeout`"
    assert lines[1:4] == ["```", "@channel ![](https://a.example) ''' &lt;answered&gt; 503", "```"]
    assert lines[5] == f"<https://ops.example/#groups/{group}|Open the group>"


def test_a_worker_that_cannot_send_leaves_it_to_another(
    url: str, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so without the URL, which is a secret, and follows no redirection."""
    fleet = [bridge_at(url, receiver) for _ in range(2)]
    receiver.answers = [500, 302, 200]
    die(fleet[0])
    tell(fleet[0])
    assert len(receiver.got) == 2
    assert "it answered 302" in caplog.text
    assert "/hook/key" not in caplog.text
    tell(fleet[1])
    tell(*fleet)
    assert len(receiver.got) == 3


def test_a_webhook_that_never_answers_well_is_left_alone(
    url: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some tries for a group."""
    monkeypatch.setattr(webhooks, "TRIES", 2)
    bridge = bridge_at(url, receiver)
    receiver.answers = [503]
    die(bridge)
    for _ in range(4):
        tell(bridge)
    assert len(receiver.got) == 4


def test_listeners_hear_of_groups_from_a_thread_of_a_worker(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also where several workers listen."""
    monkeypatch.setattr(webhooks, "PERIOD", timedelta(seconds=0.2))
    heard: list[Event] = []
    fleet = [Bridge(url, listeners=[heard.append]) for _ in range(2)]
    group = die(fleet[0])
    for bridge in fleet:
        bridge.start()
    try:
        eventually(lambda: [one for one in heard if one.type == "group.new"], what="the event of a group")
        die(fleet[0], "another")
        eventually(lambda: len([one for one in heard if one.type == "group.new"]) == 2, what="the next one")
    finally:
        for bridge in fleet:
            bridge.stop()
    assert heard[0].subject == group


def test_a_receiver_that_hangs_keeps_no_listener_waiting(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners hear of all groups before the first webhook is asked."""
    monkeypatch.setattr(webhooks, "PATIENCE", 300.0)
    heard: list[Event] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/key")
        bridge = Bridge(url, webhooks=[hook], listeners=[heard.append])
        groups = {die(bridge, message) for message in ("one fault", "another fault")}
        telling = threading.Thread(target=tell, args=(bridge,))
        telling.start()
        eventually(lambda: {one.subject for one in heard if one.type == "group.new"} == groups, what="both")
        assert telling.is_alive()
    telling.join()


def test_a_variable_names_webhooks(unconfigured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table does: each is a URL, or a table of its fields."""
    given = '[{"url": "https://a.example/x", "form": "slack", "secret": "s"}, "http://b.example"]'
    monkeypatch.setenv("OJS_BRIDGE_WEBHOOKS", given)
    made = (Webhook("https://a.example/x", "slack", "s"), Webhook("http://b.example"))
    assert Bridge("memory://").settings.webhooks == made
    monkeypatch.delenv("OJS_BRIDGE_WEBHOOKS")
    table = (
        given.replace('"url": ', "url = ").replace('"form": ', "form = ").replace('"secret": ', "secret = ")
    )
    (unconfigured / "pyproject.toml").write_text(f"[tool.ojs-bridge]\nwebhooks = {table}\n")
    assert Bridge("memory://").settings.webhooks == made


WRONG: list[tuple[Any, str]] = [
    ([Webhook], "webhooks: <class 'ojs_bridge.operations.webhooks.Webhook'> is not a Webhook"),
    (7, "webhooks: int must be a list of Webhooks"),
    ("http://a.example/key", "webhooks: str must be a list of Webhooks"),
    (["ftp://a.example/key"], "webhooks: webhook: url: must be an http:// or https:// URL with a host"),
    (["file:///etc/passwd"], "webhooks: webhook: url: must be an http:// or https:// URL with a host"),
    (["https:///key"], "webhooks: webhook: url: must be an http:// or https:// URL with a host"),
    (["https://a.example:x/key"], "webhooks: webhook: url: must be an http:// or https:// URL with a host"),
]


@pytest.mark.parametrize(("given", "why"), WRONG)
def test_what_is_no_webhook(given: Any, why: str) -> None:
    """The error says which rule is broken, and never quotes the URL."""
    with pytest.raises(ConfigurationError) as raised:
        Bridge("memory://", webhooks=given)
    assert str(raised.value) == why
    with pytest.raises(ConfigurationError, match=r"^webhooks: they need a store"):
        Bridge(webhooks=["https://a.example/key"])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"form": "xml"}, "webhook: form: 'xml' must be json or slack"),
        ({"secret": ""}, "webhook: secret: must be a text that is not empty"),
        ({"states": ["steady"]}, "webhook: states: ['steady'] must be some of new, came_back, growing"),
        ({"page_url": "https://a:b@ops.example"}, "webhook: page_url: must have no user and no password"),
        ({"page_url": "ops"}, "webhook: page_url: must be an http:// or https:// URL with a host"),
    ],
)
def test_what_is_wrong_with_a_webhook(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Webhook("https://a.example/key", **fields)
    assert str(raised.value) == why
    assert "key" not in repr(Webhook("https://a.example/key", secret="hush"))
