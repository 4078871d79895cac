"""`ojs-bridge now` and `ojs-bridge rates`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from ojs_bridge.operations import now
from tests.cli.running import environment, run
from tests.operations.test_now import died, lives
from tests.operations.test_operating import bury
from tests.servers import eventually
from tests.store.test_rates import record
from tests.store.test_store import entry


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no slow store."""
    monkeypatch.setattr(now, "SECONDS", 60.0)


def bleeding(store: str) -> Bridge:
    """A fleet whose jobs die, and that holds others."""
    bridge = Bridge(store)
    assert bridge.store is not None
    at = bridge.engine.now()
    lives(bridge.store, at)
    record(bridge.store, died("billing.charge", dict.fromkeys(range(1, 6), 75), at))
    record(bridge.store, died("billing.charge", dict.fromkeys(range(1, 6), 5), at, "completed"))
    failed = (entry(1, type="external.down", message="bank answered 503"),)
    bury(bridge, "j-1", type="billing.charge", errors=failed, discarded_at=at - timedelta(seconds=5))
    bridge.pause("mail.*", reason="ledger")
    return bridge


def test_it_says_in_one_sentence_whether_it_is_bad(store: str) -> None:
    """The exit code says it, too; JSON is that of the API."""
    bleeding(store)
    told = run("now", store=store)
    first, why, *rest = told.out.splitlines()
    assert told.code == 1
    assert first.startswith("BAD   billing.charge: ")
    assert " UTC: bank answered 503." in first
    assert why.strip().startswith("In the last minutes ")
    shown = "\n".join(rest)
    for words in ("deaths a minute", "0 parked retries", "a (outbox) 1", "dead letters"):
        assert words in shown
    (answered,) = run("now", "--json", store=store).json
    assert (answered["verdict"]["level"], answered["verdict"]["about"]["type"]) == ("bad", "billing.charge")


def test_all_is_well(store: str) -> None:
    bridge = Bridge(store)
    assert bridge.store is not None
    lives(bridge.store, bridge.engine.now())
    told = run("now", store=store)
    assert (told.code, told.out.splitlines()[0]) == (0, "WELL  All is well. No job ran in the last hour.")


def test_a_store_that_is_away(tmp_path: Path) -> None:
    """There is one sentence, and the exit code of the commands that cannot reach it."""
    told = run("now", store="redis://127.0.0.1:1/0")
    assert told.code == 3
    assert told.out.startswith("AWAY  The store is away since ")
    assert "dead letters" not in told.out


def test_it_is_watched_until_ctrl_c(store: str, tmp_path: Path) -> None:
    """In a pipe each answer follows the one before, as one line of JSON."""
    bleeding(store)
    command = [sys.executable, "-m", "ojs_bridge", "now", "--watch", "--json", "--store", store]
    with (
        (tmp_path / "out").open("w") as out,
        subprocess.Popen(command, stdout=out, env=environment()) as watching,
    ):
        try:
            eventually(
                lambda: (tmp_path / "out").read_text().count("\n") >= 2, seconds=90, what="two answers"
            )
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert answers[0]["at"] < answers[1]["at"]


def test_rates(store: str) -> None:
    """Each type has its numbers; what the time leaves out is not among them."""
    bridge = bleeding(store)
    assert bridge.store is not None
    at = bridge.engine.now()
    record(bridge.store, died("mail.send", {1: 7, 90: 1000}, at, "completed"))
    told = run("rates", store=store)
    rows = {words[0]: words[1:] for line in told.out.splitlines() if (words := line.split())}
    assert rows["billing.charge"][:4] == ["400", "25", "0", "375"]
    assert rows["mail.send"][:2] == ["7", "7"]
    assert "mail.send" not in run("rates", "--type", "billing.*", store=store).out
    assert (
        run("rates", "--since", "2h", "--type", "mail.send", "--json", store=store).json[0]["step_seconds"]
        == 60
    )
    assert run("rates", "--type", "none", store=store).out == "no runs\n"
    assert run("rates", "--since", "soon", store=store).code == 2
    turned = run("rates", "--since", "1h", "--until", "2h", store=store)
    assert (turned.code, turned.err.startswith("ojs-bridge: since: ")) == (2, True)


def test_a_report_of_an_incident(store: str) -> None:
    """It is Markdown, in which no text of a job is any; it has what died, the numbers, and who did what."""
    bridge = bleeding(store)
    assert bridge.store is not None
    at = bridge.engine.now()
    evil = (entry(1, type="app.Error", message="<b>|` bad\n| row"),)
    bury(bridge, "j-2", type="mail.send", errors=evil, discarded_at=at - timedelta(seconds=5))
    record(bridge.store, died("mail.send", {2: 4}, at, "recovered"))
    record(bridge.store, died("mail.send", {2: 3}, at, "replay_completed"))
    bridge.marks.add("v42", at=at - timedelta(minutes=6))
    told = run("report", "--since", "1h", store=store)
    assert told.code == 0
    for line in (
        "- 375 jobs died",
        "- 4 jobs succeeded after a failure",
        "- 3 replayed jobs succeeded",
        "| billing.charge | 375 | 0 | 0 | 25 | 0 | 0 |",
    ):
        assert line in told.out.splitlines()
    assert "| 1 | billing.charge | external.down: bank answered 503 |" in told.out
    assert r"app.Error: \<b\>\|\` bad |" in told.out
    assert "| mark v42 |" in told.out
    assert "| hold.pause | hold pause:type=mail.\\*, (ledger) | done |" in told.out
    (report,) = run("report", "--json", store=store).json
    assert (report["totals"]["died"], len(report["errors"])) == (375, 2)
    refused = run("report", "--since", "1h", "--until", "2h", store=store)
    assert (refused.code, "since: " in refused.err) == (2, True)
    empty = run("report", "--since", "3d", "--until", "2d", store=store).out
    assert "No dead letter of this time is there." in empty
    assert "Nobody did anything." in empty
