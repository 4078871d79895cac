"""`install` and `OJSRetries` read policies from a file, and refuse a wrong one."""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy, celery
from ojs_bridge.celery.installation import is_bridged, task_policy
from ojs_bridge.cli.plan import write
from ojs_bridge.config.policies import Policies, load
from ojs_bridge.config.settings import the_policies
from ojs_bridge.dramatiq import OJSRetries, install
from ojs_bridge.migration.plan import Open, Planned
from tests.cli.running import run

SHOP = """
[default]
max_attempts = 5
on_exhaustion = "dead_letter"

[policies."shop.*"]
max_interval = "PT1M"

[policies."shop.mail"]
max_attempts = 8
"""
DEFAULT = {"max_attempts": 5, "on_exhaustion": "dead_letter"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OJS_BRIDGE_POLICIES", raising=False)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A file of policies."""
    file = tmp_path / "shop.toml"
    file.write_text(SHOP)
    return file


def test_a_table_of_policies(shop: Path) -> None:
    """Later patterns win over earlier ones, and all of them over the file's default."""
    policies = load(shop)
    assert policies.of("shop.mail").policies == [DEFAULT, {"max_interval": "PT1M"}, {"max_attempts": 8}]
    assert policies.of("shop.charge").policies == [DEFAULT, {"max_interval": "PT1M"}]
    assert policies.of("bank.charge") is None


@pytest.mark.parametrize("text", ['{"max_attempts": 5}', '{"default": {"max_attempts": 5}}'])
def test_a_file_without_a_table(tmp_path: Path, text: str) -> None:
    """The file has one policy, for every name."""
    (tmp_path / "p.json").write_text(text)
    policies = load(str(tmp_path / "p.json"))
    assert policies.of("anything").policies == [{"max_attempts": 5}]
    policies.check([], "task")


EMPTY = {
    "p.toml": [
        "",
        "[policies]\n",
        "# job is left out, since what it does is not known:\n",
        "[default]\n[policies]",
    ],
    "p.json": ["{}", '{"policies": {}}', '{"default": {"max_attempts": 9}, "policies": {}}'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in EMPTY.items() for text in texts])
def test_a_file_that_names_no_task_moves_none(tmp_path: Path, name: str, text: str) -> None:
    """As an empty mapping, in every place that reads a file."""
    file = tmp_path / name
    file.write_text(text)
    assert load(file).of("anything") is None
    app = Celery("moved", broker="memory://", set_as_current=False)
    app.task(shared=False, name="job")(test_an_invalid_policy)
    celery.install(app, Bridge(), policies=file)
    assert not is_bridged(app.tasks["job"])
    broker = StubBroker()
    retries = install(broker, Bridge(), policies=str(file))
    declared = dramatiq.actor(test_an_invalid_policy, broker=broker, actor_name="job")
    assert retries.actors.tasks[declared.actor_name] is None
    ran = run("policy", "check", str(file))
    assert (ran.code, "OK" in ran.out) == (0, True)


def test_a_plan_of_a_fleet_of_which_nothing_is_known(tmp_path: Path) -> None:
    """The file that it writes moves no task."""
    file = tmp_path / "plan.toml"
    why = (Open("shop.py:3", "a helper may retry"),)
    write(str(file), "shop:app", [Planned("shop.a", open=why), Planned("shop.b", open=why)])
    policies = load(file)
    assert (policies.of("shop.a"), policies.of("anything")) == (None, None)
    added = Planned("shop.a", policy={"max_attempts": 4})
    write(str(file), "shop:app", [added])
    assert (load(file).of("shop.a").policies, load(file).of("shop.b")) == ([{"max_attempts": 4}], None)


def test_a_pattern_that_names_nothing(shop: Path) -> None:
    """The error names the file."""
    with pytest.raises(ConfigurationError) as error:
        load(shop).check(["shop.mail.x"], "task of the app 'a'")
    assert str(error.value) == f"{shop}: policies['shop.mail'] names no task of the app 'a'"


INVALID = [
    ('[policies."a.*"]\nmax_attempts = -1', "policies['a.*']: max_attempts: -1 must be >= 0"),
    (
        '[default]\non_exhaustion = "x"',
        "default: on_exhaustion: \"x\" must be one of 'discard' or 'dead_letter'",
    ),
    ("max_atempts = 1", "policy: max_atempts: 1 is not a field of a retry policy"),
    ("[policies.a]\n[other]", "other: must stand in [default], or in [policies] under its name"),
    ("policies = 3", "policies: must be a table of partial policies"),
    (
        '[policies.a]\ninitial_interval = "PT10M"',
        "policies['a']: max_interval: PT5M, the default, must be >= initial_interval, PT10M",
    ),
]


@pytest.mark.parametrize(("text", "problem"), INVALID)
def test_an_invalid_policy(tmp_path: Path, text: str, problem: str) -> None:
    """The error names file, table, field, value and rule, in the words of `ojs-bridge policy check`."""
    file = tmp_path / "p.toml"
    file.write_text(text)
    with pytest.raises(InvalidRetryPolicy) as error:
        load(file)
    assert error.value.problems == (f"{file}: {problem}",)
    ran = run("policy", "check", str(file))
    assert (ran.code, problem in ran.out + ran.err) == (1, True)


UNREADABLE = [
    ("p.toml", None, "cannot be read: No such file or directory"),
    ("p.toml", "{", "is not TOML: "),
    ("p.json", "{", "is not JSON: "),
    ("p.json", "[1]", "must hold an object: a policy, or `default` and `policies`"),
    ("p.yaml", "", "must end in .toml or .json"),
]


@pytest.mark.parametrize(("name", "text", "problem"), UNREADABLE)
def test_an_unreadable_file(tmp_path: Path, name: str, text: str | None, problem: str) -> None:
    """The error names the file."""
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        load(file)
    assert str(error.value).startswith(f"policies: {str(file)!r} {problem}")


def test_what_check_calls_ok_is_loaded(shop: Path) -> None:
    """The loaded policies are the same, name by name."""
    assert run("policy", "check", str(shop)).out.splitlines() == [
        "default: OK",
        "policies['shop.*']: OK",
        "policies['shop.mail']: OK",
    ]


@pytest.mark.parametrize("kind", [str, Path])
def test_celery(shop: Path, kind: type[str | os.PathLike[str]]) -> None:
    """The argument is a path, of either type."""
    app = Celery("shop", set_as_current=False)
    celery.install(app, Bridge(), policies=kind(shop))

    @app.task(name="shop.charge", max_retries=1, shared=False)
    def charge() -> None:
        """Do nothing."""

    @app.task(name="bank.charge", shared=False)
    def other() -> None:
        """Do nothing."""

    policy = task_policy(app, app.tasks["shop.charge"]).policy
    assert (policy.max_attempts, policy.on_exhaustion) == (5, "dead_letter")
    assert not is_bridged(app.tasks["bank.charge"])


def test_dramatiq(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is read from the environment; an argument in code wins over it."""
    monkeypatch.setenv("OJS_BRIDGE_POLICIES", str(shop))
    for given, attempts in [(None, 8), ({"shop.mail": {"max_attempts": 2}}, 2)]:
        broker = StubBroker()
        middleware = install(broker, Bridge(), policies=given)
        middleware.actors.declare(actor(broker, "shop.mail"))
        task = middleware.actors.tasks["shop.mail"]
        assert task is not None
        assert task.policy.max_attempts == attempts


def actor(broker: StubBroker, name: str) -> object:
    """Declare an actor that does nothing."""
    import dramatiq

    return dramatiq.actor(lambda: None, actor_name=name, broker=broker)


def test_an_invalid_file_stops_both_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes where the app or broker is set up."""
    monkeypatch.setenv("OJS_BRIDGE_POLICIES", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigurationError, match=r"^OJS_BRIDGE_POLICIES: '.+absent\.toml' cannot be read"):
        celery.install(Celery("shop", set_as_current=False), Bridge())
    with pytest.raises(ConfigurationError, match="cannot be read"):
        OJSRetries(Bridge())


def test_an_invalid_argument() -> None:
    """The argument is neither a mapping nor a path."""
    with pytest.raises(ConfigurationError) as error:
        the_policies(7)  # type: ignore[arg-type]
    assert str(error.value).startswith("policies: 7 must map names to partial policies, or be a file of them")
    assert isinstance(the_policies({}), Policies)


def test_an_entry_says_how_its_tasks_are_acknowledged(tmp_path: Path) -> None:
    """It stands beside the policy; the last pattern wins, and only tasks have it."""
    file = tmp_path / "p.toml"
    file.write_text('[default]\nacks_late = true\n[policies."a.*"]\n[policies."a.b"]\nacks_late = false\n')
    policies = load(file)
    found = [installed and installed.acks_late for installed in map(policies.of, ("a.c", "a.b", "c"))]
    assert found == [True, False, None]
    policies.check(["a.b", "a.c"], "task")
    broker = StubBroker()
    broker.add_middleware(OJSRetries(Bridge(), policies=file))
    with pytest.raises(ConfigurationError, match="acks_late is an option of Celery's tasks alone"):
        broker.emit_before("worker_boot", None)
    file.write_text('[policies."a.*"]\nacks_late = "yes"\n')
    with pytest.raises(InvalidRetryPolicy, match="acks_late: 'yes' must be a boolean"):
        load(file)
