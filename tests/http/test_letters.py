"""The dead letters' routes: their shapes, their effects and their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any, get_type_hints
from urllib.parse import quote

import httpx
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge
from ojs_bridge.celery import install as install_in_celery
from ojs_bridge.dramatiq import install as install_in_dramatiq
from ojs_bridge.errors import Unreachable
from ojs_bridge.http import shapes
from ojs_bridge.http.app import guarded
from ojs_bridge.operations.dead_letters import DeadLetters
from ojs_bridge.rules.failures import MAX_MESSAGE, cut
from ojs_bridge.rules.job import format_time, parse_time
from ojs_bridge.store import KINDS
from tests.conftest import store_url
from tests.http.doors import API, JOBS, LETTERS, OWN, WAITING, House, client_at, house, listening, unlimited
from tests.operations.test_operating import celery_message
from tests.servers.ports import free_port
from tests.store.test_parked import parked
from tests.store.test_store import entry, letter


def test_the_shapes_have_each_field_that_is_shown() -> None:
    """The OpenAPI document allows other fields, and would not tell of one that a shape lacks."""
    waiting = {name: x for kind in KINDS for name, x in replace(parked(), kind=kind).to_ojs().items()}
    for shown, shape in ((letter().to_ojs(), shapes.Letter), (waiting, shapes.Waiting)):
        told = get_type_hints(shape)
        assert told.keys() == shown.keys(), f"fields of {shape.__name__} in ojs_bridge/http/shapes.py"
        told = get_type_hints(told["metadata"])
        # No class has an attribute such as `ojs.replay_count`.
        assert told.keys() == {name for name in shown["metadata"] if name.isidentifier()}, shape.__name__


def refused(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Return the error of an answer, in the spec's shape (http 16.1)."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"code", "message", "retryable", "details", "request_id"}
    assert error["code"] == code
    assert error["request_id"] == answer.headers["x-request-id"]
    return error


def house_with_seven(url: str) -> House:
    """A house with seven letters of two types."""
    door = house(url)
    for n in range(7):
        died = door.bridge.engine.now() - timedelta(seconds=100 - n)
        door.bury(f"j-{n}", type="a.b" if n % 2 else "c", discarded_at=died, message={"args": [n]})
    return door


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
@pytest.mark.requirement("DLQ-006", "DLQ-R004", "DLQ-R005")
def test_letters_are_listed_filtered_and_counted(kind: str, request: pytest.FixtureRequest) -> None:
    door = house_with_seven(store_url(kind, request))
    ask = door.client
    first = ask.get(LETTERS, params={"limit": 3}).json()
    assert [job["id"] for job in first["jobs"]] == ["j-6", "j-5", "j-4"]
    told = first["pagination"]
    assert (told["total"], told["limit"], told["offset"], told["has_more"]) == (7, 3, 0, True)
    rest = ask.get(LETTERS, params={"limit": 10, "cursor": told["next_cursor"]}).json()
    assert [job["id"] for job in rest["jobs"]] == ["j-3", "j-2", "j-1", "j-0"]
    assert rest["pagination"] == {
        "total": None, "limit": 10, "offset": 0, "has_more": False, "next_cursor": None,
    }  # fmt: skip
    skipped = ask.get(LETTERS, params={"offset": 5, "limit": 1}).json()
    assert ([job["id"] for job in skipped["jobs"]], skipped["pagination"]["total"]) == (["j-1"], 7)
    assert ask.get(LETTERS, params={"offset": 7}).json()["jobs"] == []
    assert ask.get(LETTERS, params={"type": "a.*"}).json()["pagination"]["total"] == 3
    assert [job["args"] for job in ask.get(LETTERS, params={"text": "5"}).json()["jobs"]] == [[5]]
    assert ask.get(f"{LETTERS}/stats").json() | {"oldest_at": 0, "newest_at": 0, "retention": 0} == {
        "total": 7, "by_queue": {"default": 7}, "by_type": {"a.b": 3, "c": 4},
        "by_error_type": {"external.timeout": 7}, "oldest_at": 0, "newest_at": 0, "retention": 0,
        "replayable": ["outbox"],
    }  # fmt: skip
    timeline = ask.get(f"{LETTERS}/timeline", params={"type": "c"}).json()
    assert (sum(timeline["counts"]), timeline["since"]) == (
        4,
        ask.get(f"{LETTERS}/stats").json()["oldest_at"],
    )
    some = ask.get(
        f"{LETTERS}/stats", params={"type": "c", "until": first["jobs"][0]["metadata"]["discarded_at"]}
    )
    assert (some.json()["total"], some.json()["by_type"]) == (3, {"c": 3})


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
@pytest.mark.requirement("DLQ-003", "DLQ-R001", "DLQ-R002")
def test_letters_are_got_replayed_and_deleted(kind: str, request: pytest.FixtureRequest) -> None:
    """One by one, and by their kind."""
    door = house_with_seven(store_url(kind, request))
    ask = door.client
    one = door.bridge.dead_letters.get("j-6")
    assert ask.get(f"{LETTERS}/j-6").json() == {**one.to_ojs(), "schedule": []}
    replayed = ask.post(f"{LETTERS}/j-6/retry").json()["job"]
    assert parse_time(replayed.pop("re_enqueued_at")) <= door.bridge.engine.now()
    assert replayed == {
        "id": "j-6", "type": "c", "state": "available", "queue": "default", "attempt": 0, "max_attempts": 3,
        "retry": None, "metadata": {"framework": "outbox", "ojs.replay_count": 1},
    }  # fmt: skip
    assert ask.delete(f"{LETTERS}/j-5").json() == {"deleted": True, "job_id": "j-5"}
    assert door.ids() == ["j-4", "j-3", "j-2", "j-1", "j-0"]
    bulk = {"filter": {"type": "c"}}
    told = refused(ask.post(f"{LETTERS}/retry", json=bulk), 400, "invalid_request")["details"]
    assert (told["matched"], told["by_type"], told["filter"].keys()) == (3, {"c": 3}, {"type", "until"})
    done = ask.post(f"{LETTERS}/retry", json={**bulk, "confirm": True, "rate": 1000}).json()
    assert done == {"action": "retry", "matched": 3, "succeeded": 3, "failed": 0, "errors": []}
    assert [found.id for found, _ in door.outbox.published] == ["j-6", "j-0", "j-2", "j-4"]
    where = {"type": "a.*", "since": format_time(door.bridge.engine.now() - timedelta(hours=1))}
    told = refused(ask.delete(LETTERS, params=where), 400, "invalid_request")["details"]
    assert (told["matched"], told["by_type"], told["filter"]["since"]) == (2, {"a.b": 2}, where["since"])
    done = ask.delete(LETTERS, params={**where, "confirm": "true"}).json()
    assert done == {
        "action": "purge", "matched": 2, "succeeded": 2, "deleted": 2, "failed": 0, "errors": [],
    }  # fmt: skip
    assert door.ids() == []


def test_a_purge_by_its_body(door: House) -> None:
    """Query or body may name the kind, but never both: one alone would purge more than was meant."""
    for queue in ("a", "b"):
        door.bury(queue, queue=queue)
    narrow = {"filter": {"queue": "a"}, "confirm": True}
    error = refused(
        door.client.request("DELETE", LETTERS, params={"confirm": "true"}, json=narrow),
        400,
        "invalid_request",
    )
    assert "not into both" in error["message"]
    assert door.client.request("DELETE", LETTERS, json=narrow).json()["succeeded"] == 1
    assert door.ids() == ["b"]


IDS = [
    "a/b",
    "a%2Fb",
    "x/retry",
    "retry",
    "naïve ☃ 💩",
    "a b?c#d",
    "'\"<>",
    "/",
    "..a",
    "a\0b",
    "%",
    "x" * 5_000,
    "",
]


def test_ids_of_all_kinds(door: House) -> None:
    """A client gets, replays and deletes them with percent-encoded ids."""
    with (
        listening(guarded(door.bridge, unlimited())) as address,
        httpx.Client(headers=OWN, timeout=30) as client,
    ):
        for letter_id in IDS:
            path = f"{address}{LETTERS}/{quote(letter_id, safe='')}"
            door.bury(letter_id)
            assert client.get(path).json()["id"] == letter_id
            assert client.post(f"{path}/retry", json={}).json()["job"]["id"] == letter_id
            door.bury(letter_id)
            assert client.delete(path).json() == {"deleted": True, "job_id": letter_id}
            assert door.ids() == []


@pytest.mark.requirement("DLQ-R002")
def test_a_replay_with_overrides(door: House) -> None:
    """The publisher gets them; the answer has the new queue and policy of the job."""
    door.bury("j-1", retry={"max_attempts": 4})
    override = {
        "queue": "slow",
        "args": [1],
        "kwargs": {"a": None},
        "meta": {"by": "me"},
        "retry": {"max_attempts": 9},
    }
    job = door.client.post(f"{LETTERS}/j-1/retry", json={"override": override}).json()["job"]
    assert (job["queue"], job["max_attempts"], job["retry"]) == ("slow", 9, {"max_attempts": 9})
    [given] = door.outbox.overrides
    assert (given.queue, given.args, given.kwargs, given.meta) == ("slow", [1], {"a": None}, {"by": "me"})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "the body: b'{': Invalid JSON: EOF while parsing"),
        (b'{"a": "\xff"}', "the body: b'{\"a\": \"\\xff\"}': Invalid JSON: invalid unicode"),
        (b'{"override": {"args": ["\\ud800"]}}', "the body: b'"),
        (b'{"override": {"args": [NaN]}}', "override.args.0: nan: Out of range float values"),
        (b"[" * 60_000, "the body: b'[[[["),
        (b"9" * 6_000, "the body: b'9999"),
        (b"[]", "the body: []: Input should be an object"),
        (b'{"overrides": {}}', "overrides: {}: Extra inputs are not permitted"),
        (b'{"override": []}', "override: []: Input should be an object"),
        (b'{"override": {"priority": 1}}', "override.priority: 1: Extra inputs are not permitted"),
        (b'{"override": {"queue": ""}}', "override.queue: '': String should have at least 1"),
        (b'{"override": {"args": "abc"}}', "override.args: 'abc': Input should be a valid array"),
        (b'{"override": {"retry": 3}}', "override.retry: 3: Input should be an object"),
        (b'{"override": {"retry": {"max_attempts": -1}}}', "invalid retry policy: retry: max_attempts"),
        (b'{"override": {"args": [1e999]}}', "override.args.0: inf: Out of range float values"),
        (b'{"override": {"meta": {"retries": 1}}}', "override: {'meta': {'retries': 1}}: meta: 'retries' is"),
    ],
)  # fmt: skip
def test_a_body_that_is_wrong(door: House, body: bytes, told: str) -> None:
    """The error names the field, and no letter changes."""
    door.bury("j-1")
    headers = {"Content-Type": "application/json"}
    error = refused(
        door.client.post(f"{LETTERS}/j-1/retry", content=body, headers=headers), 400, "invalid_request"
    )
    assert error["message"].startswith(told)
    assert (door.ids(), door.outbox.published) == (["j-1"], [])


OWN_POLICY = {"initial_interval": "PT1M", "max_interval": "PT2M"}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"max_attempts": -1}, "retry: max_attempts: -1 must be >= 0"),
        ({"colour": "red"}, 'retry: colour: "red" is not a field of a retry policy'),
        ({"max_interval": "PT1S"}, "retry: max_interval: PT1S must be >= initial_interval, PT1M"),
    ],
    ids=["a value", "a field", "with the job's own policy"],
)
def test_a_policy_that_is_wrong(door: House, wrong: dict[str, Any], problem: str) -> None:
    """The answer has the spec's error type, and names the field, the value and the rule."""
    door.bury("j-1", retry=OWN_POLICY)
    answer = door.client.post(f"{LETTERS}/j-1/retry", json={"override": {"retry": wrong}})
    error = refused(answer, 400, "invalid_request")
    assert error["details"] == {"type": "validation.retry_policy_invalid", "problems": [problem]}
    assert error["message"] == f"invalid retry policy: {problem}"
    assert (door.ids(), door.outbox.published) == (["j-1"], [])


