"""`self.retry(...)` with odd values: a retry, a dead letter or a failure, and never a lost job."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from celery import VERSION, Celery, Task
from celery.exceptions import MaxRetriesExceededError
from kombu import Queue

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.celery.installation import attach
from tests.on_celery.by_hand import ByHand, by_hand, natively
from tests.servers import eventually

POLICY = {"max_attempts": 2, "on_exhaustion": "dead_letter", "jitter": False}


class NeedsArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Untrue(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


class Unmakeable(Exception):
    def __init__(self) -> None:
        raise LookupError("no instance")


class Unwritable(BaseException):
    __str__ = Unsayable.__str__


#: What a task calls `self.retry` with, the number of its runs, and the type of its last error.
ODD: dict[str, tuple[dict[str, Any], int, str]] = {
    "exc, a class": ({"exc": KeyError}, 2, "builtins.KeyError"),
    "exc, a class that needs arguments": ({"exc": NeedsArguments}, 2, "builtins.TypeError"),
    "exc, a class whose instances cannot be made": ({"exc": Unmakeable}, 2, "builtins.LookupError"),
    "exc, a class that ends processes": ({"exc": SystemExit}, 2, "builtins.SystemExit"),
    "exc, a text": ({"exc": "sold out"}, 2, "builtins.TypeError"),
    "exc, another class": ({"exc": int}, 2, "builtins.TypeError"),
    "exc without words": ({"exc": Unsayable()}, 2, f"{__name__}.Unsayable"),
    "exc that ends processes without words": ({"exc": Unwritable}, 2, f"{__name__}.Unwritable"),
    "exc without truth": ({"exc": Untrue()}, 2, f"{__name__}.Untrue"),
    "countdown, a timedelta": ({"countdown": dt.timedelta(seconds=3)}, 2, "builtins.ValueError"),
    "countdown, a text": ({"countdown": "soon"}, 2, "builtins.ValueError"),
    "countdown, no number": ({"countdown": float("nan")}, 2, "builtins.ValueError"),
    "countdown without end": ({"exc": KeyError(), "countdown": float("inf")}, 2, "builtins.KeyError"),
    "countdown beyond calendars": ({"exc": KeyError(), "countdown": 1e+300}, 2, "builtins.KeyError"),
    "countdown beyond numbers": ({"countdown": 10 ** 400}, 2, "builtins.ValueError"),
    "countdown below none": ({"exc": KeyError(), "countdown": -1e+300}, 2, "builtins.KeyError"),
    "eta, a time as text": ({"exc": KeyError(), "eta": "2031-01-01T00:00:00"}, 2, "builtins.KeyError"),
    "eta, a text": ({"eta": "tomorrow"}, 2, "builtins.ValueError"),
    "eta, a number": ({"eta": 5}, 2, "builtins.ValueError"),
    "eta, a date": ({"eta": dt.date.max}, 2, "builtins.ValueError"),
    "eta without a zone": ({"exc": KeyError(), "eta": dt.datetime(2031, 1, 1)}, 2, "builtins.KeyError"),
    "eta, long past": ({"exc": KeyError(), "eta": dt.datetime.min}, 2, "builtins.KeyError"),
    "eta, the last there is": ({"exc": KeyError(), "eta": dt.datetime.max}, 2, "builtins.KeyError"),
    "args, no list": ({"args": 5}, 2, "builtins.TypeError"),
    "args, a text": ({"args": "ab"}, 2, "builtins.TypeError"),
    "kwargs, no mapping": ({"kwargs": [1]}, 2, "builtins.TypeError"),
    "args that nobody can write": ({"exc": KeyError(), "args": [object()]}, 1, "builtins.KeyError"),
    "kwargs that nobody can write": (
        {"exc": KeyError(), "kwargs": {"a": object()}}, 1, "builtins.KeyError",
    ),
    "an unknown queue": ({"exc": KeyError(), "queue": "nowhere"}, 1, "builtins.KeyError"),
    "a queue that is none": ({"exc": KeyError(), "queue": 5}, 1, "builtins.KeyError"),
    "an exchange that is none": ({"exc": KeyError(), "exchange": 5}, 2, "builtins.KeyError"),
    "a routing key that is none": ({"exc": KeyError(), "routing_key": 5}, 2, "builtins.KeyError"),
    "headers that are none": ({"exc": KeyError(), "headers": 5}, 1, "builtins.KeyError"),
    "an unknown serializer": ({"exc": KeyError(), "serializer": "none"}, 1, "builtins.KeyError"),
}  # fmt: skip

#: Task, how it is called, what its retry changes -> what the retry is called with.
CHANGED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any], tuple[Any, Any]]] = {
    "args for what was passed by name": (
        "takes", (1,), {"b": 2, "c": 3}, {"args": (7, 8)}, ([7, 8], {"c": 3}),
    ),
    "kwargs for what was passed by place": ("takes", (1, 2), {}, {"kwargs": {"a": 7}}, ([7, 2], {})),
    "kwargs for what was passed by name": ("takes", (1,), {"b": 2}, {"kwargs": {"b": 7}}, ([1], {"b": 7})),
    "both": ("takes", (1, 2), {}, {"args": (), "kwargs": {"a": 7, "b": 8}}, ([], {"a": 7, "b": 8})),
    "fewer args": ("takes", (1, 2), {"c": 3}, {"args": (7,)}, ([7], {"c": 3})),
    "any number by place": ("takes_any", (1, 2, 3), {}, {"kwargs": {"a": 7}}, ([7, 2, 3], {})),
    "by place only": ("takes_by_place", (1,), {"a": 2}, {"args": (7,)}, ([7], {"a": 2})),
    "a name that is by place only": ("takes_by_place", (1,), {}, {"kwargs": {"a": 7}}, ([1], {"a": 7})),
}  # fmt: skip


def bridged(unique: str, folder: Path, delay: str) -> ByHand:
    """An app under a bridge with a store, whose task `asks` for what its argument says."""

    def installing(app: Celery) -> None:
        app.conf.task_create_missing_queues = False
        app.conf.task_queues = [Queue(app.main, routing_key=app.main)]
        retry = {**POLICY, "initial_interval": delay, "max_interval": delay}
        install(app, Bridge(store=f"sqlite:///{folder}/ojs.db", retry=retry, park_after="PT1S"))

    hand = by_hand(installing, unique)

    @hand.app.task(shared=False, bind=True, name="asks", lazy=False)
    def asks(self: Task, wish: str) -> None:
        hand.notes.append(("run", self.request.id, self.request.retries))
        self.retry(**ODD[wish][0])

    return hand


@pytest.mark.parametrize("delay", ["PT0.001S", "PT1H"], ids=["published", "parked"])
def test_whatever_a_task_asks_for_its_job_is_not_lost(unique: str, tmp_path: Path, delay: str) -> None:
    """Each job is retried or becomes a dead letter at once; to Celery its end is like any other."""
    hand = bridged(unique, tmp_path, delay)
    bridge = attach(hand.app)
    jobs = {wish: hand.send("asks", wish) for wish in ODD}
    hand.deliver_all()
    for parked in bridge.retries.list().jobs:
        bridge.retries.run(parked.id)
    bridge.start()
    eventually(lambda: bridge.retries.count() == 0, what="published retries")
    bridge.stop()
    hand.deliver_all()
    for name, (_, runs, error) in ODD.items():
        assert len(hand.runs(jobs[name])) == runs, name
        assert bridge.dead_letters.get(jobs[name]).error_type == error, name
        assert hand.app.AsyncResult(jobs[name]).state == "FAILURE", name


def define_takers(hand: ByHand, max_retries: int | None) -> None:
    """Tasks whose first run asks for a retry with the changes that the header `changes` holds."""

    def note(task: Task) -> None:
        request = task.request
        hand.notes.append(("called", request.id, [*request.args], dict(request.kwargs)))
        if request.retries == 0:
            task.retry(countdown=0, **request.headers["changes"])

    def takes(self: Task, a: Any = None, b: Any = None, **rest: Any) -> None:
        note(self)

    def takes_any(self: Task, a: Any, *rest: Any) -> None:
        note(self)

    def takes_by_place(self: Task, first: Any, /, **rest: Any) -> None:
        note(self)

    for run in (takes, takes_any, takes_by_place):
        hand.app.task(shared=False, bind=True, name=run.__name__, lazy=False, max_retries=max_retries)(run)


def called(hand: ByHand, name: str) -> list[Any]:
    """The arguments of each run of a job."""
    task, args, kwargs, changes, _ = CHANGED[name]
    job = hand.app.tasks[task].apply_async(args, kwargs, headers={"changes": changes}).id
    hand.deliver_all()
    return [note[2:] for note in hand.notes if note[:2] == ("called", job)]


@pytest.mark.parametrize("name", CHANGED)
def test_a_retrys_arguments_replace_those_that_were_passed_the_other_way(
    unique: str, tmp_path: Path, name: str
) -> None:
    """The bridge does as Celery 5.7 does, also with an older Celery."""
    hand = bridged(unique, tmp_path, "PT0.001S")
    define_takers(hand, 3)
    calls = called(hand, name)
    assert calls[-1] == CHANGED[name][-1]
    assert len(calls) == 2
    if VERSION[:2] >= (5, 7):
        native = by_hand(natively, f"{unique}-native")
        define_takers(native, 3)
        assert calls == called(native, name)


def test_an_eager_retrys_arguments_replace_them_too(unique: str, tmp_path: Path) -> None:
    hand = bridged(unique, tmp_path, "PT0.001S")
    define_takers(hand, 3)
    hand.app.tasks["takes"].apply((1, 2), headers={"changes": {"kwargs": {"a": 7}}})
    assert [note[2:] for note in hand.notes] == [([1, 2], {}), ([7, 2], {})]


def test_no_attempt_left_is_said_in_celerys_words(unique: str, tmp_path: Path) -> None:
    """The text, the arguments, and the task's own class of the error."""
    told = []
    for hand in (by_hand(natively, f"{unique}-native"), bridged(unique, tmp_path, "PT0.001S")):
        define_giving_up(hand)
        hand.app.tasks["gives_up"].apply_async((1, 2), task_id=f"job-{unique}")
        hand.deliver_all()
        told += [note for note in hand.notes if note[0] == "gave up"]
    assert told[0] == told[1]
    assert told[0][1:] == (
        "GaveUp",
        f"Can't retry gives_up[job-{unique}] args:(1, 7) kwargs:{{}}",
        (1, 7),
        {},
    )


class GaveUp(MaxRetriesExceededError):
    pass


def define_giving_up(hand: ByHand) -> None:
    class Base(Task):
        abstract = True
        MaxRetriesExceededError = GaveUp

    @hand.app.task(shared=False, bind=True, name="gives_up", lazy=False, base=Base, max_retries=0)
    def gives_up(self: Task, a: int, b: int) -> None:
        try:
            self.retry(args=(a, 7), countdown=0)
        except MaxRetriesExceededError as error:
            hand.notes.append(
                ("gave up", type(error).__name__, str(error), error.task_args, error.task_kwargs)
            )
