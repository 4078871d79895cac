"""A plan reads a task's code. A number that the code does not show is not known; the plan never guesses."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import signals

from ojs_bridge import ConfigurationError
from ojs_bridge.migration.plan import NOT_KNOWN, Native, Planned
from ojs_bridge.migration.plan.celery import of_celery
from ojs_bridge.migration.plan.dramatiq import of_dramatiq
from ojs_bridge.migration.plan.waits import Wait
from tests.migration.planning import app_with, native, only

CELERY = """
import contextlib, functools, os
from celery import Celery, Task, current_task, signals
from celery.exceptions import MaxRetriesExceededError, Reject, Retry
app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.limit = 7
class SoldOut(Exception): pass
def options(): return {"max_retries": 7}
BOUND = dict(name="job", bind=True, shared=False)
"""
DRAMATIQ = """
import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Middleware
broker = StubBroker()
"""
RETRYING = """
@app.task(**BOUND, max_retries=2)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        raise self.retry(exc=error, countdown=5)
"""
CLASS = """
class Own(Task):
    abstract = True
    {method}
@app.task(**BOUND, base=Own, {options})
def job(self):
    os.getpid()
"""

#: Code for which a plan once gave numbers that were right for some inputs only. `# HERE` marks its line.
NOT_READ: dict[str, str] = {
    "a limit from the app's settings": """
@app.task(**BOUND)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        raise self.retry(exc=error, max_retries=self.app.conf.limit)  # HERE
""",
    "a limit computed at run time": """
@app.task(**BOUND)
def job(self, limit=3):
    try:
        os.getpid()
    except OSError as error:
        raise self.retry(exc=error, max_retries=limit)  # HERE
""",
    "a limit through **kwargs": """
@app.task(**BOUND)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        raise self.retry(exc=error, **options())  # HERE
""",
    "retry handed on as a function": """
def call(function): function()
@app.task(**BOUND)
def job(self):
    call(self.retry)  # HERE
""",
    "a partial of retry": """
@app.task(**BOUND)
def job(self):
    again = functools.partial(self.retry, countdown=5)  # HERE
    again()
""",
    "a partial that a module made of a helper": """
def again(task, countdown):
    task.retry(countdown=countdown)
in_a_minute = functools.partial(again, countdown=60)
@app.task(**BOUND)
def job(self):
    in_a_minute(self)  # HERE
""",
    "the task handed to an object": """
class Client:
    def handle(self, task): "May do anything."
@app.task(**BOUND)
def job(self):
    Client().handle(self)  # HERE
""",
    "a helper that asks Celery for the task": """
def again():
    current_task.retry(countdown=5)
@app.task(name="job", shared=False)
def job():
    again()  # HERE
""",
    "a helper's helper": """
def again():
    current_task.retry(countdown=5)
def later():
    again()
@app.task(name="job", shared=False)
def job():
    later()  # HERE
""",
    "retry by its name": """
@app.task(**BOUND)
def job(self):
    getattr(self, "retry")(countdown=5)  # HERE
""",
    "a context manager that retries": """
class Retrying:
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        if error: current_task.retry(exc=error)
@app.task(name="job", shared=False)
def job():
    with Retrying():  # HERE
        os.getpid()
""",
    "a context manager around the retry": """
@app.task(**BOUND)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        with contextlib.suppress(Exception):
            self.retry(exc=error)  # HERE
""",
    "an except around the retry": """
@app.task(**BOUND)
def job(self):
    try:
        self.retry(exc=OSError())  # HERE
    except Exception:
        print("never mind")
""",
    "a finally around the retry": """
@app.task(**BOUND)
def job(self):
    try:
        self.retry(exc=OSError())  # HERE
    finally:
        return 1
""",
    "a guard on request.retries": """
@app.task(**BOUND, max_retries=20)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        if self.request.retries < 3:  # HERE
            raise self.retry(exc=error)
""",
    "a guard in a helper": """
