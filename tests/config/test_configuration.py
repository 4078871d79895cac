"""The bridge finds settings in several places, in a fixed order."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import (
    Breaker,
    Bridge,
    Budget,
    Dependency,
    ReplayRule,
    Retention,
    StorageRetry,
    standard_errors,
)
from ojs_bridge.config import policies, sources
from ojs_bridge.config.settings import Settings, settings_of, the_policies
from ojs_bridge.config.sources import SETTINGS
from ojs_bridge.engine.redaction import HIDDEN
from ojs_bridge.rules.failures import ErrorMap, Failure, outcome_of
from tests.cli.running import run
from tests.lives import KEEP, live_and_die

pytestmark = pytest.mark.usefixtures("unconfigured")


def listen(event: object) -> None:
    """Hear an event."""


class Listening:
    """A listener that is made without arguments."""

    def __call__(self, event: object) -> None:
        """Hear an event."""


class Stolen(Exception):
    """A card was stolen."""


def write_table(text: str) -> None:
    """Write the table of a pyproject.toml."""
    Path("pyproject.toml").write_text("[tool.ojs-bridge]\n" + text)


def test_without_any_of_them() -> None:
    """All settings have their defaults."""
    assert settings_of() == Settings(
        store=None,
        retry=None,
        errors={},
        listeners=(),
        webhooks=(),
        dependencies=(),
        history=10,
        header_budget=16_384,
        reservation=timedelta(minutes=1),
        park_after=timedelta(minutes=1),
        park_delays=False,
        release_rate=None,
        outbox=False,
        fail_open=False,
        settle_behind=False,
        out_of_reach=timedelta(seconds=4),
        retention=Retention(),
        redact=None,
        replay_rules=(),
        storage_retry=StorageRetry(5, "PT0.1S", 2.0, "PT5S", 0.1),
        polling_retry=StorageRetry(3, "PT0.5S", 2.0, "PT10S", 0.2),
    )
    assert the_policies(None).of("anything").policies == []


NAME = __name__
WITH_QUEUES = Retention("P7D", 5, {"mail": Retention("P1D")}, "old.jsonl")
#: A setting, as a variable and in a table, and what it is then.
READ: list[tuple[str, str, str, Any]] = [
    ("retry", '{"max_attempts": 7}', "{max_attempts = 7}", {"max_attempts": 7}),
    ("history", "12", "12", 12),
    ("header_budget", "9000", "9000", 9000),
    ("reservation", "PT2M", '"PT2M"', timedelta(minutes=2)),
    ("park_after", "PT90S", '"PT90S"', timedelta(seconds=90)),
    ("park_delays", "false", "false", False),  # with a store alone it may be true
    ("outbox", "false", "false", False),  # with a store in a database alone it may be true
    ("fail_open", "true", "true", True),
    ("settle_behind", "true", "true", True),
    ("out_of_reach", "PT20S", '"PT20S"', timedelta(seconds=20)),
    ("retention", '{"max_age": "P7D"}', '{max_age = "P7D"}', Retention("P7D")),
    (
        "retention",
        '{"max_age": "P7D", "max_count": 5, "queues": {"mail": {"max_age": "P1D"}}, "archive": "old.jsonl"}',
        '{max_age = "P7D", max_count = 5, queues.mail.max_age = "P1D", archive = "old.jsonl"}',
        WITH_QUEUES,
    ),
    ("redact", '["card", "pin"]', '["card", "pin"]', ["card", "pin"]),
    ("redact", f'"{NAME}.listen"', f'"{NAME}.listen"', listen),
    (
        "replay_rules",
        '[{"name": "mail", "queue": "mail", "delay": "PT5M"}, {"name": "all", "max_replays": 2}]',
        '[{name = "mail", queue = "mail", delay = "PT5M"}, {name = "all", max_replays = 2}]',
        (ReplayRule("mail", "mail", delay="PT5M"), ReplayRule("all", max_replays=2)),
    ),
    (
        "dependencies",
        '[{"name": "bank", "errors": ["bank.*"], "jobs": ["pay"], "breaker": {"least": 5}}]',
        '[{name = "bank", errors = ["bank.*"], jobs = ["pay"], breaker.least = 5}]',
        (Dependency("bank", ["bank.*"], ["pay"], Breaker(least=5)),),
    ),
    (
        "dependencies",
        '[{"name": "a", "budget": {"share": 0.2, "least": "10/m"}}, {"name": "b", "budget": 1}]',
        '[{name = "a", budget = {share = 0.2, least = "10/m"}}, {name = "b", budget = 1}]',
        (Dependency("a", budget=Budget(0.2, "10/m")), Dependency("b", budget=Budget(1))),
    ),
    ("storage_retry", '{"max_attempts": 1}', "{max_attempts = 1}", StorageRetry(1)),
    (
        "polling_retry",
        '{"max_interval": "PT1M"}',
        '{max_interval = "PT1M"}',
        StorageRetry(3, "PT0.5S", 2.0, "PT1M", 0.2),
    ),
    ("listeners", f'["{NAME}.listen"]', f'["{NAME}.listen"]', (listen,)),
    (
        "errors",
        f'{{"TimeoutError": "external.timeout", "{NAME}.Stolen": ["card.stolen", "DEAD_LETTER"]}}',
        f'{{TimeoutError = "external.timeout", "{NAME}.Stolen" = ["card.stolen", "DEAD_LETTER"]}}',
        {TimeoutError: "external.timeout", Stolen: ("card.stolen", "DEAD_LETTER")},
    ),
]


@pytest.mark.parametrize(("name", "text", "toml", "value"), READ)
def test_a_variable_and_a_table_say_the_same(
    unconfigured: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, toml: str, value: Any
) -> None:
    """Each says it in its own words."""
    write_table(f"{name} = {toml}")
    assert getattr(settings_of(), name) == value
    (unconfigured / "pyproject.toml").unlink()
    monkeypatch.setenv(f"OJS_BRIDGE_{name.upper()}", text)
    assert getattr(settings_of(), name) == value


def test_every_setting_is_read() -> None:
    """The table above has every setting, but for those that have their own tests; a bridge has no other."""
    others = {"store", "namespace", "policies", "reliable_fetch", "release_rate", "webhooks"}
    assert {name for name, *_ in READ} == SETTINGS.keys() - others
    arguments = inspect.signature(Bridge).parameters.keys()
    assert arguments == SETTINGS.keys() - {"policies", "reliable_fetch"}


def test_a_redaction_from_a_table_counts_where_only_the_command_line_reads_it() -> None:
    write_table('store = "sqlite:///here.db"\nredact = ["0"]')
    live_and_die(Bridge(retry=KEEP), "j-1")
    ran = run("dead-letters", "show", "j-1", "--json")
    assert [letter["args"] for letter in ran.json] == [[HIDDEN]], ran.err


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("True", True), ("false", False), ("0", False)]
)
def test_booleans(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    """Deployments write booleans in several ways."""
    monkeypatch.setenv("OJS_BRIDGE_FAIL_OPEN", text)
    assert settings_of().fail_open is value


def test_code_before_a_variable_before_a_table_before_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order holds for each setting, and each counts as a whole: policies of two places are not merged."""
    write_table(
        "history = 11\nheader_budget = 9000\nretry = {jitter = false}\nlisteners = ['builtins.print']"
    )
    monkeypatch.setenv("OJS_BRIDGE_HISTORY", "12")
    monkeypatch.setenv("OJS_BRIDGE_RETRY", '{"max_attempts": 2}')
    found = settings_of(listeners=[])
    assert (found.history, found.header_budget, found.retry) == (12, 9000, {"max_attempts": 2})
    assert (found.listeners, found.reservation) == ((), timedelta(minutes=1))
    assert settings_of(history=13).history == 13