PICKLED = {**celery_message(), "content_type": "application/x-python-serialize", "properties": {}}
UNSENDABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "arguments that are pickled": ("celery", {**PICKLED, "exchange": "", "routing_key": "q", "queue": "q"}),
    "a Celery message without its body": ("celery", {"headers": {}}),
    "a Celery message of a wrong kind": ("celery", {"body": 5, "body_encoding": "utf-8"}),
    "a Dramatiq message without its bytes": ("dramatiq", {"encoding": "utf-8"}),
    "a Dramatiq message that is no JSON": ("dramatiq", {"encoded": "{", "encoding": "utf-8"}),
}


@pytest.mark.parametrize(("framework", "message"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_a_message_that_cannot_be_sent_as_asked(door: House, framework: str, message: dict[str, Any]) -> None:
    """The error has the reason, and the letter stays."""
    install_in_celery(Celery("shop", broker="memory://"), door.bridge)
    install_in_dramatiq(StubBroker(), door.bridge)
    door.bury("j-1", type="t", framework=framework, message=message)
    answer = door.client.post(f"{LETTERS}/j-1/retry", json={"override": {"args": [1]}})
    refused(answer, 422, "x_not_replayable")
    assert door.ids() == ["j-1"]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("limit=0", "limit: '0': Input should be greater than or equal to 1"),
        ("limit=101", "limit: '101': Input should be less than or equal to 100"),
        ("limit=ten", "limit: 'ten': Input should be a valid integer"),
        ("limit=-1", "limit: '-1': Input should be"),
        ("limit=1e1", "limit: '1e1': Input should be"),
        ("limit=%C2%B2", "limit: '²': Input should be"),
        ("offset=10001", "offset: '10001': Input should be less than or equal to 10000"),
        ("offset=1&text=a", "offset: 1: does not go with a text"),
        ("cursor=made-up", "cursor: 'made-up': String should match pattern"),
        ("since=yesterday", "since: 'yesterday': must be a time such as"),
        ("since=2026-01-01T00:00:00", "since: '2026-01-01T00:00:00': must be a time such as"),
        ("until=", "until: '': must be a time such as"),
        ("queue=a&queue=b", "queue: ['a', 'b']: Input should be a valid string"),
        ("que=a", "que: 'a': Extra inputs are not permitted"),
        ("confirm=true", "confirm: 'true': Extra inputs are not permitted"),
        (f"text={'x' * 1001}", "text: 'xxxx"),
    ],
)
def test_a_query_that_is_wrong(door: House, query: str, told: str) -> None:
    """The error names the parameter."""
    error = refused(door.client.get(f"{LETTERS}?{query}"), 400, "invalid_request")
    assert error["message"].startswith(told)