def is_last():
    return current_task.request.retries >= 3
@app.task(**BOUND, max_retries=20)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        if not is_last():  # HERE
            raise self.retry(exc=error)
""",
    "a retry after success, to go on": """
@app.task(**BOUND)
def job(self):
    if os.getpid():
        raise self.retry(countdown=5)  # HERE
""",
    "a retry with other arguments, to go on": """
@app.task(**BOUND)
def job(self, page=0):
    raise self.retry(args=(page + 1,), exc=OSError())  # HERE
""",
    "a retry that does not raise": """
@app.task(**BOUND)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        self.retry(exc=error, throw=False)  # HERE
""",
    "a decorator around the body": """
def logged(function):
    @functools.wraps(function)
    def inner(*args):
        try:
            return function(*args)
        except Exception:
            return None
    return inner
@app.task(**BOUND)
@logged
def job(self):
    raise self.retry(exc=OSError())  # HERE
""",
    "a decorator that retries": """
def retrying(function):
    def inner(self):
        try:
            return function(self)
        except OSError as error:
            raise self.retry(exc=error)  # HERE
    return inner
@app.task(**BOUND)
@retrying
def job(self):
    os.getpid()
""",
    "Retry raised by hand": """
@app.task(name="job", shared=False)
def job():
    raise Retry("later", when=5)  # HERE
""",
    "Reject(requeue=True)": """
@app.task(name="job", shared=False, acks_late=True)
def job():
    raise Reject("later", requeue=True)  # HERE
""",
    "Reject, imported where it is raised": """
@app.task(name="job", shared=False, acks_late=True)
def job():
    from celery.exceptions import Reject as Again  # HERE
    raise Again("later", requeue=True)
""",
    "retries in before_start": CLASS.format(
        method="def before_start(self, *_): self.retry(countdown=5)  # HERE", options=""
    ),
    "retries in on_success, to go on": CLASS.format(
        method="def on_success(self, *_): self.retry(countdown=5)  # HERE", options=""
    ),
    "a __call__ that retries": CLASS.format(
        method="def __call__(self, *_): raise self.retry(countdown=5)  # HERE", options=""
    ),
    "a __call__ that may swallow": """
class Own(Task):
    abstract = True
    def __call__(self, *args):  # HERE
        with contextlib.suppress(Exception):
            return super().__call__(*args)
@app.task(**BOUND, base=Own, autoretry_for=(OSError,))
def job(self):
    os.getpid()
""",
    "an overridden retry, called by autoretry_for": CLASS.format(
        method="def retry(self, *a, **k): return super().retry(*a, countdown=1, **k)  # HERE",
        options="autoretry_for=(OSError,)",
    ),
    "an overridden apply_async": CLASS.format(
        method="def apply_async(self, *a, **k): return None  # HERE", options="autoretry_for=(OSError,)"
    ),
    "a method of the base class that retries": """
class Own(Task):
    abstract = True
    def later(self): self.retry(countdown=5)
@app.task(**BOUND, base=Own)
def job(self):
    self.later()  # HERE
""",
    "a limit that is a property": CLASS.format(
        method="max_retries = property(lambda self: self.app.conf.limit)  # HERE",
        options="autoretry_for=(OSError,)",
    ),
    "a limit that the task sets": """
@app.task(**BOUND, autoretry_for=(OSError,))
def job(self):
    self.max_retries = 1  # HERE
    raise OSError
""",
    "a limit set in a signal": RETRYING
    + """
@signals.worker_init.connect(weak=False)
def more(sender=None, **_):
    for task in app.tasks.values():
        task.max_retries = 9  # HERE
""",
    "a limit set by its name": RETRYING
    + """
def more():
    setattr(job, "max_retries", 9)  # HERE
""",
    "a signal that retries": """
@signals.task_failure.connect(weak=False)
def again(sender=None, **_):
    sender.retry(countdown=5)  # HERE
