"""Mistakes are refused where a task is defined, an app is set up, or a worker starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, beat, chain, group, shared_task
from celery.worker.request import Request

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy, RetryPolicy
from ojs_bridge.celery import OJSTask, install, ojs_task
from ojs_bridge.celery.installation import attach, task_policy
from ojs_bridge.celery.worker import check_app
from tests.forking import Forked, module


@pytest.fixture
def app() -> Celery:
    return Celery("defined", broker="memory://", backend="cache+memory://", set_as_current=False)


def nothing() -> None:
    """Do nothing."""


def one() -> int:
    return 1


class Retrying(Task):
    abstract = True
    autoretry_for = (OSError,)


@pytest.mark.parametrize(
    "options",
    [
        {"autoretry_for": (OSError,)},
        {"dont_autoretry_for": (OSError,)},
        {"max_retries": 3},
        {"max_retries": None},
        {"default_retry_delay": 5},
        {"retry_backoff": True},
        {"retry_backoff_max": 5},
        {"retry_jitter": False},
        {"retry_kwargs": {"max_retries": 5}},
        {"base": Retrying},
    ],
    ids=lambda options: next(iter(options)),
)
def test_celerys_own_retry_options_are_refused_with_their_translation(
    app: Celery, options: dict[str, Any]
) -> None:
    for target in (app, None):
        with pytest.raises(ConfigurationError, match=re.escape("max_attempts = max_retries + 1")):
            ojs_task(target, **options)(nothing)


def test_they_are_refused_on_the_base_class_too(app: Celery) -> None:
    class Mine(OJSTask):
        name = "mine"
        max_retries = 5

    with pytest.raises(
        ConfigurationError, match=r"task mine: max_retries .* max_attempts = max_retries \+ 1"
    ):
        app.register_task(Mine())
    with pytest.raises(ConfigurationError, match="task other: autoretry_for"):
        app.task(shared=False, base=OJSTask, name="other", autoretry_for=(OSError,), lazy=False)(nothing)


@pytest.mark.requirement("RET-03", "RET-16", "RET-19", "RET-20")
@pytest.mark.parametrize(
    "retry",
    [
        {"max_attempts": -1},
        {"backoff_coefficient": 0.5},
        {"initial_interval": "1s"},
        {"tries": 3},
        {"jitter": "yes"},
    ],
    ids=str,
)
def test_an_invalid_policy_is_refused_at_definition(app: Celery, retry: dict[str, Any]) -> None:
    with pytest.raises(InvalidRetryPolicy, match=next(iter(retry))):
        ojs_task(app, retry=retry)
    with pytest.raises(InvalidRetryPolicy, match=next(iter(retry))):
        install(app, policies={"*": retry})


@pytest.mark.parametrize("errors", [{"Nothing": "a.b"}, {OSError: ""}, {OSError: ("a.b", "NEVER")}], ids=str)
def test_an_invalid_error_map_is_refused_at_definition(app: Celery, errors: Any) -> None:
    with pytest.raises(ConfigurationError, match="errors"):
        ojs_task(app, errors=errors)


def test_it_does_not_stack_on_another_decorator(app: Celery) -> None:
    for other in (shared_task, app.task(shared=False)):
        with pytest.raises(ConfigurationError, match=r"takes the place of @app\.task and @shared_task"):
            ojs_task(app)(other(nothing))


def test_a_task_keeps_its_name_docs_and_options(app: Celery) -> None:
    task = ojs_task(app, shared=False, retry={"max_attempts": 7}, name="named", ignore_result=True)(nothing)
    assert (task.name, task.__doc__, task.ignore_result, task.acks_late) == (
        "named",
        "Do nothing.",
        True,
        True,
    )
    assert task_policy(app, task).policy.max_attempts == 7
    assert not ojs_task(app, shared=False, name="early", acks_late=False)(nothing).acks_late


def test_the_apps_own_task_class_stays_the_base() -> None:
    class Flask(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return "in context", self.run(*args, **kwargs)

    app = Celery("flask", broker="memory://", task_cls=Flask, set_as_current=False)
    bare = ojs_task(name="shared_in_context")(one)
    tasks = [ojs_task(app, shared=False, name="of_the_app")(one), app.tasks["shared_in_context"]]
    for task in tasks:
        assert isinstance(task, Flask)
        assert task.apply().get() == ("in context", 1)
        assert task() == ("in context", 1)
    assert bare.name == "shared_in_context"


@pytest.fixture(autouse=True)
def shared(shared_tasks: None) -> None:
    """Two tasks that all apps get, until the test is over."""

    @ojs_task
    def shared() -> str:
        raise OSError("shared")

    @ojs_task(retry={"max_attempts": 2}, name="shared_twice")
    def shared_twice() -> str:
        raise OSError("shared")


def test_a_shared_task_has_the_bridge_of_each_app() -> None:
    apps = [Celery(name, broker="memory://", set_as_current=False) for name in ("one", "two")]
    for number, app in enumerate(apps):
        install(app, Bridge(retry={"max_attempts": 5 + number}), policies={})
    for number, app in enumerate(apps):
        own, partial = app.tasks[f"{__name__}.shared"], app.tasks["shared_twice"]
        assert task_policy(app, own).policy.max_attempts == 5 + number
        assert task_policy(app, partial).policy.max_attempts == 2
        assert own.app is app
    late = Celery("late", broker="memory://", set_as_current=False)
    assert task_policy(late, late.tasks["shared_twice"]).policy == RetryPolicy(max_attempts=2)


def test_install_covers_tasks_of_before_and_after(app: Celery) -> None:
    class ByClass(Task):
        name = "by_class"

    class ByClassLater(Task):
        name = "by_class_later"

    early = app.task(shared=False, name="early")(nothing)
    app.register_task(ByClass())
    app.finalize()
    bridge = install(app, policies={"*y*": {"max_attempts": 8}, "shared_twice": {"max_attempts": 9}})
    late = app.task(shared=False, name="lately")(nothing)
    app.register_task(ByClassLater())
    other = app.task(shared=False, name="other")(nothing)
    for name in (early.name, late.name, "by_class", "by_class_later"):
        assert task_policy(app, app.tasks[name]).policy.max_attempts == 8, name
    assert not getattr(other, "ojs_bridged", False)
    assert task_policy(app, app.tasks["shared_twice"]).policy.max_attempts == 2  # the task's own policy wins
    assert not getattr(app.tasks["celery.chord"], "ojs_bridged", False)
    assert attach(app) is bridge
    check_app(app)


def test_install_after_a_class_based_task_still_brings_the_bridge(app: Celery) -> None:
    class Own(OJSTask):
        name = "own"

    app.register_task(Own())
    bridge = Bridge(retry={"max_attempts": 6})
    install(app, bridge, policies={})
    assert task_policy(app, app.tasks["own"]).policy.max_attempts == 6


def test_an_app_is_given_one_bridge(app: Celery) -> None:
    bridge = install(app)
    assert install(app, bridge) is bridge
    with pytest.raises(ConfigurationError, match="the Celery app 'defined' already has a bridge"):
        install(app, Bridge())


def test_a_request_class_of_the_users_is_mixed_with_ours(app: Celery) -> None:
    class Audited(Request):
        pass

    class Base(Task):
        abstract = True
        Request = Audited

    plain = ojs_task(app, shared=False, name="plain")(nothing)
    audited = ojs_task(app, shared=False, name="audited", base=Base)(nothing)
    assert plain.Request == "ojs_bridge.celery.request:OJSRequest"
    assert [cls.__name__ for cls in audited.Request.__mro__[:3]] == ["Audited", "Audited", "OJSRequest"]


#: what is wrong with a project -> what its worker says
BROKEN: dict[str, tuple[str, str]] = {
    "a pattern that names nothing": (
        "install(app, Bridge(), policies={'billing.*': {}})",
        "policies['billing.*'] names no task of the app 'broken'",
    ),
    "a class with an invalid policy": (
        "app.register_task(type('T', (OJSTask,), {'name': 'bad', 'ojs_retry': {'max_attempts': 'x'}})())",
        'task bad: max_attempts: "x" must be a non-negative integer',
    ),
    "two policies that do not fit": (
        "install(app, Bridge(retry={'initial_interval': 'PT10S'}), policies={})\n"
        "@ojs_task(app, name='short', retry={'max_interval': 'PT1S'})\ndef short(): pass",
        "task short: max_interval: PT1S must be >= initial_interval, PT10S",
    ),
    "a bad store": ("Bridge(store='nonsense')", "store: 'nonsense' is not a URL such as sqlite:///ojs.db"),
    "an unknown driver": ("Bridge(store='foo://x')", "store: 'foo://x' is not a store that ojs-bridge knows"),
    "two bridges": (
        "install(app, Bridge())\ninstall(app, Bridge())",
        "the Celery app 'broken' already has a bridge",
    ),
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit codes and logs of the workers of all broken projects, which start side by side."""
    folder = tmp_path_factory.mktemp("broken")
    head = "from celery import Celery\nfrom ojs_bridge import Bridge\nfrom ojs_bridge.celery import *\n"
    head += "app = Celery('broken', broker='memory://')\n"
    started = {}
    for number, (name, (code, _)) in enumerate(BROKEN.items()):
        (folder / f"broken{number}.py").write_text(head + code)
        words, log = ("-A", f"broken{number}", "worker", "-P", "solo"), folder / f"log{number}"
        started[name] = Forked(module, "celery", *words, env=os.environ, log=log, cwd=folder), log
    try:
        return {name: (process.wait(90), log.read_text()) for name, (process, log) in started.items()}
    finally:
        for process, _ in started.values():
            process.kill()


