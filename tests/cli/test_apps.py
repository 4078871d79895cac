"""Commands with an app: real Celery apps and Dramatiq brokers, on a real Valkey."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import redis

from ojs_bridge import Bridge
from ojs_bridge.store import Letter
from tests.cli.running import Ran, spawn, spawn_all
from tests.store.test_store import letter

NO_BROKER = "redis://127.0.0.1:1/0"
CELERY = """
import os
from celery import Celery
from ojs_bridge import Bridge, Retention
from ojs_bridge.celery import install

print("an app may print")
app = Celery("shop", broker=os.environ["BROKER_URL"])
def heard(event):
    with open("heard", "a") as file:
        file.write(f"{event.type}\\n")

install(app, Bridge("sqlite:///ojs.db", listeners=[heard], redact=["card"], retention=Retention("P7D", 3)))

@app.task(name="charge", shared=False)
def charge(order, card=None):
    pass
"""
DRAMATIQ = """
import os
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install

broker = RedisBroker(url=os.environ["BROKER_URL"])
install(broker, Bridge("sqlite:///ojs.db"))
dramatiq.set_broker(broker)

@dramatiq.actor
def charge(order):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an app of each framework, a package, and modules that are wrong in some way."""
    files = {
        "shop.py": CELERY,
        "actors.py": DRAMATIQ,
        "proj/__init__.py": "",
        "proj/celery.py": CELERY,
        "broken.py": "\nimport nothing_of_the_sort",
        "wrong.py": "from ojs_bridge import Bridge\nBridge(retry={'max_attempts': -1})",
        "quits.py": "raise SystemExit('no settings')",
        "plain.py": "",
        "half/__init__.py": "",
        "half/celery.py": "1 / 0",
        "bare.py": "from celery import Celery\napp = Celery('bare')",
        "stock.py": "import dramatiq\nfrom dramatiq.brokers.stub import StubBroker\nbroker = StubBroker()",
        "storeless.py": CELERY.replace('"sqlite:///ojs.db", ', "").replace("charge", "pay"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def bury(folder: Path, letter_id: str, framework: str, message: dict[str, Any], **fields: Any) -> Letter:
    """Bury a letter in the folder's store, a minute old."""
    bridge = Bridge(f"sqlite:///{folder}/ojs.db")
    assert bridge.store is not None
    at = bridge.engine.now() - timedelta(minutes=1)
    known = {"type": "charge", "framework": framework, "message": message, "discarded_at": at, **fields}
    found = letter(letter_id, **known)
    bridge.store.letters.bury(found)
    return found


