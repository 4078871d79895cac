"""The bridge leaves alone what Celery's users do to an app and its tasks."""

from __future__ import annotations

import functools
import inspect
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import celery
import pytest
from celery import Celery, Task
from celery.events.event import get_exchange
from celery.signals import task_postrun
from kombu import Queue

from ojs_bridge import Bridge, RetryPolicy
from ojs_bridge.celery import OJSTask, install, ojs_task
from ojs_bridge.celery.installation import task_policy
from ojs_bridge.celery.run import settle_success
from tests.contract.steps import Step, retries, sets
from tests.on_celery.by_hand import ByHand, by_hand, natively

Making = Callable[[Celery, Callable[..., Any]], Task]


def add(a: int, b: float = 2.0) -> str:
    return str(a + b)


def taken() -> None:
    """A function whose task has the name that another one wants."""


def app_of(name: str, installing: Callable[[Celery], object] = install) -> Celery:
    app = Celery(name, broker="memory://", backend="cache+memory://", set_as_current=False)
    installing(app)
    return app


def bridged_by_name(app: Celery) -> None:
    install(app, policies={})


def of_the_app(app: Celery, run: Callable[..., Any]) -> Task:
    return app.task(shared=False, lazy=False)(run)


def of_ours(app: Celery, run: Callable[..., Any]) -> Task:
    return ojs_task(app, shared=False, lazy=False)(run)


def of_a_class(app: Celery, run: Callable[..., Any]) -> Task:
    annotations = {"queue_of": list[str]}
    names = {"name": "by_class", "run": staticmethod(run), "__annotations__": annotations}
    return app.register_task(type("ByClass", (Task,), {"__module__": __name__, **names})())


def of_our_class(app: Celery, run: Callable[..., Any]) -> Task:
    class Own(OJSTask):
        name = "own"

        def run(self, *args: Any) -> Any:
            return run(*args)

    return app.register_task(Own())


WAYS: list[Making] = [of_the_app, of_ours, of_a_class, of_our_class]


@pytest.mark.parametrize("make", WAYS[:3], ids=lambda make: make.__name__)
def test_a_tasks_annotations_are_its_functions(make: Making) -> None:
    """A framework that reads a task's parameters finds the same annotations as without the bridge."""
    native = make(app_of("native", natively), add) if make is not of_ours else of_the_app(Celery("n"), add)
    task = make(app_of("bridged"), add)
    assert typing.get_type_hints(task) == typing.get_type_hints(native)
    assert typing.get_type_hints(task)
    assert inspect.signature(task.run) == inspect.signature(native.run)