@app.task(**BOUND)
def job(self):
    os.getpid()
""",
    "a wait computed at run time": """
@app.task(**BOUND)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        raise self.retry(exc=error, countdown=2 ** self.request.delivery_info["n"])  # HERE
""",
    "going on after the last retry": """
@app.task(**BOUND)
def job(self):
    try:
        self.retry(exc=OSError())  # HERE
    except MaxRetriesExceededError:
        return 1
""",
    "the task by its own name": """
@app.task(name="job", shared=False)
def job():
    try:
        os.getpid()
    except OSError as error:
        raise job.retry(exc=error)  # HERE
""",
    "two waits": """
@app.task(**BOUND)
def job(self):
    try:
        os.getpid()
    except KeyError as error:
        raise self.retry(exc=error, countdown=9)
    except OSError as error:
        raise self.retry(exc=error, countdown=5)  # HERE
""",
    "two limits": """
@app.task(**BOUND, max_retries=8)
def job(self):
    try:
        os.getpid()
    except KeyError as error:
        raise self.retry(exc=error)
    except OSError as error:
        raise self.retry(exc=error, max_retries=2)  # HERE
""",
}
NOT_READ_ON_DRAMATIQ: dict[str, str] = {
    "Retry with a delay of its own": """
@dramatiq.actor(broker=broker, max_retries=3)
def job():
    raise dramatiq.Retry(delay=5)  # HERE
""",
    "a helper that raises Retry": """
from dramatiq import Retry
def later():
    raise Retry(delay=5)
@dramatiq.actor(broker=broker, max_retries=3)
def job():
    later()  # HERE
""",
    "a guard on its own message": """
@dramatiq.actor(broker=broker, max_retries=3)
def job():
    print(CurrentMessage.get_current_message().options.get("retries"))  # HERE
""",
    "a middleware that writes options": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        message.options["max_retries"] = 1  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that fails messages": """
class Strict(Middleware):
    def before_process_message(self, broker, message):
        message.fail()  # HERE