READS = ["dead-letter", "dead-letter/stats", "dead-letter/timeline", "dead-letter/groups", "waiting", "rates"]
READS += ["operations", "audit", "marks", "health", "openapi.json", "dead-letter/j-1", "jobs/j-1"]


@pytest.mark.parametrize("path", [*(f"{API}/{path}" for path in READS), "/metrics"])
@pytest.mark.parametrize("name", ["within", "Queue", "filter"])
def test_what_a_query_does_not_know_is_refused(door: House, path: str, name: str) -> None:
    """What is ignored would widen a choice without a word."""
    door.bury("j-1")
    error = refused(door.client.get(path, params={name: "3600"}), 400, "invalid_request")
    assert error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("path", ["stats", "timeline", "groups"])
def test_what_cannot_be_searched_refuses_a_text(door: House, path: str) -> None:
    """Counts of all letters are no answer to who asks for those with a text."""
    error = refused(door.client.get(f"{LETTERS}/{path}", params={"text": "x"}), 400, "invalid_request")
    assert error["message"].startswith("text: ")


@pytest.mark.parametrize(
    "body",
    [
        {"confirm": "true"},
        {"confirm": 1},
        {"confirm": True, "rate": 0},
        {"confirm": True, "rate": True},
        {"confirm": True, "rate": 1e-300},
        {"confirm": True, "rate": "5"},
        {"confirm": True, "filter": {"queue": ""}},
        {"confirm": True, "filter": {"qeue": "a"}},
        {"confirm": True, "filter": {"since": 5}},
        {"confirm": True, "filter": "a"},
        {"confirm": True, "queue": "a"},
    ],
)
def test_a_bulk_replay_that_is_wrong(door: House, body: dict[str, Any]) -> None:
    """A misspelt filter does not replay everything."""
    door.bury("j-1", queue="a")
    refused(door.client.post(f"{LETTERS}/retry", json=body), 400, "invalid_request")
    refused(door.client.request("DELETE", LETTERS, json=body), 400, "invalid_request")
    assert (door.ids(), door.outbox.published) == (["j-1"], [])


