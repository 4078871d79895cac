"""The OpenAPI document, and the server that is checked against it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from ojs_bridge.http.app import document, guarded
from ojs_bridge.store import KINDS
from tests.http.doors import API, OWN, House, house, listening, unlimited
from tests.operations.test_operating import celery_message, dramatiq_message


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, str]]:
    """A server on a store with letters and retries of all kinds, and its address."""
    door = house(f"sqlite:///{tmp_path_factory.mktemp('http')}/ojs.db")
    with listening(guarded(door.bridge, unlimited())) as address:
        yield door, address


def fill(door: House) -> None:
    """Bury letters and park retries for the requests to find."""
    messages = [
        {"args": [1]},
        celery_message("a", b=2),
        dramatiq_message("a"),
        {"encoded": "?", "encoding": "utf-8"},
    ]
    for n in range(40):
        died = door.bridge.engine.now() - timedelta(seconds=n)
        policy = {"max_attempts": 3} if n % 3 else None
        born = died if n % 2 else None
        found = {"message": messages[n % 4], "retry": policy, "policy": policy}
        door.bury(f"j-{n}", discarded_at=died, created_at=born, **found)
        door.park(f"j-{n}", kind=KINDS[n % len(KINDS)])
    door.bridge.pause("none.*", until=door.bridge.engine.now() + timedelta(hours=1))


def beyond_schemas(case: schemathesis.Case) -> bool:
    """Return whether a request may break a rule that no schema can tell: of two parameters, or a policy's."""
    body = case.body if isinstance(case.body, dict) else {}
    override = body.get("override")
    told = {
        "filter",
        "ids",
        "override",
        "rate",
        "stop_if_failing",
        "at",
        "limit",
        "newest",
        "forever",
        "changes",
    } & {*body}
    bulk = body.get("action") is not None and (told or body["action"] == "move")
    policy = isinstance(override, dict) and "retry" in override
    searched = {"text", "error_type", "since", "until"} if case.path.endswith("/waiting") else {"text"}
    skipped = "offset" in case.query and searched & set(case.query)
    page = str(case.query.get("page", ""))
    far = page.isdigit() and int(page) > 100
    return (
        bool(skipped)
        or policy
        or bool(bulk)
        or far
        or beyond_purges(case, body)
        or beyond_pauses(case, body)
        or beyond_previews(case, body)
    )


def beyond_previews(case: schemathesis.Case, body: dict[str, object]) -> bool:
    """Return whether a preview may name an argument twice, or have both ids and a filter."""
    edits = body.get("changes")
    several = isinstance(edits, dict) and (sum(map(bool, edits.values())) > 1 or bool(edits.get("rename")))
    removed = edits.get("remove") if isinstance(edits, dict) else None
    twice = isinstance(removed, list) and len(removed) > 1
    return case.path.endswith("/operations/preview") and (several or twice or {"ids", "filter"} <= {*body})


def beyond_pauses(case: schemathesis.Case, body: dict[str, object]) -> bool:
    """Return whether a pause or a limit may name nothing, or end in the past, or have too slow a rate."""
    if case.method == "PUT":
        return bool({"rate", "throttle", "expires_at"} & {*body}) or body.get("concurrency") is None
    nothing = case.path.endswith("/holds") and not any(map(body.get, ("type", "queue", "error_type")))
    return case.method == "POST" and (
        nothing or ("until" in body and case.path.endswith(("/holds", "/pause")))
    )


def beyond_purges(case: schemathesis.Case, body: dict[str, object]) -> bool:
    """Return whether a purge may lack consent, name its age twice, or name one that no clock can hold."""
    if case.method == "GET" or not case.path.endswith(("/purge", "/admin/dead-letter")):
        return False
    asked = {**case.query}
    age = str(asked.get("older_than", ""))
    chosen = case.method == "POST" and age.strip("wdhms").strip("0").isdigit()
    twice = bool(body.keys() & {"older_than", "confirm", "forever"})
    return twice or age.startswith("P") or not (chosen or "confirm" in asked)


OPERATIONS = [(path, method) for path, methods in document()["paths"].items() for method in methods]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_server_keeps_to_its_document(served: tuple[House, str], path: str, method: str) -> None:
    """Every answer, also to a wrong request, has the status, content type and shape of the document."""
    door, address = served
    fill(door)
    api = schemathesis.openapi.from_url(f"{address}{API}/openapi.json")
    operation = api[path][method.upper()]
    known = count()

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data(), mode=st.sampled_from(list(GenerationMode)))
    def check(data: st.DataObject, mode: GenerationMode) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        assume(not beyond_schemas(case))
        if mode is GenerationMode.POSITIVE and "id" in case.path_parameters and data.draw(st.booleans()):
            case.path_parameters["id"] = f"j-{next(known)}"
        case.call_and_validate(headers=OWN)

    check()


def test_every_reference_leads_somewhere() -> None:
    """Every shape is used, too."""
    told = document()
    used = set(_references(told))
    assert used == {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}


def _references(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from _references(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from _references(inner)


def test_it_is_served(tmp_path: Path) -> None:
    answer = house(f"sqlite:///{tmp_path}/ojs.db").client.get(f"{API}/openapi.json")
    assert (answer.status_code, answer.json()) == (200, document())