@pytest.mark.parametrize("name", BROKEN)
def test_a_worker_refuses_to_start_and_says_why(starts: dict[str, tuple[int, str]], name: str) -> None:
    status, output = starts[name]
    assert status != 0
    assert BROKEN[name][1] in output


def test_a_worker_without_a_store_says_what_goes(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    install(app, Bridge())
    check_app(app)
    assert "no store: the attempt of a killed worker does not count" in caplog.text


def test_the_store_may_come_from_the_environment(
    app: Celery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OJS_BRIDGE_STORE", f"sqlite:///{tmp_path}/ojs.db")
    ojs_task(app, shared=False, name="plain")(nothing)
    check_app(app)
    assert attach(app).store is not None
    assert "no store" not in caplog.text


#: Longer than the spec's default cap, and so invalid unless a layer beneath has a longer cap.
LONG = {"initial_interval": "PT10M"}
PATTERN = {"non_retryable_errors": ["*.timeout"]}


def sent(app: Celery) -> int:
    """Return the number of messages in the app's queue."""
    with app.connection_for_read() as connection:
        return int(connection.default_channel.queue_declare("celery").message_count)


#: The ways to send a job of the task `charge`.
SENDINGS: dict[str, Callable[[Celery], Any]] = {
    "delay": lambda app: app.tasks["charge"].delay(),
    "apply_async": lambda app: app.tasks["charge"].apply_async(),
    "by name": lambda app: app.send_task("charge"),
    "a signature": lambda app: app.tasks["charge"].s().apply_async(),
    "a signature by name": lambda app: app.signature("charge").apply_async(),
    "a group": lambda app: group(app.tasks["fine"].s(), app.tasks["charge"].s()).apply_async(),
    "a chain": lambda app: chain(app.tasks["fine"].si(), app.tasks["charge"].si()).apply_async(),
    "a chain by name": lambda app: chain(app.tasks["fine"].si(), app.signature("charge")).apply_async(),
    "a link": lambda app: app.tasks["fine"].apply_async(link=app.signature("charge")),
    "beat": lambda app: beat.Scheduler(app).apply_async(beat.ScheduleEntry("e", "charge", 1, app=app)),
}


def with_tasks(app: Celery, retry: Any) -> Celery:
    for name, own in (("charge", retry), ("fine", None)):
        ojs_task(app, name=name, retry=own, shared=False)(nothing)
    return app


@pytest.mark.requirement("RET-16")
@pytest.mark.parametrize("way", SENDINGS)
def test_an_invalid_policy_is_refused_before_its_job_is_sent(app: Celery, way: str) -> None:
    """Even without a bridge: there the default policy of the settings counts, and the error says so."""
    with_tasks(app, LONG)
    with pytest.raises(
        (InvalidRetryPolicy, beat.SchedulingError), match="task charge: max_interval: PT5M"
    ) as e:
        SENDINGS[way](app)
    assert "no bridge is installed here" in str(e.value)
    assert sent(app) == 0


@pytest.mark.parametrize("way", SENDINGS)
def test_a_policy_that_a_default_makes_valid_is_sent(app: Celery, way: str) -> None:
    install(app, Bridge(retry={"max_interval": "PT1H"}))
    with_tasks(app, LONG)
    SENDINGS[way](app)
    assert sent(app) >= 1


@pytest.mark.requirement("RET-16")
def test_a_policy_is_checked_whole_as_soon_as_what_it_lies_over_is_known(app: Celery) -> None:
    with pytest.raises(InvalidRetryPolicy, match="non_retryable_errors"):
        ojs_task(app, retry=PATTERN)
    with_tasks(app, LONG)
    with pytest.raises(InvalidRetryPolicy, match="task charge: max_interval: PT5M, the default"):
        install(app, Bridge())
    installed = Celery("installed", broker="memory://", set_as_current=False)
    install(installed, Bridge(), policies={"long.*": {"max_interval": "PT1H"}})
    ojs_task(installed, name="long.charge", retry=LONG, shared=False)(nothing)
    with pytest.raises(InvalidRetryPolicy, match="task charge: max_interval: PT5M, the default"):
        ojs_task(installed, name="charge", retry=LONG, shared=False)(nothing)


@pytest.mark.requirement("RET-16")
def test_an_invalid_policy_of_install_is_refused_there_or_before_a_job_is_sent(app: Celery) -> None:
    early = Celery("early", broker="memory://", set_as_current=False)
    early.task(name="charge", shared=False)(nothing)
    early.finalize()
    with pytest.raises(InvalidRetryPolicy, match="max_interval: PT5M, the default"):
        install(early, Bridge(), policies={"*": LONG})
    install(app, Bridge(), policies={"*": LONG})
    task = app.task(name="charge", shared=False)(nothing)
    with pytest.raises(InvalidRetryPolicy, match="task charge: max_interval: PT5M, the default"):
        task.delay()
    assert sent(app) == 0


def test_between_intervals_a_native_option_gives_way_to_a_policy(app: Celery) -> None:
    install(app, Bridge(), policies={"c*": {"max_interval": "PT1S"}, "l*": LONG})
    for name in ("charge", "later"):
        app.task(name=name, shared=False, default_retry_delay=180)(nothing)
    found = [task_policy(app, app.tasks[name]).policy for name in ("charge", "later")]
    waits = [(p.initial_interval.total_seconds(), p.max_interval.total_seconds()) for p in found]
    assert waits == [(1, 1), (600, 600)]


#: Options of a job that are a policy under a wrong name, and the right one.
MISNAMED: list[tuple[dict[str, Any], str]] = [
    ({"retry": {"max_attempts": 5}}, "ojs_retry={'max_attempts': 5}"),
    ({"retry_policy": {"max_attempts": 5}}, "ojs_retry={'max_attempts': 5}"),
    ({"policy": RetryPolicy(max_attempts=5)}, "ojs_retry="),
    *(({name: 5}, f"ojs_retry={{'{name}': 5}}") for name in sorted(RetryPolicy.model_fields)),
]


@pytest.mark.parametrize(("options", "right"), MISNAMED, ids=str)
def test_a_misnamed_policy_of_a_job_is_refused_by_name(app: Celery, options: Any, right: str) -> None:
    install(app, Bridge())
    task = app.task(name="charge", shared=False)(nothing)
    for send in (
        lambda: task.apply_async(**options),
        lambda: task.s().set(**options),
        lambda: task.signature(options=dict(options)),
        lambda: app.send_task("charge", **options),
        lambda: task.apply(**options),
        lambda: task.apply_async(link=app.signature("charge", options=dict(options))),
    ):
        with pytest.raises(InvalidRetryPolicy, match=re.escape(f"charge: {next(iter(options))}: ")) as caught:
            send()
        assert right in str(caught.value)
    assert sent(app) == 0


@pytest.mark.parametrize("options", [{"retry": False}, {"retry_policy": {"max_retries": 1}}], ids=str)
def test_celerys_own_options_for_publishing_are_celerys(app: Celery, options: Any) -> None:
    install(app, Bridge())
    task = app.task(name="charge", shared=False)(nothing)
    task.apply_async(**options)
    task.s().set(**options).apply_async()
    assert sent(app) == 2


@pytest.mark.parametrize("name", ["ojs_retry", "policy", "retry_policy", *sorted(RetryPolicy.model_fields)])
def test_a_misnamed_policy_of_a_task_is_refused_by_name(app: Celery, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"@ojs_task: {name}: .* retry="):
        ojs_task(app, **{name: {"max_attempts": 5}})
    with pytest.raises(ConfigurationError, match="@ojs_task: ojs_retry_on: has the name retry_on here"):
        ojs_task(app, ojs_retry_on="asked")


def test_the_ojs_retry_of_a_plain_task_is_read_or_refused(app: Celery) -> None:
    """`install` reads it, though `policies` may name other tasks; elsewhere nothing would read it."""
    for late in (False, True):
        installed = Celery(f"late-{late}", broker="memory://", set_as_current=False)
        if not late:
            install(installed, Bridge(), policies={"other": {}})
        task = installed.task(name="charge", shared=False, ojs_retry={"max_attempts": 5})(nothing)
        if late:
            install(installed, Bridge(), policies={"other": {}})
        task.delay()
        assert task_policy(installed, installed.tasks["charge"]).policy.max_attempts == 5
    ojs_task(app, name="beside", shared=False)(nothing)
    native = app.task(name="charge", shared=False, ojs_retry={"max_attempts": 5})(nothing)
    with pytest.raises(ConfigurationError, match="task charge: ojs_retry is not read without install"):
        native.delay()
    with pytest.raises(ConfigurationError, match="task charge: ojs_retry is not read without install"):
        check_app(app)


def test_what_is_no_bridge_is_refused(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match="is no Bridge; policies have the name policies="):
        install(app, {"max_attempts": 5})  # type: ignore[arg-type]