def test_a_times_edge(door: House) -> None:
    """Every time of RFC 3339 is taken, in any zone; a death at that moment is found."""
    door.bury("j-1")
    for since in ("0001-01-01T00:00:00Z", "1969-12-31t23:59:59.5z", "2000-01-01T00:00:00+05:30"):
        assert door.client.get(LETTERS, params={"since": since}).json()["pagination"]["total"] == 1
        assert door.client.get(LETTERS, params={"until": since}).json()["jobs"] == []
    for path in (LETTERS, f"{LETTERS}/timeline"):
        assert door.client.get(path, params={"since": "9999-12-31T23:59:59Z"}).status_code == 200


def test_what_is_not_there(door: House) -> None:
    """The trouble is an unknown id, an unknown path, or a method that a path does not have."""
    for method, path in (
        ("GET", "x"),
        ("DELETE", "x"),
        ("POST", "x/retry"),
        ("DELETE", ""),
        ("DELETE", "a/b"),
    ):
        error = refused(door.client.request(method, f"{LETTERS}/{path}"), 404, "not_found")
        wanted = path.removesuffix("/retry")
        assert error["details"] == {"resource_type": "dead_letter_job", "resource_id": wanted}
    for path in (f"{API}/jobs", "/nothing", "/page/../page.py", "/page/nothing.js"):
        refused(door.client.get(path), 404, "not_found")
    answer = door.client.put(LETTERS)
    refused(answer, 405, "x_method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) >= {"GET"}


def test_one_that_is_being_replayed(door: House) -> None:
    """The letter is there, but another replay has it: a conflict, and worth another try."""
    door.bury("j-1")
    assert door.bridge.store is not None
    door.bridge.store.letters.claim(["j-1"], now=door.bridge.engine.now(), seconds=60)
    for method, path in (("DELETE", "j-1"), ("POST", "j-1/retry")):
        assert (
            refused(door.client.request(method, f"{LETTERS}/{path}"), 409, "x_conflict")["retryable"] is True
        )


def test_a_task_that_is_gone(door: House) -> None:
    """The letter stays, and the message says why; a framework that is not here is refused in the same way."""
    door.bury("j-1", type="gone")
    door.bury("j-2", framework="elsewhere")
    door.outbox.strangers = {"gone"}
    for name, told in (("j-1", "which outbox here does not know"), ("j-2", "belongs to elsewhere")):
        assert (
            told in refused(door.client.post(f"{LETTERS}/{name}/retry"), 422, "x_not_replayable")["message"]
        )
    assert door.client.post(f"{LETTERS}/retry", json={"confirm": True}).json()["failed"] == 2
    assert len(door.ids()) == 2


def test_a_broker_that_is_down(door: House) -> None:
    """A replay of one letter or of many gets a 503; no letter is lost, and the answer names no broker."""
    door.bury("j-1")
    door.outbox.raises = Unreachable("amqp://user:secret@10.0.0.7 refused")
    for path, body in ((f"{LETTERS}/j-1/retry", {}), (f"{LETTERS}/retry", {"confirm": True})):
        answer = door.client.post(path, json=body)
        assert refused(answer, 503, "backend_error")["retryable"] is True
        assert "secret" not in answer.text
        assert answer.headers["retry-after"] == "5"
    assert door.ids() == ["j-1"]
    door.outbox.raises = None
    assert door.client.post(f"{LETTERS}/j-1/retry").status_code == 200


def test_a_store_that_is_down(unused_port: int) -> None:
    """Every route says so, and the answer does not name the store's address."""
    client = client_at(Bridge(f"redis://user:secret@127.0.0.1:{unused_port}/0"), unlimited())
    letters = [("GET", ""), ("GET", "/x"), ("GET", "/stats"), ("POST", "/x/retry"), ("DELETE", "/x")]
    others = [("GET", WAITING), ("GET", f"{JOBS}/x"), ("POST", f"{WAITING}/x/run"), ("DELETE", f"{JOBS}/x")]
    for method, path in [*((method, LETTERS + path) for method, path in letters), *others]:
        answer = client.request(method, path)
        refused(answer, 503, "backend_error")
        assert "127.0.0.1" not in answer.text


@pytest.fixture
def unused_port() -> int:
    """Return a port without a listener."""
    return free_port()


def test_what_nobody_foresaw(door: House, caplog: pytest.LogCaptureFixture) -> None:
    """The answer has an id of the log, which alone knows more."""
    door.bury("j-1")
    door.outbox.raises = RuntimeError("secret inside")
    answer = door.client.post(f"{LETTERS}/j-1/retry", headers={"X-Request-Id": "req_mine-1"})
    error = refused(answer, 500, "x_internal")
    assert error["request_id"] == "req_mine-1"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    [logged] = [record for record in caplog.records if "req_mine-1" in record.getMessage()]
    assert logged.exc_info is not None
    assert door.ids() == ["j-1"]


def test_awkward_job_data(door: House) -> None:
    """HTML stays text in JSON; texts of invalid Unicode, and numbers that JSON lacks, are shown, too."""
    html = "<script>alert(1)</script>"
    door.bury("j-1", message={"args": [html, "\ud800", float("nan"), {"x": float("inf")}]}, reason=html)
    answer = door.client.get(f"{LETTERS}/j-1")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/json"
    job = json.loads(answer.text, parse_constant=pytest.fail)
    assert job["args"] == [html, "\ud800", "nan", {"x": "inf"}]


def test_secrets_stay_hidden(tmp_path: Any) -> None:
    """The bridge's redaction holds here, too."""
    door = house(f"sqlite:///{tmp_path}/ojs.db", redact=["password"])
    door.bury("j-1", message=celery_message("ann", password="hunter2!"))
    for path in (LETTERS, f"{LETTERS}/j-1"):
        assert "hunter2!" not in door.client.get(path).text
    assert "hunter2!" not in door.client.post(f"{LETTERS}/j-1/retry").text


def test_counts_are_kept_for_each_filter(door: House) -> None:
    """A change through the API drops all of them."""
    for n in range(6):
        door.bury(f"j-{n}", queue=f"q{n % 2}", type=f"t.{n % 3}")

    def totals() -> list[int]:
        asked = [{}, {"queue": "q0"}, {"queue": "q0", "type": "t.0"}]
        return [door.client.get(f"{LETTERS}/stats", params=query).json()["total"] for query in asked]

    assert totals() == [6, 3, 1]
    door.bury("j-6", queue="q0", type="t.0")
    assert totals() == [6, 3, 1]
    assert door.client.get(LETTERS, params={"queue": "q0", "limit": 1}).json()["pagination"]["total"] == 3
    assert door.client.delete(f"{LETTERS}/j-0").status_code == 200
    assert totals() == [6, 3, 1]
    assert door.client.delete(f"{LETTERS}/j-6").status_code == 200
    assert totals() == [5, 2, 0]


def test_the_total_is_not_counted_where_that_is_dear(door: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """No count comes with a text, with a page that goes on, or where the last page tells it anyway."""
    for n in range(3):
        door.bury(f"j-{n}", message={"args": ["x"]})
    monkeypatch.setattr(DeadLetters, "replay_all", lambda *_, **__: pytest.fail("it was counted"))
    asked = [{"text": "x", "limit": 2}, {"text": "x"}, {"text": "y"}, {"cursor": "1:a"}, {"offset": 1}, {}]
    told = [door.client.get(LETTERS, params=query).json()["pagination"]["total"] for query in asked]
    assert told == [None, 3, 0, None, 3, 3]


def test_a_policys_schedule(door: House) -> None:
    """The answer has the seconds before each retry, without jitter; of a long policy the first fifty."""
    door.bury("j-1", policy={"max_attempts": 4, "initial_interval": "PT2S", "backoff_coefficient": 3.0})
    door.bury("j-2", policy={"max_attempts": 10**6})
    assert door.client.get(f"{LETTERS}/j-1").json()["schedule"] == [2, 6, 18]
    assert len(door.client.get(f"{LETTERS}/j-2").json()["schedule"]) == 50


def test_a_list_leaves_out_long_arguments(door: House) -> None:
    """A page of letters must not weigh as much as all of their arguments; the single letter has them."""
    door.bury("long", message={"args": ["x" * 2_000], "kwargs": {}})
    door.bury("short", message={"args": ["x" * 1_000], "kwargs": {}})
    jobs = {job["id"]: job for job in door.client.get(LETTERS).json()["jobs"]}
    assert jobs["short"]["args"] == ["x" * 1_000]
    assert (jobs["long"]["args"], jobs["long"]["note"][:21]) == (None, "left out of the list:")
    assert door.client.get(f"{LETTERS}/long").json()["args"] == ["x" * 2_000]


def test_no_door_shows_a_secret_that_code_has_written() -> None:
    """In lists, letters, groups, retries, the admin API and exports; whole, or what a cut has left."""
    key = "-----BEGIN KEY-----\nMIIBVgIBADANBgkqhkiG9w0\n-----END KEY-----\n"
    door = house("memory://", redact=["private_key"])
    said = [repr(key), json.dumps({"private_key": key}), f"{'x' * 3_980}{key}", quote(key), str(key.encode())]
    errors = tuple(
        entry(n, message=cut(text, MAX_MESSAGE), backtrace=[text], details={"body": text})
        for n, text in enumerate(said, 1)
    )
    fields = {"message": celery_message(private_key=key), "reason": said[0]}
    for n in range(5):
        door.bury(f"j-{n}", errors=(*errors[n:], *errors[:n]), **fields)
    door.park("p-1", state={"errors": [*errors]}, **fields)
    told = [door.client.get(f"{LETTERS}/j-{n}").json() for n in range(5)]
    paths = (
        "/dead-letter",
        "/dead-letter/groups",
        "/waiting",
        "/jobs/p-1",
        "/admin/dead-letter",
        "/admin/jobs",
    )
    told += [
        door.client.get(f"{API}{path}").json() for path in (*paths, "/admin/jobs/j-1", "/admin/jobs/p-1")
    ]
    told += [*door.bridge.dead_letters.export()]
    text = json.dumps(told)
    assert text.count("[redacted]") > 50
    assert not any(part in text for part in ("MIIB", "BEGIN", "BEGI", "w0"))
    assert door.client.get(LETTERS, params={"text": "MIIB"}).json()["jobs"] == []
