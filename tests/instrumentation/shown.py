"""What only shows a job, and breaks where the job asks for it: hooks, receivers and result backends."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery import Task, current_task, signals
from dramatiq.broker import Broker
from dramatiq.middleware import Middleware
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from ojs_bridge import Bridge
from tests.contract.notes import VARIABLE, Settings, until
from tests.on_celery.polling import Polling


class Odd(BaseException):
    """What no framework knows."""


ERRORS = {error.__name__: error for error in (RuntimeError, MemoryError, SystemExit, KeyboardInterrupt, Odd)}
#: What may raise anything; and what natively harms no job if it raises an Exception.
SHOWN: dict[str, tuple[str, ...]] = {
    "celery": (
        *("task_postrun", "task_success", "task_failure", "task_retry"),
        *("before_task_publish", "after_task_publish"),
    ),
    "dramatiq": (
        *("after_process_message", "after_enqueue", "before_delay_message"),
        *("before_ack", "after_ack", "before_nack", "after_nack"),
    ),
}
HEARD: dict[str, tuple[str, ...]] = {
    "celery": ("task_received", "task_prerun"),
    "dramatiq": ("before_process_message", "before_enqueue"),
}
RESULTS: dict[str, tuple[str, ...]] = {
    "celery": ("mark_as_done", "mark_as_failure", "mark_as_retry"),
    "dramatiq": ("store_result", "store_exception"),
}


def breaks(said: Any, place: str) -> None:
    """Raise the error that a job asks for at this place, or hang until a key is set."""
    if VARIABLE not in os.environ or not said or said[0] != place:
        return
    if said[1] not in ERRORS:
        until(Settings.from_env().backend, said[1])
        return
    raise ERRORS[said[1]](place)


def receivers(bridge: Bridge, settings: Settings) -> None:
    """Have receivers of Celery's signals."""
    for name in (*SHOWN["celery"], *HEARD["celery"]):
        getattr(signals, name).connect(_receiver(name), weak=False)


def _receiver(name: str) -> Callable[..., None]:
    def receive(sender: Any = None, request: Any = None, **given: Any) -> None:
        if name.endswith("publish"):
            said = given["headers"].get("breaks")
        elif name == "task_received":
            said = request.request_dict.get("breaks")
        else:
            said = vars(sender.request).get("breaks")
        breaks(said, name)

    return receive


class Shown(Polling):
    """Results of Celery."""


class Hooked(Middleware):
    """Hooks of Dramatiq, and its results."""

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Replace the result backend."""
        (results,) = (m for m in broker.middleware if isinstance(m, Results))
        results.backend = StoredBack(client=results.backend.client, namespace=results.backend.namespace)


class StoredBack(RedisBackend):
    """Results of Dramatiq."""


def _method(base: type, name: str) -> Callable[..., Any]:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        if base is Polling:
            task: Task | None = current_task
            said = vars(task.request).get("breaks") if task else None
        else:
            message = given[1] if base is Middleware else given[0]
            said = message.options.get("breaks")
        breaks(said, name)
        return getattr(super(type(self), self), name)(*given, **named)

    return method


for own, base, names in (
    (Shown, Polling, RESULTS["celery"]),
    (StoredBack, RedisBackend, RESULTS["dramatiq"]),
    (Hooked, Middleware, (*SHOWN["dramatiq"], *HEARD["dramatiq"])),
):
    for each in names:
        setattr(own, each, _method(base, each))
