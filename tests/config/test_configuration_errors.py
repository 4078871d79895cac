"""A wrong setting is named; a file of another program stops no app."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import ojs_bridge
from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy
from ojs_bridge.config import sources
from ojs_bridge.config.settings import settings_of, the_policies
from ojs_bridge.config.sources import SETTINGS
from tests.config.test_configuration import write_table

pytestmark = pytest.mark.usefixtures("unconfigured")

INVALID = [
    ("history = 9", "history: 9 must be at least 10 (spec section 10.1)"),
    ('history = "12"', "history: '12' must be at least 10"),
    ("header_budget = 1", "header_budget: 1 must be at least 8192 bytes"),
    ('reservation = "1m"', "reservation: '1m' "),
    ('park_after = "PT0S"', "park_after: 'PT0S' must be greater than zero"),
    ("fail_open = 1", "fail_open: 1 must be true or false"),
    ("park_delays = true", "park_delays: True needs a store, such as postgresql://host/shop"),
    ("release_rate = '5/s'", "release_rate: '5/s' needs a store, such as postgresql://host/shop"),
    ("store = 'sqlite:///o.db'\nrelease_rate = '5/d'", "release_rate: '5/d' must be a rate, such as '10/s'"),
    ("store = 'sqlite:///o.db'\nrelease_rate = 0", "release_rate: 0 must be between '1/h' and '1,000,000/s'"),
    ("outbox = true", "outbox: True needs a store in the database of the transactions, such as "),
    ("store = 3", "store: 3 is neither a URL such as sqlite:///ojs.db nor a store"),
    ("store = ['redis://u:s3cr@h']", "store: ['redis://***@h'] is neither a URL such as "),
    ("errors = 'x'", "errors: 'x' must map exception classes to error types"),
    ("errors = {'os.no.Such' = 'a.b'}", "errors: 'os.no.Such' cannot be imported: No module named 'os.no'"),
    (
        "errors = {'no such.Error' = 'a.b'}",
        "errors: the key 'no such.Error' must be an exception class or the ",
    ),
    ("errors = {'no.Such' = 5}", "errors: errors[no.Such]: 5 must be an error type such as "),
    ("errors = {standard = 'yes'}", "errors: standard: 'yes' must be true or false"),
    ("errors = {'os.nope' = 'a.b'}", "errors: 'os.nope' cannot be imported: "),
    ("errors = {'os.sep' = 'a.b'}", "errors: the key '/' must be an exception class"),
    ("errors = {OSError = 5}", "errors: errors[OSError]: 5 must be an error type such as "),
    ("listeners = 'a.b'", "listeners: 'a.b' must be a list of callables"),
    ("listeners = ['a..b']", "listeners: 'a..b' cannot be imported: "),
    ("listeners = ['..os.sep']", "listeners: '..os.sep' cannot be imported: "),
    ("listeners = ['os.sep']", "listeners: '/' is not callable"),
    ("listeners = [3]", "listeners: 3 is not callable"),
    ("retention = 3", "retention: 3 must be a table of max_age, max_count, queues, archive"),
    ("retention = {age = 3}", "retention: age: is not one of max_age, max_count, queues, archive"),
    ("retention = {queues = 3}", "retention: queues: 3 must be a table of max_age and max_count by queue"),
    ("retention = {queues.mail = 3}", "retention: 3 must be a table of max_age, max_count, queues, archive"),
    ("retention = {max_count = -1}", "retention: max_count: -1 must be an integer of at least 0"),
    ("redact = 'card'", "redact: 'card' cannot be imported: module 'builtins' has no attribute 'card'"),
    ("redact = 3", "redact: 3 is neither a collection of argument names nor a callable"),
    ("webhooks = 'a'", "webhooks: str must be a list of Webhooks"),
    ("webhooks = [3]", "webhooks: 3 must be a table of url, form, secret, page_url, states"),
    (
        "webhooks = [{form = 'json'}]",
        "webhooks: webhook: url: must be an http:// or https:// URL with a host",
    ),
    ("replay_rules = 'a'", "replay_rules: 'a' is not a ReplayRule"),
    ("replay_rules = [3]", "replay_rules: 3 must be a table of name, queue, type, error_type, delay, "),
    ("replay_rules = [{queue = 'a'}]", "replay_rules: replay rule: name: '' must be a name"),
    ("replay_rules = [{name = 'a', age = 3}]", "replay_rules: age: is not one of name, queue, type, "),
    ("dependencies = 'a'", "dependencies: 'a' must be a list of Dependencies"),
    ("dependencies = [3]", "dependencies: 3 must be a table of name, errors, jobs, breaker"),
    ("dependencies = [{jobs = ['a']}]", "dependencies: dependency: name: '' must be a name"),
    (
        "dependencies = [{name = 'a', concurrency = 2, jobs = {'b.*' = 3}}]",
        "dependencies: dependency 'a': jobs: 'b.*': 3 must be an integer of at least 1, and at most the "
        "concurrency, 2",
    ),
    ("dependencies = [{name = 'a', job = 'b'}]", "dependencies: job: is not one of name, errors, jobs, "),
    (
        "dependencies = [{name = 'a', errors = ['b'], breaker = {share = 2}}]",
        "dependencies: breaker: share: 2 must be a number above 0, and at most 1",
    ),
    (
        "dependencies = [{name = 'a', jobs = ['b'], budget = {least = '1/s'}}]",
        "dependencies: budget: None must be a share of first attempts, above 0 and at most 1",
    ),
    ("storage_retry = 3", "storage_retry: 3 must be a table of max_attempts, initial_interval, "),
    ("storage_retry = {tries = 3}", "storage_retry: tries: is not one of max_attempts, "),
    ("polling_retry = {jitter = 2}", "polling_retry: jitter: 2 must be a number from 0 to 1"),
    ("stoer = 3", "stoer: is not a setting; there are store, namespace, retry, policies, "),
]


@pytest.mark.parametrize(("text", "message"), INVALID)
def test_an_invalid_table(unconfigured: Path, text: str, message: str) -> None:
    """The error names file, table, key, value and rule."""
    write_table(text)
    with pytest.raises(ConfigurationError) as error:
        Bridge()
    assert str(error.value).startswith(f"pyproject.toml: tool.ojs-bridge: {message}")


INVALID_VARIABLES = [
    ("MAX_ATTEMPTS", "5", "OJS_BRIDGE_MAX_ATTEMPTS: a policy has the name OJS_BRIDGE_RETRY, in JSON"),
    ("RETRY_POLICY", "{}", "OJS_BRIDGE_RETRY_POLICY: a policy has the name OJS_BRIDGE_RETRY, in JSON"),
    ("HISTORY", "ten", "OJS_BRIDGE_HISTORY: 'ten' must be an integer"),
    ("HISTORY", "9", "OJS_BRIDGE_HISTORY: 9 must be at least 10 (spec section 10.1)"),
    ("FAIL_OPEN", "yes", "OJS_BRIDGE_FAIL_OPEN: 'yes' must be true, false, 1 or 0"),
    ("RESERVATION", "soon", "OJS_BRIDGE_RESERVATION: 'soon' "),
    ("RETENTION", "{", "OJS_BRIDGE_RETENTION: '{' is not JSON: "),
    ("ERRORS", "[1]", "OJS_BRIDGE_ERRORS: [1] must map exception classes to error types"),
    ("LISTENERS", "shop.page", "OJS_BRIDGE_LISTENERS: 'shop.page' is not JSON: "),
]


@pytest.mark.parametrize(("name", "text", "message"), INVALID_VARIABLES)
def test_an_invalid_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    """The error names the variable."""
    monkeypatch.setenv(f"OJS_BRIDGE_{name}", text)
    with pytest.raises(ConfigurationError) as error:
        Bridge()
    assert str(error.value).startswith(message)


def test_an_invalid_policy_in_a_table(unconfigured: Path) -> None:
    """The error is an InvalidRetryPolicy, with the same place before its field."""
    write_table("[tool.ojs-bridge.retry]\nmax_attempts = -1\n[tool.ojs-bridge.policies.a]\njitter = 3")
    place = "invalid retry policy: pyproject.toml: tool.ojs-bridge"
    with pytest.raises(InvalidRetryPolicy, match=f"^{place}: retry: max_attempts: -1 must be >= 0$"):
        Bridge()
    with pytest.raises(InvalidRetryPolicy, match=rf"^{place}: policies\['a'\]: jitter: 3 must be"):
        the_policies(None)


@pytest.mark.parametrize(
    "text", [None, "", "[tool.ruff]\n", "tool = 3", "{", b"\xff", "[project]\nname='ojs-bridge'"]
)
def test_a_foreign_pyproject(unconfigured: Path, text: str | bytes | None) -> None:
    """Any content is left alone."""
    if text is not None:
        (unconfigured / "pyproject.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert settings_of().history == 10


def test_a_folder_of_that_name(unconfigured: Path) -> None:
    """A pyproject.toml that cannot be read stops no app."""
    (unconfigured / "pyproject.toml").mkdir()
    assert settings_of().history == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.ojs-bridge]\nhistory = ", "pyproject.toml: is not TOML: "),
        ("[tool]\nojs-bridge = 3", "pyproject.toml: tool.ojs-bridge: 3 must be a table of settings"),
        ("[tool]\nojs-bridge = 'redis://:s@h'", "pyproject.toml: tool.ojs-bridge: 'redis://***@h' must be "),
    ],
)
def test_a_broken_table_of_our_own(unconfigured: Path, text: str, message: str) -> None:
    """A broken table of the bridge is an error."""
    (unconfigured / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigurationError) as error:
        Bridge()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ojs.toml", None, "OJS_BRIDGE_CONFIG: 'ojs.toml' cannot be read: No such file or directory"),
        ("ojs.toml", "{", "ojs.toml: is not TOML: "),
        ("ojs.toml", "[ojs-bridge]", "ojs.toml: ojs-bridge: is not a setting; there are store, "),
        ("pyproject.toml", None, "OJS_BRIDGE_CONFIG: 'pyproject.toml' cannot be read: No such file"),
        ("pyproject.toml", "{", "pyproject.toml: is not TOML: "),
    ],
)
def test_a_named_file_must_be_right(
    unconfigured: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str | None, message: str
) -> None:
    """A file that a variable names must be right."""
    if text is not None:
        (unconfigured / file).write_text(text)
    monkeypatch.setenv("OJS_BRIDGE_CONFIG", file)
    with pytest.raises(ConfigurationError) as error:
        Bridge()
    assert str(error.value).startswith(message)


def test_an_unknown_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log has one warning, with the name of the variable and without its value."""
    sources._warn_of.cache_clear()
    monkeypatch.setenv("OJS_BRIDGE_STOER", "redis://:secret@h")
    monkeypatch.setenv("OJS_BRIDGE_APP", "shop:app")
    with caplog.at_level(logging.WARNING, "ojs_bridge"):
        Bridge()
        Bridge()
    assert [record.getMessage() for record in caplog.records] == [
        "OJS_BRIDGE_STOER is not a variable that ojs-bridge knows: it has no effect"
    ]


def test_every_variable_is_known() -> None:
    """The list has each variable that the package's code names."""
    spoken = set()
    for file in Path(ojs_bridge.__file__).parent.glob("**/*.py"):
        spoken |= set(re.findall(r"OJS_BRIDGE_([A-Z_]+[A-Z])", file.read_text(encoding="utf-8")))
    assert spoken >= {"STORE", "CONFIG"}
    assert {name for name in spoken if name.lower() not in SETTINGS} <= sources._OTHERS
