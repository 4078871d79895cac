"""What another version has written, and this one cannot read, is left out; all else is shown and done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, get_args
from uuid import uuid4

import pytest

from ojs_bridge import Breaker, Dependency
from ojs_bridge.engine import faults
from ojs_bridge.engine.budgets import BUDGET
from ojs_bridge.engine.faults import Failures
from ojs_bridge.engine.holds import KIND as HOLD
from ojs_bridge.engine.holds import Releaser
from ojs_bridge.engine.limits import RATE, SLOTS
from ojs_bridge.engine.rates import IN_BROKER, ShortWaits
from ojs_bridge.engine.storing import Fate, fate_kind
from ojs_bridge.errors import OperationNotFound
from ojs_bridge.instrumentation.metrics import gauges_text
from ojs_bridge.operations import audit, groups, health, operation, retention
from ojs_bridge.operations.health import Beat
from ojs_bridge.rules.decision import RetryAt
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job
from ojs_bridge.store import Document
from tests.engine.test_breakers import failed
from tests.engine.test_limits import begun
from tests.http.doors import API, House, client_at, house, unlimited
from tests.lives import FRAMEWORK

BANK = Dependency("bank", ["bank.*"], ["act"], Breaker(), rate="1000/s", concurrency=9, budget=0.5)
#: What a newer version might write in the place of anything.
FORMS: tuple[Any, ...] = (None, [], {}, 7, "new", {"new": {"form": 2}}, [[1]], -1e300)
#: The answers that list documents, or what they are about.
TOLD = ("audit", "marks", "operations", "holds", "dead-letter/groups")


@dataclass(frozen=True)
class Fleet:
    """A fleet whose store has each kind of document, and ways to ask for it."""

    door: House
    operation: str

    def bodies(self) -> dict[str, Mapping[str, Any]]:
        """Return a good document of each kind; of a kind with several names, by its kind and name."""
        assert self.door.bridge.store
        documents = self.door.bridge.store.documents
        fates = [fate_kind(self.operation, fate) for fate in get_args(Fate)]
        kinds = (HOLD, RATE, SLOTS, BUDGET, IN_BROKER, health.KIND, groups.KIND, audit.KIND, audit.MARK)
        kinds += (operation.KIND, operation.IDS, retention.KIND, groups.RESOLVED, faults.KIND, *fates)
        found = {kind: documents.list(kind, limit=9, cursor=None).documents for kind in kinds}
        return {kind: of[0].body for kind, of in found.items() if of}

    def answers(self) -> dict[str, Any]:
        """Ask all that can be asked without an id; each answer is a good one."""
        client, told = self.door.client, {}
        for path, ways in client.get(f"{API}/openapi.json").json()["paths"].items():
            if "get" in ways and "{" not in path:
                answer = client.get(path)
                assert answer.status_code == 200, (path, answer.text)
                told[path.removeprefix(f"{API}/")] = answer.json()
        return told


@pytest.fixture
def fleet(url: str) -> Fleet:
    """A fleet in which everything has happened once."""
    door = house(url, dependencies=[BANK])
    door = House(door.bridge, door.outbox, client_at(door.bridge, unlimited()))
    bridge, now = door.bridge, door.bridge.engine.now()
    letter = door.bury("l-1")
    door.bury("l-2", fault="0123456789abcdef")
    bridge.dead_letters.groups.mute("0123456789abcdef")
    bridge.groups.resolve("0123456789abcdef", "v1")
    bridge.marks.add("v1")
    bridge.pause("other.*")
    bridge.limit("bank", concurrency=8, rate="900/s")
    Beat(bridge.engine.context, FRAMEWORK, lambda: ["default"]).tell()
    assert bridge.store and bridge.engine.breakers
    waits = ShortWaits(bridge.store.documents, timedelta(minutes=1))
    waits.add(Job("w-1", "act", "default"), now + timedelta(minutes=1))
    waits.write(now)
    failures = Failures(bridge.store.documents, (), redacts=False)
    failures.add(Job("f-1", "act", "default"), RetryAt(now + timedelta(hours=1), 3600, Failure("e"), ""), now)
    failures.write(now)
    bridge.dead_letters.prune()
    run = begun(bridge, Job("j-1", "act", "default"))
    bridge.engine.breakers.heard(run, failed(bridge))
    replay = bridge.operations.begin("replay", ids=[letter.id])
    bridge.operations.run(replay)
    for fate in ("began", "died"):
        kind = fate_kind(replay.id, fate)  # type: ignore[arg-type]
        bridge.store.documents.write(Document(kind, "j", now, {"id": "l-1"}))
    return Fleet(door, replay.id)


def damaged(body: Mapping[str, Any]) -> list[Any]:
    """Return forms that another version may have given a document."""
    forms = [*FORMS, {**body, "new": "field"}]
    for name in body:
        forms += [{**body, name: form} for form in FORMS]
        forms.append({other: value for other, value in body.items() if other != name})
    return forms


def test_each_kind_of_document_in_any_form(fleet: Fleet) -> None:
    """Every answer of the door is there, and tells of what it told of; workers go on."""
    bridge, before = fleet.door.bridge, fleet.answers()
    assert bridge.store
    documents, now = bridge.store.documents, bridge.engine.now()
    bodies = fleet.bodies()
    assert len(bodies) == 16, sorted(bodies)
    for kind, body in bodies.items():
        for form in damaged(body):
            # An older one is not among the newest, and is not forgotten either.
            at = now - timedelta(minutes=1)
            documents.write(Document(kind, f"other-{uuid4().hex}", at, form))
    documents.write(Document(operation.KIND, "op-new", now, {"new": {"form": 2}}))
    after = fleet.answers()
    for path in TOLD:
        assert ids_in(before[path]) <= ids_in(after[path]), path
    assert after["health"]["status"] == before["health"]["status"]
    assert bridge.counts()["retryable"] >= 1
    assert bridge.operations.get(fleet.operation).state == "done"
    assert next(mark.text for mark in bridge.marks.list(limit=1000)) == "v1"
    assert gauges_text(bridge)
    bridge.dead_letters.prune()
    Releaser(bridge.store, bridge.engine.now, bridge.engine.dependencies).release()
    bridge.resume("other.*")
    assert "pause:type=other.*" not in [shown.hold.id for shown in bridge.holds.list()]
    with pytest.raises(OperationNotFound, match="another version has written"):
        bridge.operations.get("op-new")


@pytest.mark.parametrize("form", FORMS)
def test_the_limit_and_the_breaker_of_a_dependency(fleet: Fleet, form: Any) -> None:
    """All that is known of it is in one document: a breaker begins anew, and jobs wait for a limit."""
    bridge = fleet.door.bridge
    assert bridge.store and bridge.engine.breakers and bridge.engine.limits and bridge.engine.budgets
    documents, now = bridge.store.documents, bridge.engine.now()
    run = begun(bridge, "j-2")
    for kind, name in ((RATE, "bank"), (SLOTS, "bank"), (BUDGET, "bank"), (HOLD, "breaker:bank")):
        known = documents.get(kind, name)
        assert known
        body = {**known.body, "state": form} if kind == HOLD else form
        documents.write(replace(known, body=body, revision=known.revision + 1))
    assert fleet.answers()["rate-limits"]
    bridge.engine.limits.wake()
    bridge.engine.budgets.wake()
    for _ in range(20):
        bridge.engine.breakers.heard(run, failed(bridge))
    known = documents.get(HOLD, "breaker:bank")
    assert known and known.body["state"]["opened"] > now.timestamp()


def ids_in(answer: Mapping[str, Any]) -> set[str]:
    """Return the ids of what an answer lists."""
    listed = next(items for items in answer.values() if isinstance(items, list))
    return {item.get("id") or item["fingerprint"] for item in listed}


def test_a_job_that_waits_for_what_this_version_does_not_know(url: str) -> None:
    """It is shown as one that waits."""
    door = house(url)
    door.park("j-1", kind="dreaming", next_retry_at=door.bridge.engine.now() - timedelta(hours=1))
    (shown,) = door.client.get(f"{API}/waiting").json()["jobs"]
    assert (shown["id"], shown["state"]) == ("j-1", "pending")
    assert door.client.get(f"{API}/jobs/j-1").json()["job"]["state"] == "pending"
    told = door.client.get(f"{API}/health").json()["checks"]["waiting"]["message"]
    assert told.startswith("the oldest waiting job is 36")
    door.bridge.waiting.cancel("j-1")