@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_the_annotations_of_a_tasks_class_can_be_resolved(make: Making) -> None:
    task = make(app_of("bridged"), add)
    for cls in type(task).__mro__:
        typing.get_type_hints(cls)


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="this Celery does not warn")
@pytest.mark.parametrize("make", [of_the_app, of_ours, of_a_class, of_our_class], ids=lambda m: m.__name__)
@pytest.mark.parametrize("installing", [install, bridged_by_name, natively])
def test_the_warning_of_a_name_that_is_taken_names_the_users_line(
    make: Making, installing: Callable[[Celery], object]
) -> None:
    app = app_of("taken", installing)
    for name in ("by_class", "own", f"{__name__}.add"):
        app.task(shared=False, lazy=False, name=name)(taken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(app, add)
    # The garbage collector may warn of objects that another test left open.
    (warning,) = (each for each in caught if each.category.__name__ == "DuplicateTaskNameWarning")
    assert warning.filename == __file__


@pytest.mark.parametrize("policies", [None, {}], ids=["all", "none"])
def test_a_sender_that_takes_the_classs_place_is_called(policies: Any) -> None:
    """A unit test may patch `send_task` before or after an app gets its bridge."""
    app = app_of("patched", lambda app: install(app, policies=policies))
    task = of_the_app(app, add)
    for number in range(2):
        with mock.patch("celery.Celery.send_task", return_value=number) as sent:
            assert task.delay(1, b=3) == number
            late = app_of("late", lambda app: install(app, policies=policies))
            assert of_the_app(late, add).delay(1) == number
        assert sent.call_args_list[0].args[:3] == (task.name, (1,), {"b": 3})
    with mock.patch.object(Celery, "send_task", autospec=True) as sent:
        task.s(1).set(countdown=3).delay()
    assert sent.call_args.args[:2] == (app, task.name)
    with mock.patch.object(app, "send_task") as sent:
        task.delay(1)
    assert sent.call_args.args[0] == task.name


def test_a_sender_of_the_apps_own_stays(unique: str) -> None:
    class Sending(Celery):
        def send_task(self, name: str, *args: Any, **options: Any) -> Any:
            return "class", name, options.get("headers")

    app = Sending(unique, broker="memory://", set_as_current=False)
    install(app)
    assert of_the_app(app, add).apply_async((1,), ojs_retry={"max_attempts": 2})[2]["ojs"]
    other = Celery(unique, broker="memory://", set_as_current=False)
    other.send_task = lambda name, *args, **options: ("instance", name)
    install(other)
    assert of_the_app(other, add).delay(1) == ("instance", f"{__name__}.add")


def set_on_the_task(hand: ByHand) -> None:
    hand.app.tasks["plain"].max_retries = 1


def set_on_its_class(hand: ByHand) -> None:
    type(hand.app.tasks["plain"]).max_retries = 1


def set_without_end(hand: ByHand) -> None:
    hand.app.tasks["plain"].max_retries = None


class Own(Task):
    """A base class that has methods of its own in place of Celery's, as libraries have them."""

    abstract = True
    calls: ClassVar[list[str]] = []

    def retry(self, *args: Any, **options: Any) -> Any:
        self.calls.append("retry")
        return super().retry(*args, **{**options, "exc": KeyError("of its own")})

    def signature(self, *args: Any, **options: Any) -> Any:
        self.calls.append("signature")
        return super().signature(*args, **options)


@pytest.mark.parametrize("way", ["install", "install, by class", "ojs_task"])
def test_methods_of_a_users_class_are_called(unique: str, way: str) -> None:
    hand = by_hand(install, unique)
    Own.calls.clear()

    def run(task: Task) -> None:
        task.retry(countdown=0)

    if way == "ojs_task":
        ojs_task(hand.app, shared=False, bind=True, name="own", base=Own, retry={"max_attempts": 1})(run)
    elif way == "install":
        hand.app.task(shared=False, bind=True, name="own", base=Own, max_retries=0)(run)
    else:
        hand.app.register_task(type("ByClass", (Own,), {"name": "own", "run": run, "max_retries": 0})())
    job = hand.app.tasks["own"].s().set(ojs_retry={"on_exhaustion": "discard"}).delay().id
    hand.deliver_all()
    assert hand.state(job) == ("FAILURE", "KeyError('of its own')")
    assert Own.calls[0] == "signature"
    assert Own.calls.count("retry") == 1


#: A way to set a native option after the registration -> the steps of its jobs.
SET: dict[str, tuple[Callable[[ByHand], None], list[Step]]] = {
    "on the task": (set_on_the_task, [retries(countdown=0)]),
    "on its class": (set_on_its_class, [retries(countdown=0)]),
    "to no end": (set_without_end, [retries(countdown=0)] * 8 + ["ok"]),
    "by its own code": (lambda _: None, [sets("max_retries", 1, then=retries(countdown=0))]),
}


@pytest.mark.parametrize("eager", [False, True], ids=["delivered", "eager"])
@pytest.mark.parametrize("store", [False, True], ids=["no store", "store"])
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_hook_calls_its_task_directly(
    unique: str, tmp_path: Path, fails: bool, store: bool, eager: bool
) -> None:
    """Such a call is no run: no event tells of it, and it reserves nothing."""
    heard: list[str] = []
    where = f"sqlite:///{tmp_path}/ojs.db" if store else None
    bridge = Bridge(where, retry={"max_attempts": 1}, listeners=[lambda event: heard.append(event.type)])
    hand = by_hand(lambda app: install(app, bridge), unique)

    class Hooked(Task):
        abstract = True

        def on_success(self, *_: Any) -> None:
            hand.notes.append(("hook", self("directly")))

        before_start = on_failure = after_return = on_success

    @hand.app.task(base=Hooked, shared=False, name="hooked", lazy=False)
    def hooked(how: str) -> str:
        if fails and how == "as a job":
            raise OSError("down")
        return how

    def receive(sender: Task, **_: Any) -> None:
        hand.notes.append(("receiver", sender("directly")))

    task_postrun.connect(settle_success)
    task_postrun.connect(receive, sender=hooked)
    try:
        hooked.apply(("as a job",)) if eager else hand.send("hooked", "as a job")
        hand.deliver_all()
    finally:
        task_postrun.disconnect(receive, sender=hooked)
        task_postrun.disconnect(settle_success)
    bridge.flush()
    assert [note for note in hand.notes if note[0] in ("hook", "receiver")] == [
        *[("hook", "directly")] * 3,
        ("receiver", "directly"),
    ]
    ends = ["job.failed", "job.discarded"] if fails else ["job.completed"]
    assert [type_ for type_ in heard if type_.startswith("job.")] == ["job.started", *ends]


def test_a_hook_before_a_run_may_call_that_of_its_base_class_and_may_be_static(unique: str) -> None:
    """The job itself is retried, whatever its hook has called before."""
    bridge = Bridge(retry={"max_attempts": 2, "initial_interval": "PT0.001S"})
    hand = by_hand(lambda app: install(app, bridge), unique)

    class Above(Task):
        abstract = True

        def before_start(self, *_: Any) -> None:
            hand.notes.append(("hook", self("directly")))

    class Below(Above):
        abstract = True

        def before_start(self, *given: Any) -> None:
            super().before_start(*given)
            super().__call__("directly")
            hand.notes.append(("hook", self("directly")))

    class Static(Task):
        abstract = True

        @staticmethod
        def before_start(task_id: str, args: Any, kwargs: Any) -> None:
            hand.notes.append(("hook", args[0]))

    def run(how: str) -> str:
        hand.notes.append(("body", how))
        if how == "as a job":
            raise OSError("down")
        return how

    for name, base in (("below", Below), ("static", Static)):
        hand.app.task(base=base, shared=False, name=name, lazy=False)(run)
        hand.notes.clear()
        job = hand.send(name, "as a job")
        hand.deliver_all()
        assert hand.state(job) == ("FAILURE", "OSError('down')")
        assert hand.notes.count(("body", "as a job")) == 2
        assert len([note for note in hand.notes if note[0] == "hook"]) == (4 if name == "below" else 2)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("store", [False, True], ids=["no store", "store"])
@pytest.mark.parametrize("when", SET)
def test_native_options_count_as_they_are_when_they_are_needed(
    unique: str, tmp_path: Path, when: str, store: bool, used: bool
) -> None:
    set_it, steps = SET[when]
    runs = []
    bridge = functools.partial(Bridge, store=f"sqlite:///{tmp_path}/ojs.db" if store else None)
    for installing in (natively, lambda app: install(app, bridge())):
        hand = by_hand(installing, unique)
        if used:
            hand.send("plain", retries(countdown=0), "ok")
            hand.deliver_all()
        set_it(hand)
        job = hand.send("plain", *steps)
        hand.deliver_all()
        runs.append(len(hand.runs(job)))
    assert runs[1] == runs[0]


def test_a_delay_that_is_set_later_counts(unique: str) -> None:
    """The new delay counts for a plain task and for a task with automatic retries."""
    hand = by_hand(install, unique)
    plain, auto = hand.app.tasks["plain"], hand.app.tasks["auto"]
    assert [task_policy(hand.app, task).policy.delay(1) for task in (plain, auto)] == [0.001, 180]
    plain.default_retry_delay = auto.default_retry_delay = 7
    assert [task_policy(hand.app, task).policy.delay(1) for task in (plain, auto)] == [7, 7]
    assert task_policy(hand.app, auto).policy.max_attempts == 3
    backoff = hand.app.tasks["backoff"]
    before = task_policy(hand.app, backoff).policy
    backoff.retry_backoff, backoff.max_retries = 99, 1  # Celery reads retry_backoff only as it defines a task
    assert task_policy(hand.app, backoff).policy == RetryPolicy.merge(before.to_ojs(), {"max_attempts": 2})


def events_of(hand: ByHand, job: str) -> list[dict[str, Any]]:
    """The `task-sent` events of a retried job, without the fields that always differ."""
    with hand.app.connection_for_read() as connection:
        exchange = get_exchange(connection, name=hand.app.conf.event_exchange)
        heard = Queue(f"{job}-events", exchange, routing_key="task.sent")(connection.default_channel)
        heard.declare()
        hand.app.tasks["plain"].apply_async((retries(countdown=0), "ok"), task_id=job)
        hand.deliver_all()
        told = [message.payload for message in iter(functools.partial(heard.get, no_ack=True), None)]
        heard.delete()
    # Celery's own retry names itself as its parent, and has no `eta` if it is due at once.
    own = {"hostname", "timestamp", "clock", "pid", "utcoffset", "queue", "routing_key", "parent_id", "eta"}
    return [{name: value for name, value in event.items() if name not in own} for event in told]


def test_a_retry_is_told_as_sent_where_the_app_tells_it(unique: str) -> None:
    """The event of the bridge's retry is that of Celery's own retry."""
    seen = []
    for installing in (natively, lambda app: install(app, Bridge())):
        hand = by_hand(installing, unique)
        hand.app.conf.task_send_sent_event = True
        seen.append(events_of(hand, f"job-{unique}"))
    assert seen[1] == seen[0]
    assert [event["retries"] for event in seen[1]] == [0, 1]