def test_policies(unconfigured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies are a table, or the path of a file; a variable is a path."""
    write_table('[tool.ojs-bridge.policies."shop.*"]\nmax_attempts = 4\n')
    assert the_policies(None).of("shop.mail").policies == [{"max_attempts": 4}]
    (unconfigured / "p.toml").write_text("max_attempts = 6")
    monkeypatch.setenv("OJS_BRIDGE_POLICIES", "p.toml")
    assert the_policies(None).of("shop.mail").policies == [{"max_attempts": 6}]
    assert the_policies({}).of("shop.mail") is None


def test_a_class_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge makes an object of the class, without arguments."""
    monkeypatch.setenv("OJS_BRIDGE_LISTENERS", f'["{NAME}.Listening"]')
    (listener,) = settings_of().listeners
    assert isinstance(listener, Listening)


def test_the_file_that_a_variable_names(unconfigured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are settings, unless it is a pyproject.toml. The working directory's file is not read."""
    write_table("history = 11")
    (unconfigured / "ojs.toml").write_text("history = 12")
    (unconfigured / "other").mkdir()
    (unconfigured / "other" / "pyproject.toml").write_text("[tool.ojs-bridge]\nhistory = 13")
    for file, history in [("ojs.toml", 12), ("other/pyproject.toml", 13)]:
        monkeypatch.setenv("OJS_BRIDGE_CONFIG", file)
        assert settings_of().history == history


def test_the_command_line_reads_it_too() -> None:
    """The command line takes the store of a table."""
    write_table('store = "sqlite:///here.db"\nnamespace = "shop"')
    live_and_die(Bridge(retry=KEEP), "j-1")
    ran = run("dead-letters", "list", "--json")
    assert [letter["id"] for letter in ran.json] == ["j-1"], ran.err
    assert run("dead-letters", "list", "--json", "--namespace", "another").json == []


DJANGO = """
    from datetime import timedelta
    from django.conf import settings
    from ojs_bridge import Bridge, ConfigurationError, ReplayRule, Retention, StorageRetry
    from ojs_bridge.config.settings import settings_of
    assert settings_of().history == 12, "not configured yet"
    settings.configure(OJS_BRIDGE={
        "history": 14,
        "park_after": None,
        "reservation": timedelta(minutes=3),
        "listeners": [print, "builtins.repr"],
        "errors": {TimeoutError: "external.timeout", "OSError": ("external.os", "FAIL")},
        "retention": Retention("P7D"),
        "replay_rules": [ReplayRule("a"), {"name": "b"}],
        "storage_retry": StorageRetry.disabled(),
        "redact": print,
    })
    found = settings_of()
    assert (found.history, found.header_budget, found.listeners) == (14, 9000, (print, repr)), found
    assert (found.park_after, found.reservation) == (timedelta(minutes=1), timedelta(minutes=3)), found
    assert found.errors == {TimeoutError: "external.timeout", OSError: ("external.os", "FAIL")}, found
    assert found.retention == Retention("P7D"), found
    assert found.replay_rules == (ReplayRule("a"), ReplayRule("b")), found
    assert (found.storage_retry, found.redact) == (StorageRetry.disabled(), print), found
    assert settings_of(history=15).history == 15
    for told, message in [
        ({"stoer": 1}, "settings.OJS_BRIDGE: stoer: is not a setting; there are store, "),
        ({"history": 9}, "settings.OJS_BRIDGE: history: 9 must be at least 10 (spec section 10.1)"),
        ([], "settings.OJS_BRIDGE: [] must be a table of settings"),
    ]:
        settings.OJS_BRIDGE = told
        try:
            Bridge()
        except ConfigurationError as error:
            assert str(error).startswith(message), error
        else:
            raise AssertionError(told)
    del settings.OJS_BRIDGE
    assert settings_of().history == 12, "no such setting"
    print("done")
"""


def test_django() -> None:
    """Code wins over Django's settings, and these over a variable; None counts as absent."""
    pytest.importorskip("django")
    environment = {**os.environ, "OJS_BRIDGE_HISTORY": "12", "OJS_BRIDGE_HEADER_BUDGET": "9000"}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DJANGO)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


def test_django_is_not_imported() -> None:
    """The bridge does not import Django where the program has not."""
    code = "import sys, ojs_bridge; ojs_bridge.Bridge(); print('django' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


EMPTY = (None, {}, ())
DOCS = Path(__file__).parents[2] / "docs"
FRAMEWORKS = "".join((DOCS / "how-to" / f"{name}.md").read_text("utf-8") for name in ("django", "flask"))
DOCUMENTED = (DOCS / "reference" / "settings.md").read_text("utf-8")


def test_what_the_document_shows() -> None:
    """The keys that the page shows are settings."""
    [table] = re.findall(r"^```toml\n(.+?)```", FRAMEWORKS, re.MULTILINE | re.DOTALL)
    shown = [*re.findall(r"^OJS_BRIDGE = (\{.*?\})$", FRAMEWORKS, re.MULTILINE | re.DOTALL)]
    assert len(shown) == 3
    for told in (*map(ast.literal_eval, shown), policies.tomllib.loads(table)["tool"]["ojs-bridge"]):
        assert told.keys() <= SETTINGS.keys()


def test_the_documented_variables() -> None:
    """The page names every variable that is no setting; the settings on it are made from the code."""
    others = DOCUMENTED.partition("## Variables that are no settings")[2]
    assert set(re.findall(r"OJS_BRIDGE_(\w+)", others)) == sources._OTHERS


def test_the_standard_errors_by_name(unconfigured: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One's own entries win, and a class of a package that is not installed is a line in the log."""
    write_table(
        "errors = {standard = true, TimeoutError = 'shop.slow', 'no_such.Busy' = ['shop.busy', 'SNOOZE']}"
    )
    errors = settings_of().errors
    assert errors == {**standard_errors(), TimeoutError: "shop.slow", "no_such.Busy": ("shop.busy", "SNOOZE")}
    assert failure_type(TimeoutError(), errors) == "shop.slow"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("errors: 'no_such.Busy': package no_such is not installed: no error has this class")
    write_table("errors = {standard = false}")
    assert settings_of().errors == {}


def failure_type(error: BaseException, errors: Any) -> str:
    failure = outcome_of(error, ErrorMap(errors))
    assert isinstance(failure, Failure)
    return failure.type