def celery_message(letter_id: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A message as the Celery adapter keeps it."""
    return {
        "body": json.dumps(
            [args, kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
        ),
        "body_encoding": "utf-8",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"id": letter_id, "task": "charge", "lang": "py", "retries": 2},
        "properties": {"correlation_id": letter_id},
        "exchange": "",
        "routing_key": "celery",
        "queue": "celery",
    }


def dramatiq_message(letter_id: str, *args: Any) -> dict[str, Any]:
    """A message as the Dramatiq adapter keeps it."""
    told = {"queue_name": "default", "actor_name": "charge", "args": args, "kwargs": {}, "options": {},
            "message_id": letter_id, "message_timestamp": 1}  # fmt: skip
    return {"encoded": json.dumps(told), "encoding": "utf-8"}


def dead_letters(folder: Path, broker_url: str, *words: str) -> Ran:
    """Run one of the commands on dead letters."""
    return spawn("dead-letters", *words, cwd=folder, BROKER_URL=broker_url)


def left(folder: Path) -> int:
    """Return how many dead letters there are."""
    return Bridge(f"sqlite:///{folder}/ojs.db").dead_letters.stats().total


def test_a_replay_on_celery(folder: Path, valkey_url: str) -> None:
    """The replay has changes, and goes through the app's broker; the app's output stays out of the answer."""
    bury(folder, "j-1", "celery", celery_message("j-1", 7, card="4111"))
    changed = ("--set-queue", "slow", "--args", "[8]", "--kwargs", "{}", "--policy", '{"max_attempts": 9}')
    ran = dead_letters(folder, valkey_url, "replay", "j-1", "--app", "shop:app", "--json", *changed)
    assert (ran.code, ran.json) == (0, [{"id": "j-1", "replayed": True}])
    assert "an app may print" in ran.err
    with redis.Redis.from_url(valkey_url) as client:
        [raw] = client.lrange("slow", 0, -1)
    message = json.loads(raw)
    assert json.loads(base64.b64decode(message["body"]))[:2] == [[8], {}]
    assert (message["headers"]["id"], message["headers"]["retries"]) == ("j-1", 0)
    assert json.loads(message["headers"]["ojs"])["retry"] == {"max_attempts": 9}
    assert left(folder) == 0
    assert (folder / "heard").read_text() == "dead_letter.retried\noperator.action\n"


def test_a_replay_of_all_with_edits(folder: Path, valkey_url: str) -> None:
    """A dry run and the question show letters before and after; what cannot be edited stays."""
    for n in range(2):
        bury(folder, f"j-{n}", "celery", celery_message(f"j-{n}", n, zip=n, card="4111"))
    bury(folder, "j-2", "celery", celery_message("j-2", 2, zip=2, code=3))
    words = ("replay", "--all", "--app", "shop:app", "--set", 'country="CH"', "--rename", "zip=code")
    edits = (*words, "--remove", "card")
    told = dead_letters(folder, valkey_url, *edits, "--dry-run").out
    assert all(part in told for part in ('{"args": [0], "kwargs": {"code": 0, "country": "CH"}}', "already"))
    ran = dead_letters(folder, valkey_url, *edits, "--yes")
    assert (ran.code, "2 dead letters replayed (2 not begun), 1 stayed" in ran.out) == (1, True), ran.err
    with redis.Redis.from_url(valkey_url) as client:
        raws = client.lrange("celery", 0, -1)
    sent = [json.loads(base64.b64decode(json.loads(raw)["body"]))[:2] for raw in raws]
    assert sorted(sent) == [[[n], {"code": n, "country": "CH"}] for n in range(2)]
    assert left(folder) == 1
    for word in ("country", 'country={"', "=1"):
        refused = dead_letters(folder, valkey_url, "replay", "--all", "--set", word)
        assert (refused.code, refused.err.startswith("ojs-bridge: set: ")) == (2, True)
    refused = dead_letters(folder, valkey_url, "replay", "--all", "--set", "country=CH")
    assert """set: country: 'CH' is not JSON, in which a text has quotes, as '"CH"': """ in refused.err


def test_a_replay_on_dramatiq(folder: Path, valkey_url: str) -> None:
    """Many letters are replayed at once; the letter whose actor is gone stays, and the output names it."""
    for n in range(3):
        bury(folder, f"j-{n}", "dramatiq", dramatiq_message(f"j-{n}", n))
    bury(folder, "old", "dramatiq", dramatiq_message("old"), type="gone")
    words = ("replay", "--all", "--app", "actors", "--rate", "100")
    refused = dead_letters(folder, valkey_url, *words)
    assert (refused.code, refused.out) == (2, "")
    assert "Replay 4 dead letters from the store of actors? There is no terminal" in refused.err
    stays = "1 dead letter of type 'gone' would stay: this app does not know it"
    assert stays in refused.err
    looked = dead_letters(folder, valkey_url, *words[:-2], "--dry-run")
    assert (looked.code, looked.err.strip()) == (1, stays)
    ran = dead_letters(folder, valkey_url, *words, "--yes")
    assert ran.code == 1
    assert ran.out.startswith("3 dead letters replayed (3 not begun), 1 stayed\n")
    assert "which dramatiq here does not know" in ran.out
    with redis.Redis.from_url(valkey_url) as client:
        assert client.llen("dramatiq:default") == 3
        told = [json.loads(raw) for raw in client.hvals("dramatiq:default.msgs")]
    assert sorted(message["args"] for message in told) == [[0], [1], [2]]
    assert left(folder) == 1


def test_a_fleet_of_both_frameworks(folder: Path, valkey_url: str) -> None:
    """An app of each is given: each letter is replayed by its own; two of one framework are refused."""
    bury(folder, "c-1", "celery", celery_message("c-1", 7))
    bury(folder, "d-1", "dramatiq", dramatiq_message("d-1", 7))
    both = ("--app", "shop:app", "--app", "actors")
    ran = dead_letters(folder, valkey_url, "replay", "c-1", "d-1", *both)
    assert (ran.code, left(folder)) == (0, 0), ran.err
    told = spawn("now", "--json", *both, cwd=folder, BROKER_URL=valkey_url)
    queues = {(queue["framework"], queue["queue"]): queue["depth"] for queue in told.json[0]["queues"]}
    assert (queues["celery", "celery"], queues["dramatiq", "default"]) == (1, 1)
    twice = dead_letters(folder, valkey_url, "stats", "--app", "shop:app", "--app", "proj")
    assert (twice.code, "already serves another celery app" in twice.err) == (2, True)


def test_under_celery_itself(folder: Path, valkey_url: str) -> None:
    """`celery -A proj dead-letters` has the app's own bridge, with its retention."""
    for n in range(4):
        bury(folder, f"j-{n}", "celery", celery_message(f"j-{n}", n))

    def celery(*words: str) -> Ran:
        return spawn(
            *words, cwd=folder, program=("celery", "-A", "proj", "dead-letters"), BROKER_URL=valkey_url
        )

    stats = celery("stats", "--json")
    told = json.loads(stats.out.splitlines()[-1])
    assert (stats.code, told["total"], told["retention"]["max_age"]) == (0, 4, "P7D")
    in_words = celery("stats").out
    assert "max age: P7D" in in_words and "{" not in in_words
    assert "1 dead letter pruned" in celery("prune", "--yes").out
    assert left(folder) == 3
    assert "fullness: all 133% of the most letters, when they were last pruned" in celery("stats").out
    words = ("celery", "-A", "proj", "retries")
    assert "no parked retries" in spawn("list", cwd=folder, program=words, BROKER_URL=valkey_url).out


NAMES = ["shop", "shop:app", "shop.app", "proj", "proj.celery", "proj.celery:app", "actors", "actors:broker"]


def test_how_the_frameworks_write_an_app(folder: Path) -> None:
    """Each way of writing finds the app's own bridge."""
    lines = [("dead-letters", "stats", "--json", "--app", name) for name in NAMES]
    for name, ran in zip(NAMES, spawn_all(*lines, cwd=folder, BROKER_URL=NO_BROKER), strict=True):
        assert ran.code == 0, name
        assert ran.json[0]["retention"]["max_age"] == ("P180D" if "actors" in name else "P7D")


def test_an_app_that_will_not_do(folder: Path) -> None:
    """The error is one clear line."""
    cases = {
        "nowhere": "app: 'nowhere' cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
        "broken": "ModuleNotFoundError: No module named 'nothing_of_the_sort' (module broken, broken.py:2)",
        "wrong": "InvalidRetryPolicy: max_attempts: -1 must be >= 0 (module wrong, wrong.py:2)",
        "quits": "app: 'quits' cannot be imported: SystemExit: no settings (module quits, quits.py:1)",
        "half": "ZeroDivisionError: division by zero (module half.celery, half/celery.py:1)",
        "plain": "app: 'plain' holds neither a Celery app nor a Dramatiq broker",
        "shop:nope": "app: 'shop:nope' ",
        "actors:nope": "Module 'actors' does not define a 'nope' variable",
        "bare": "app: the Celery app 'bare' has no bridge: call ojs_bridge.celery.install(app, bridge), or",
        "stock:broker": " has no bridge: add the middleware OJSRetries to it",
        "storeless --store sqlite:///a.db": "give it Bridge(store='sqlite:///a.db'), or set",
        "shop --store sqlite:///a.db": "store: the app's bridge has its own: leave --store out",
        "shop --namespace x": "namespace: the app's bridge has its own: leave --namespace out",
    }
    lines = [("dead-letters", "stats", "--app", *words.split()) for words in cases]
    ran = spawn_all(*lines, cwd=folder, BROKER_URL=NO_BROKER)
    for told, one in zip(cases.values(), ran, strict=True):
        assert (one.code, one.out) == (2, ""), told
        assert told in one.err
        assert one.err.replace("an app may print\n", "").count("\n") == 1, one.err


def test_a_broker_that_is_down(folder: Path) -> None:
    bury(folder, "c-1", "celery", celery_message("c-1", 7))
    bury(folder, "d-1", "dramatiq", dramatiq_message("d-1", 7))
    lines = [("c-1", "--app", "shop"), ("d-1", "--app", "actors")]
    for ran in spawn_all(
        *(("dead-letters", "replay", *line) for line in lines), cwd=folder, BROKER_URL=NO_BROKER
    ):
        assert (ran.code, ran.out) == (3, "")
        assert "the broker cannot be reached, and what was not sent stays: " in ran.err
        assert ran.err.count("\n") <= 2
    assert left(folder) == 2


def test_the_redaction_of_an_app(folder: Path) -> None:
    """The command hides the same arguments; an import of such an export is refused."""
    bury(folder, "j-1", "celery", celery_message("j-1", 7, card="4111-1111"))
    lines = [("show", "j-1"), ("list", "--json"), ("export", "kept.jsonl"), ("import", "kept.jsonl", "--yes")]
    words = [("dead-letters", *line, "--app", "shop") for line in lines]
    shown, listed, exported, imported = spawn_all(*words, cwd=folder, BROKER_URL=NO_BROKER)
    assert exported.err == (
        "the app redacts its letters, and these lines cannot be imported: --raw writes them whole\n"
    )
    told = shown.out + listed.out + (folder / "kept.jsonl").read_text()
    assert told.count("[redacted]") == 3
    assert "4111" not in told
    assert imported.code == 2
    assert imported.err == (
        "ojs-bridge: line 1: dead letter 'j-1' was redacted, and has no message any more\n"
    )


def test_a_raw_export_of_an_app_that_redacts(folder: Path) -> None:
    """It can be imported again; the audit has it, and a text is not searched in what is redacted."""
    bury(folder, "j-1", "celery", celery_message("j-1", 7, card="4111-1111"))
    raw, back = ("export", "raw.jsonl", "--raw"), ("import", "raw.jsonl", "--yes")
    words = [("dead-letters", *line, "--app", "shop") for line in (raw, back, (*raw[::2], "--text", "4111"))]
    exported, imported, hidden = spawn_all(*words, cwd=folder, BROKER_URL=NO_BROKER)
    assert (exported.code, "--raw" in exported.err, hidden.out) == (0, False, "")
    assert "4111-1111" in (folder / "raw.jsonl").read_text()
    assert (imported.code, imported.out) == (0, "1 dead letter imported\n")
    records = Bridge(f"sqlite:///{folder}/ojs.db").audit.list(action="dead_letter.export").records
    assert [record.subject for record in records] == [{"filter": ANY, "raw": True}] * 2


def test_bad_changes(folder: Path) -> None:
    """The error names the field, the value and the rule."""
    bury(folder, "j-1", "celery", celery_message("j-1", 7))
    cases = {
        ("--args", "[1"): "args: '[1' is not JSON: ",
        ("--args", "7"): "args: 7 must be a list",
        ("--kwargs", "[]"): "kwargs: [] must be an object",
        ("--meta", '{"id": 1}'): "meta: 'id' is the bridge's or the framework's own",
        ("--policy", '{"max_attempts": -1}'): "policy: max_attempts: -1 must be >= 0",
    }
    lines = [("dead-letters", "replay", "j-1", "--app", "shop", *change) for change in cases]
    for told, ran in zip(cases.values(), spawn_all(*lines, cwd=folder, BROKER_URL=NO_BROKER), strict=True):
        assert ran.code == 2
        assert told in ran.err
    assert left(folder) == 1
