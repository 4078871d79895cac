"""`ojs-bridge pause`, `resume` and `holds`, on a real store."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine import holds
from tests.cli.running import run, spawn
from tests.http.doors import house


def test_a_pause_is_seen_and_ends(store: str) -> None:
    bridge = Bridge(store)
    bridge.dead_letters.stats()
    assert run("holds", store=store).out == "no holds\n"
    words = ("pause", "billing.*", "--reason", "the bank is down", "--until", "PT1H")
    told = run(*words, store=store).out
    assert told.startswith("pause:type=billing.*: on until 20")
    assert run("pause", "--queue", "mail", "--error-type", "a.*", "--json", store=store).json[0]["id"] == (
        "pause:queue=mail,error_type=a.*"
    )
    [first, second] = run("holds", "--json", store=store).json
    assert (first["type"], first["why"], first["held"]) == ("billing.*", "the bank is down", 0)
    assert first["by"] == second["by"] == bridge.audit.list().records[0].who
    assert (second["queue"], second["error_type"], second["until"], second["why"]) == (
        "mail",
        "a.*",
        None,
        "",
    )
    ran = run("resume", "billing.*", "--rate", "50/s", "--reason", "it is back", store=store)
    assert ran.out == "pause:type=billing.*: over; its jobs go on, 50/s at most\n"
    assert run("resume", "--id", second["id"], store=store).code == 0
    assert run("holds", "--json", store=store).json == []
    told_of = [(r.action, r.via, r.reason) for r in bridge.audit.list().records]
    assert told_of == [
        ("hold.resume", "cli", ""),
        ("hold.resume", "cli", "it is back"),
        ("hold.pause", "cli", ""),
        ("hold.pause", "cli", "the bank is down"),
    ]


def test_held_jobs_are_counted_and_are_one_kind_of_what_waits(store: str) -> None:
    door = house(store)
    for n, kind in enumerate(("held", "held", "retry")):
        door.park(f"{kind}-{n}", kind=kind, type="billing.charge")
    run("pause", "billing.*", store=store)
    assert run("holds", "--json", store=store).json[0]["held"] == 2
    found = run("waiting", "list", "--kind", "held", "--json", store=store).json
    assert [job["id"] for job in found] == ["held-0", "held-1"]
    assert run("waiting", "cancel", "--all", "--kind", "held", "--yes", store=store).code == 0
    assert [job["id"] for job in run("waiting", "list", "--json", store=store).json] == ["retry-2"]


def test_a_pause_that_may_be_forgotten_says_so(store: str) -> None:
    bridge = Bridge(store)
    hold = bridge.pause("*", reason="a reason that is longer than a narrow terminal is wide, by far")
    assert run("holds", store=store).err == ""
    old = replace(hold, since=hold.since - timedelta(days=3, hours=4))
    assert bridge.store
    holds.write(bridge.store.documents, old)
    for columns in ("60", "80", "200"):
        ran = run("holds", store=store, COLUMNS=columns)
        assert ran.err == "pause:type=*: still on after 3 d 4 h\n"
        lines = ran.out.splitlines()
        assert len(lines) == 2
        assert all(len(line) <= int(columns) for line in lines)
        assert all(word in ran.out for word in ("held", "pause:type=*", "a reason"))


def test_a_limit_is_set_listed_and_taken_back(store: str) -> None:
    bridge = Bridge(store)
    bridge.dead_letters.stats()
    assert run("limits", store=store).out == "no limits\n"
    words = ("limit", "stripe", "--concurrency", "0", "--until", "PT1H", "--reason", "the bank is down")
    assert run(*words, store=store).out.startswith("limit:stripe: on until 20")
    assert run("limit", "bank", "--rate", "90/m", "--json", store=store).json[0]["limit_rate"] == "90/m"
    by_key = {one["key"]: one for one in run("limits", "--json", store=store).json}
    stripe, bank = by_key["stripe"], by_key["bank"]
    assert (stripe["concurrency"]["limit"], stripe["override"]["why"]) == (0, "the bank is down")
    assert (bank["key"], bank["rate"]["limit"], bank["rate"]["period"]) == ("bank", 90, "PT1M")
    shown = run("limits", store=store, COLUMNS="200").out
    assert all(text in shown for text in ("0 of 0", "90 in PT1M", ": the bank is down"))
    assert run("resume", "--id", "limit:stripe", store=store).code == 0
    assert [one["key"] for one in run("limits", "--json", store=store).json] == ["bank"]
    told_of = [(record.action, record.via, record.reason) for record in bridge.audit.list().records]
    assert told_of[::-1] == [
        ("hold.limit", "cli", "the bank is down"),
        ("hold.limit", "cli", ""),
        ("hold.resume", "cli", ""),
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["pause"],
            2,
            "type: a pause needs one of type, queue, error_type, dependency; the type '*' is every type",
        ),
        (["pause", ""], 2, "type: '' must be a name, or a pattern such as 'billing.*'"),
        (["pause", "--queue", ""], 2, "queue: '' must be the name of a queue"),
        (["pause", "a", "--until", "soon"], 2, "until: 'soon' must be a time such as"),
        (["pause", "a", "--until", "2020-01-01"], 2, "is in the past"),
        (["pause", "a", "--reason", "x" * 1001], 2, "reason: 1,001 characters; there may be 1,000 at most"),
        (["resume"], 2, "id: name a pause either by its id, or by type, queue, error_type, dependency"),
        (["resume", "a", "--id", "b"], 2, "id: name a pause either by its id, or by type"),
        (["resume", "a"], 1, "there is no pause of type 'a'; there are: pause:type=on"),
        (["resume", "--id", "a"], 1, "there is no pause of a; there are: pause:type=on"),
        (["resume", "on", "--rate", "fast"], 2, "rate: 'fast' must be a rate, such as '10/s'"),
        (["limit", "bank"], 2, "concurrency: a limit needs a rate, a concurrency, or both"),
        (["limit", "bank", "--rate", "fast"], 2, "rate: 'fast' must be a rate, such as '10/s'"),
        (["limit", "bank", "--concurrency", "-1"], 2, "concurrency: -1 must be an integer of at least 0"),
        (["waiting", "list", "--kind", "all"], 2, "kind: 'all' must be one of retry, scheduled, held"),
    ],
)
def test_what_cannot_be(words: list[str], code: int, said: str, store: str) -> None:
    """The error names the field, the value and the rule, and nothing has changed."""
    Bridge(store).pause("on")
    ran = run(*words, store=store)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("ojs-bridge: ")
    assert said in ran.err
    assert [one["id"] for one in run("holds", "--json", store=store).json] == ["pause:type=on"]


SHOP = """
from celery import Celery
from ojs_bridge import Bridge
from ojs_bridge.celery import install
app = Celery("shop", broker="memory://")
bridge = install(app, Bridge("sqlite:///shop.db"))
"""


def test_under_celery_itself(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    celery = ("celery", "-A", "shop")
    assert spawn("pause", "a.*", cwd=tmp_path, program=celery).out == "pause:type=a.*: on\n"
    told = spawn("holds", "--json", cwd=tmp_path, program=celery).out
    assert json.loads(told)["id"] == "pause:type=a.*"
    assert spawn("resume", "a.*", cwd=tmp_path, program=celery).code == 0