broker.add_middleware(Strict())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
}
#: Source, runs, and the seconds before each retry.
READ: dict[str, tuple[str, Any, tuple[float, ...]]] = {
    "no sign of a retry": (
        "@app.task(**BOUND, max_retries=9)\ndef job(self):\n    print(self.request.id)\n", 1, ()
    ),
    "a plain retry": (RETRYING, 3, (5, 5)),
    "a product": (RETRYING.replace("countdown=5", "countdown=60 * 2"), 3, (120, 120)),
    "its own limit": (RETRYING.replace("countdown=5", "max_retries=1"), 2, (180,)),
    "without end": (RETRYING.replace("max_retries=2", "max_retries=None"), "endless", (5,) * 20),
    "a finally that swallows nothing": (RETRYING + "    finally:\n        os.getpid()\n", 3, (5, 5)),
    "a helper with another's Retry": (
        "class Retry(Exception): pass\ndef fetch():\n    raise Retry\n"
        "@app.task(**BOUND)\ndef job(self):\n    fetch()\n", 1, (),
    ),
}  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that imports a text as a module of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def imported(text: str) -> Any:
        (tmp_path / "fleet_of_a_test.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return importlib.import_module("fleet_of_a_test")

    named = {name: signal for name, signal in vars(signals).items() if hasattr(signal, "receivers")}
    heard = {name: [*(signal.receivers or ())] for name, signal in named.items()}
    yield imported
    for name, receivers in heard.items():
        getattr(signals, name).receivers = receivers
    sys.modules.pop("fleet_of_a_test", None)


def plan_of(module: Any, text: str) -> Planned:
    """The plan of the only task or actor of a module."""
    fleet = module(text)
    (found,) = of_celery(fleet.app, ["job"]) if text.startswith(CELERY) else of_dramatiq(fleet.broker)
    return found


TEXTS = {
    **{name: CELERY + text for name, text in NOT_READ.items()},
    **{f"{name}, on Dramatiq": DRAMATIQ + text for name, text in NOT_READ_ON_DRAMATIQ.items()},
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_not_known(module: Any, text: str) -> None:
    """No number, no policy, and the line that is to be looked at."""
    found = plan_of(module, text)
    line = next(n for n, words in enumerate(text.split("\n"), 1) if "# HERE" in words)
    assert [x.where for x in found.open if x.where == f"fleet_of_a_test.py:{line}"], found.open
    assert (found.native, found.policy, found.differences) == (Native.unknown(), None, ())
    assert found.verdict == NOT_KNOWN


@pytest.mark.parametrize(("text", "runs", "waits"), READ.values(), ids=READ)
def test_what_is_read(module: Any, text: str, runs: Any, waits: tuple[float, ...]) -> None:
    """A number only where no other can be right."""
    found = plan_of(module, CELERY + text)
    assert found.native is not None
    assert (found.native.runs, found.native.waits) == (runs, tuple(map(Wait.of, waits)))
    assert (found.verdict, found.policy is None, found.exact) == ("read", False, True)
    assert found.retry_on == (None if runs == 1 else "asked")


def test_a_request_class_of_its_own(module: Any) -> None:
    """Such a class may do anything in the worker's main process, so the plan knows nothing of its task."""
    own = """
from celery.worker.request import Request
class Own(Request): pass
class Custom(Task):
    Request = Own
@app.task(**BOUND, base=Custom)
def job(self):
    os.getpid()
"""
    found = plan_of(module, CELERY + own)
    assert (found.native, str(found.open[0])) == (
        Native.unknown(),
        "job: its own Request, of fleet_of_a_test, is not read",
    )


def test_source_that_is_not_there() -> None:
    """Code without readable source may do anything with its task, so the plan knows nothing of the task."""
    names: dict[str, Any] = {"__name__": "elsewhere"}
    exec("def hidden(self):\n    print(self)\n", names)
    found = only(app_with(names["hidden"], bind=True))
    assert (found.native, found.open[0].why) == (Native.unknown(), "its source cannot be read")
    app = app_with(with_lazy_things)
    app.tasks["job"].run = functools.partial(print)
    assert only(app).open[0].why.startswith("what it runs is no function of the project, and is not read")


class Lazy:
    """Somebody's object that does its work when it is first asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]


LAZY: Any = Lazy()


def with_lazy_things() -> None:
    LAZY.helper(LAZY)


def test_nothing_is_asked_for_anything() -> None:
    """Names are looked up, and what they stand for is let alone."""
    assert native(app_with(with_lazy_things)).runs == 1


FLEETS = [
    (of_celery, "app", CELERY, "app.task(options, name={!r}, shared=False)\n", "task"),
    (
        of_dramatiq,
        "broker",
        DRAMATIQ,
        "dramatiq.actor(lambda: None, broker=broker, actor_name={!r})\n",
        "actor",
    ),
]


@pytest.mark.parametrize(
    ("plan", "attribute", "start", "declare", "noun"), FLEETS, ids=["celery", "dramatiq"]
)
def test_names_and_patterns(
    module: Any, plan: Any, attribute: str, start: str, declare: str, noun: str
) -> None:
    """A plan has all tasks of the fleet, sorted, or those of a pattern; a pattern without any is refused."""
    text = start + "".join(map(declare.format, ("b.one", "a.two", "a.one")))
    fleet = getattr(module(text), attribute)
    for names, found in (
        ((), ["a.one", "a.two", "b.one"]),
        (["a.*"], ["a.one", "a.two"]),
        (["b.*", "a.two"], ["a.two", "b.one"]),
    ):
        assert [one.name for one in plan(fleet, names)] == found
    for pattern in ("c.*", "celery.*"):
        with pytest.raises(ConfigurationError, match=re.escape(f"names: {pattern!r} names no {noun}")):
            plan(fleet, ["a.one", pattern])
