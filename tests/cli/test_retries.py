"""`ojs-bridge retries`, on a real store."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ojs_bridge import Bridge
from ojs_bridge.rules.policy import LARGEST
from ojs_bridge.store import Filter, Parked
from tests.cli.running import run
from tests.lives import FRAMEWORK


@pytest.fixture
def parked(store: str) -> Bridge:
    """A store with three parked retries; r-0 is due first."""
    bridge = Bridge(store)
    assert bridge.store is not None
    for n in range(3):
        bridge.store.parked.park(
            Parked(
                id=f"r-{n}", key=f"r-{n}", fence=1, type="mail.send" if n else "billing.charge",
                queue="default", framework=FRAMEWORK, attempt=2, max_attempts=5,
                next_retry_at=bridge.engine.now() + timedelta(hours=n + 1), parked_at=bridge.engine.now(),
                reason="retry 1 in 1 h", state={"v": 1, "attempt": 2}, message={"args": [n]},
            )
        )  # fmt: skip
    return bridge


def test_a_retry_without_a_limit(parked: Bridge, store: str) -> None:
    """The output has a word, not a number of nineteen digits."""
    assert parked.store is not None
    [one] = parked.store.parked.list(Filter("default", "billing.charge"), limit=9, cursor=None).jobs
    parked.store.parked.park(replace(one, id="r-9", key="r-9", max_attempts=LARGEST))
    told = run("retries", "list", store=store).out
    assert "2 (no limit)" in told
    assert str(LARGEST) not in told


@pytest.mark.usefixtures("parked")
def test_listing(store: str) -> None:
    """The retry that is due first comes first; filters, single pages and all pages work."""
    assert [r["id"] for r in run("retries", "list", "--json", store=store).json] == ["r-0", "r-1", "r-2"]
    assert [r["id"] for r in run("retries", "list", "--json", "--type", "mail.*", store=store).json] == [
        "r-1",
        "r-2",
    ]
    page = run("retries", "list", "--json", "--limit", "2", store=store)
    assert "there may be more: --cursor " in page.err
    assert len(run("retries", "list", "--json", "--all", "--queue", "default", store=store).json) == 3
    told = run("retries", "list", store=store).out
    assert "2/5" in told  # the second attempt is due
    assert "retry 1 in 1 h" in told
    narrow = run("retries", "list", store=store, COLUMNS="60").out.splitlines()
    assert [line.split()[0] for line in narrow if line.startswith("r-")] == ["r-0", "r-1", "r-2"]
    assert [line.split()[4] for line in narrow if line.startswith("r-0")] == ["billing.charge"]


def test_a_narrow_list_of_all_that_waits_tells_the_kinds(parked: Bridge, store: str) -> None:
    assert parked.store is not None
    for name in ("s-0", "s-1"):
        delayed = replace(parked.retries.get("r-0"), id=name, key=name, fence=0, attempt=1, kind="scheduled")
        parked.store.parked.park(delayed)
    for columns in ("60", "80", "1000"):
        lines = run("waiting", "list", store=store, COLUMNS=columns).out.splitlines()
        assert all(len(line) <= int(columns) for line in lines)
        found = [line.split() for line in lines]
        assert "kind" in {word for words in found for word in words[:2]}
        kinds = {words[0]: words[1] for words in found if words and words[0][1:2] == "-"}
        assert kinds == {
            **dict.fromkeys(("r-0", "r-1", "r-2"), "retry"),
            "s-0": "scheduled",
            "s-1": "scheduled",
        }


def test_running_and_cancelling(parked: Bridge, store: str) -> None:
    """One retry is made due now, one is cancelled, and the third stays as it is."""
    before = parked.engine.now()
    assert run("retries", "run", "r-2", store=store).out == "r-2: due\n"
    assert parked.retries.get("r-2").next_retry_at <= parked.engine.now()
    refused = run("retries", "cancel", "r-0", store=store)
    assert refused.code == 2
    assert "Cancel 1 parked retry in sqlite:" in refused.err
    done = run("retries", "cancel", "r-0", "nobody", "--yes", "--json", store=store)
    assert done.code == 1
    assert done.json == [
        {"id": "r-0", "cancelled": True},
        {"id": "nobody", "error": "there is no parked retry 'nobody'"},
    ]
    assert [r.id for r in parked.retries.list().jobs] == ["r-2", "r-1"]
    assert parked.retries.get("r-1").next_retry_at > before


def test_the_beginning_of_an_id(parked: Bridge, store: str) -> None:
    """Four characters are enough if they name one retry."""
    assert parked.store is not None
    for name in ("order-1", "order-2", "other-7"):
        parked.store.parked.park(replace(parked.retries.get("r-0"), id=name, key=name))
    assert run("retries", "run", "othe", store=store).out == "other-7: due\n"
    ran = run("retries", "cancel", "orde", "--yes", store=store)
    assert (ran.code, ran.err) == (2, "ojs-bridge: id: 'orde' begins several: order-1, order-2\n")
    assert run("retries", "cancel", "order-2", "--yes", store=store).out == "order-2: cancelled\n"


def test_none_and_unknown(store: str) -> None:
    """The command says so."""
    Bridge(store).dead_letters.stats()
    assert run("retries", "list", store=store).out == "no parked retries\n"
    ran = run("retries", "run", "nobody", store=store)
    assert (ran.code, ran.err) == (1, "nobody: there is no parked retry 'nobody'\n")
