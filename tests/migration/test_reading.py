"""A plan reads a task's code. A number that the code does not show is not known; the plan never guesses."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals
from celery.exceptions import Retry
from dramatiq import Worker

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.celery import install as install_celery
from ojs_bridge.dramatiq import install
from ojs_bridge.migration.plan import NOT_KNOWN, NativeRetries, Planned, WaitRange
from ojs_bridge.migration.plan.celery import plans as of_celery
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from tests.migration.planning import app_with, native, only
from tests.on_celery.fleet import worker_here
from tests.servers import eventually

CELERY = """
import contextlib, datetime, functools, logging, os, random
from celery import Celery, Task, current_task, signals
from celery.exceptions import MaxRetriesExceededError, Reject, Retry
app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.limit = 7
class SoldOut(Exception): pass
logger = logging.getLogger(__name__)
def later(*_): return 5
def tomorrow(): return datetime.datetime(2050, 1, 1)
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
DECORATOR = """
def logged(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        print(len(args))
        return function(*args, **kwargs)
    return inner
"""
#: Asks for a retry in a decorator, beneath another one that keeps what is raised. `{raises}` ends it.
KEEPING = """
def keeping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        kept = None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            kept = error
        finally:
            if not isinstance(kept, Retry):
                logger.info("it ends")
            {raises}
    return wrapper
def retrying(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        context = args[0]
        try:
            return function(*args, **kwargs)
        except OSError:
            args[0].retry(countdown=5)  # HERE
        except KeyError:
            context.retry(countdown=5)
    return wrapper
@app.task(**BOUND, max_retries=2)
@keeping
@retrying
def job(self):
    os.getpid()
"""
#: A base whose `apply_async` hands on. `{first}` comes before, and `{options}` is handed on.
SENDING = """
class Locked(Exception): pass
class Own(Task):
    abstract = True
    def lock(self, *given): pass
    def refused(self): raise Locked
    def apply_async(self, args=None, kwargs=None, **options):  # HERE
        {first}
        return super().apply_async(args, kwargs, {options})
@app.task(**BOUND, base=Own, max_retries=2)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        raise self.retry(exc=error, countdown=0)
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
    "a signal that retries": """
@signals.task_failure.connect(weak=False)
def again(sender=None, **_):
    sender.retry(countdown=5)  # HERE
@app.task(**BOUND)
def job(self):
    os.getpid()
""",
    "two limits of which one counts retries": """
@app.task(**BOUND, autoretry_for=(OSError,), max_retries=8)
def job(self):
    if self.request.retries >= 3:  # HERE
        return
    os.getpid()
""",
    "a guard that asks something else": """
@app.task(**BOUND, max_retries=20)
def job(self):
    try:
        os.getpid()
    except OSError as error:
        if self.request.retries < self.app.conf.limit:  # HERE
            raise self.retry(exc=error)
""",
    "a guard by its name": """
@app.task(**BOUND, max_retries=20)
def job(self):
    if getattr(self.request, "retries") < 3:  # HERE
        raise self.retry(exc=OSError())
""",
    "a guard in a variable": """
@app.task(**BOUND, max_retries=20)
def job(self, most=3):
    is_last = self.request.retries >= most
    if not is_last:  # HERE
        raise self.retry(exc=OSError())
""",
    "a guard that a function answers": """
def may(retries):
    return retries < 3
@app.task(**BOUND, max_retries=20)
def job(self):
    if may(self.request.retries):  # HERE
        raise self.retry(exc=OSError())
""",
    "an argument that is changed on one way": """
@app.task(**BOUND, max_retries=20)
def job(self, most=3):
    if os.getpid():
        most = 5
    raise self.retry(exc=OSError(), max_retries=most)  # HERE
""",
    "the number of retries, which the task sets": """
@app.task(**BOUND)
def job(self):
    self.request.retries = 0  # HERE
    raise self.retry(exc=OSError())
""",
    "a helper that swallows the retry": """
def again(task):
    try:
        task.retry(exc=OSError())  # HERE
    except Exception:
        pass
@app.task(**BOUND)
def job(self):
    again(self)
""",
    "a helper that is called where its retry is swallowed": """
def again(task):
    raise task.retry(exc=OSError())  # HERE
@app.task(**BOUND)
def job(self):
    with contextlib.suppress(Exception):
        again(self)
""",
    "a context manager of its own that may swallow": """
@contextlib.contextmanager
def calm():
    try:
        yield
    except Exception:
        pass
@app.task(**BOUND)
def job(self):
    with calm():
        raise self.retry(exc=OSError())  # HERE
""",
    "a context manager whose __exit__ may swallow": """
class Calm:
    def __enter__(self): return self
    def __exit__(self, *_): return True
@app.task(**BOUND)
def job(self):
    with Calm():
        raise self.retry(exc=OSError())  # HERE
""",
    "a limit set by a function that gets the task": RETRYING.replace("    try:", "    tuned(self)\n    try:")
    + """
def tuned(task):
    task.max_retries = 9  # HERE
""",
    "a limit set by its name in a function that gets the task": RETRYING.replace(
        "    try:", "    tuned(self)\n    try:"
    )
    + """
def tuned(task):
    setattr(task, "max_retries", 9)  # HERE
""",
    "a limit set by a function that a signal calls": RETRYING
    + """
def tuned(task):
    task.max_retries = 9
@signals.task_prerun.connect(weak=False)
def tunes(task=None, **_):
    tuned(task)  # HERE
""",
    "a limit set by its name in a signal": RETRYING
    + """
@signals.worker_init.connect(weak=False)
def more(**_):
    setattr(job, "max_retries", 9)  # HERE
""",
    "a limit set when a worker begins": RETRYING
    + """
from celery import bootsteps
class Step(bootsteps.StartStopStep):
    def start(self, parent):
        job.max_retries = 9  # HERE
app.steps["worker"].add(Step)
""",
    "a limit set in before_start": CLASS.format(
        method="def before_start(self, *_): self.max_retries = 9  # HERE", options="autoretry_for=(OSError,)"
    ),
    "a limit set in on_retry, by a mixin": """
class Mixin:
    def on_retry(self, *_): self.max_retries = 9  # HERE
class Own(Mixin, Task):
    abstract = True
@app.task(**BOUND, base=Own, autoretry_for=(OSError,))
def job(self):
    os.getpid()
""",
    "a limit set in a method that run calls": """
class Own(Task):
    abstract = True
    def prepare(self): self.max_retries = 9  # HERE
@app.task(**BOUND, base=Own, autoretry_for=(OSError,))
def job(self):
    self.prepare()
""",
    "a limit set by another task": RETRYING
    + """
@app.task(name="other", shared=False)
def other():
    job.max_retries = 9  # HERE
""",
    "a limit set by another task, of any task": RETRYING
    + """
@app.task(name="other", shared=False)
def other(name):
    app.tasks[name].max_retries = 9  # HERE
""",
    "a mixin that retries in before_start": """
class Mixin:
    def before_start(self, *_): self.retry(countdown=5)  # HERE
class Own(Mixin, Task):
    abstract = True
@app.task(**BOUND, base=Own)
def job(self):
    os.getpid()
""",
    "a __call__ that runs more than once": CLASS.format(
        method="def __call__(self, *_):  # HERE\n        for _ in (1, 2): super().__call__()",
        options="autoretry_for=(OSError,)",
    ),
    "an error that a decorator keeps, and raises on one way": KEEPING.format(
        raises="if kept and os.environ.get('STRICT'): raise kept"
    ),
    "an error that a decorator keeps, and swallows": KEEPING.format(
        raises="kept = None\n            if kept: raise kept"
    ),
    "an apply_async that locks": SENDING.format(
        first="if self.name in os.environ: return None", options="**options"
    ),
    "an apply_async that refuses": SENDING.format(first="self.refused()", options="**options"),
    "an apply_async that refuses by a lock of somebody's": SENDING.format(
        first="os.lock(self.name)", options="**options"
    ),
    "an apply_async that sends in a minute": SENDING.format(
        first="options['countdown'] = 60", options="**options"
    ),
    "an apply_async with a wait of its own": SENDING.format(
        first="", options="**{**options, 'countdown': 60}"
    ),
    "an apply_async that drops options": SENDING.format(first="", options="queue=options.get('queue')"),
    "an apply_async that swallows": SENDING.format(
        first="try: return super().apply_async(args, kwargs, **options)\n"
        "        except Exception: return None",
        options="**options",
    ),
    "a retry of its own that waits longer": CLASS.format(
        method="def retry(self, *args, **options):  # HERE\n"
        "        return super().retry(*args, **{**options, 'countdown': 60})",
        options="autoretry_for=(OSError,)",
    ),
    "classes that the task has, in an except around the retry": """
class Own(Task):
    abstract = True
    caught = (KeyError, Exception)
@app.task(**BOUND, base=Own)
def job(self):
    try:
        raise self.retry(exc=OSError())  # HERE
    except self.caught:
        pass
""",
    "Reject, which a variable requeues": """
@app.task(name="job", shared=False, acks_late=True)
def job(again=False):
    raise Reject("later", requeue=again)  # HERE
""",
    "a limit that the task sets by its name": RETRYING.replace(
        "    try:", '    setattr(self, "max_retries", 9)  # HERE\n    try:'
    ),
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
    "a middleware that writes one more at each run": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        message.options["max_retries"] = message.options.get("max_retries", 0) + 1  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that writes what it is given": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        message.options["max_retries"] = len(message.args)  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that writes for some messages": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        if message.args: message.options["max_retries"] = 1  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that writes for messages with an option": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        if message.options.get("urgent"): message.options["max_retries"] = 1  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that writes a text": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        message.options["max_retries"] = "1"  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that writes another actor's limit": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        message.options["max_retries"] = broker.get_actor(message.args[0]).options.get("max_retries")  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that writes, and fails messages": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        message.options["max_retries"] = 1; message.fail()  # HERE
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
    "a helper of a middleware that writes options": """
class Limits(Middleware):
    def before_process_message(self, broker, message):
        self.limit(message)  # HERE
    def limit(self, message):
        options = message.options
        options["max_retries"] = 1
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a function that a middleware calls, and that writes options": """
LIMIT = "max_retries"
def limited(message):
    message.options.setdefault(LIMIT, 1)
class Limits(Middleware):
    def before_enqueue(self, broker, message, delay):
        limited(message)  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that hands the options on": """
class Limits(Middleware):
    def before_enqueue(self, broker, message, delay):
        broker.limit(message.options)  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "a middleware that sets options of actors when a worker begins": """
class Limits(Middleware):
    def before_worker_boot(self, broker, worker):
        for actor in broker.actors.values():
            actor.options["max_retries"] = 1  # HERE
broker.add_middleware(Limits())
@dramatiq.actor(broker=broker)
def job():
    pass
""",
    "an actor class that writes options": """
class Own(dramatiq.Actor):
    def message_with_options(self, *, args=(), kwargs=None, **options):
        options.setdefault("max_retries", 1)  # HERE
        return super().message_with_options(args=args, kwargs=kwargs, **options)
@dramatiq.actor(broker=broker, actor_class=Own)
def job():
    pass
""",
}
#: Source, runs, and the seconds before each retry.
READ: dict[str, tuple[str, Any, tuple[float, ...] | str]] = {
    "no sign of a retry": (
        "@app.task(**BOUND, max_retries=9)\ndef job(self):\n    print(self.request.id)\n", 1, ()
    ),
    "a plain retry": (RETRYING, 3, (5, 5)),
    "a product": (RETRYING.replace("countdown=5", "countdown=60 * 2"), 3, (120, 120)),
    "its own limit": (RETRYING.replace("countdown=5", "max_retries=1"), 2, (180,)),
    "without end": (RETRYING.replace("max_retries=2", "max_retries=None"), "endless", (5,) * 20),
    "a finally that swallows nothing": (RETRYING + "    finally:\n        print()\n", 3, (5, 5)),
    "a helper with another's Retry": (
        "class Retry(Exception): pass\ndef fetch():\n    raise Retry\n"
        "@app.task(**BOUND)\ndef job(self):\n    fetch()\n", 1, (),
    ),
    "a retry after success, to go on": (
        "@app.task(**BOUND)\ndef job(self):\n    if os.getpid():\n        raise self.retry(countdown=5)\n",
        4, (5, 5, 5),
    ),
    "a retry with other arguments, to go on": (
        "@app.task(**BOUND)\ndef job(self, page=0):\n"
        "    raise self.retry(args=(page + 1,), exc=OSError())\n", 4, (180,) * 3,
    ),
    "going on after the last retry": (
        "@app.task(**BOUND)\ndef job(self):\n    try:\n        self.retry(exc=OSError())\n"
        "    except MaxRetriesExceededError:\n        return 1\n", 4, (180,) * 3,
    ),
    "a handler that lets the retry out": (
        "@app.task(**BOUND)\ndef job(self):\n    try:\n        self.retry(exc=OSError())\n"
        "    except Retry as again:\n        print(again)\n        raise\n"
        "    except Exception:\n        pass\n", 4, (180,) * 3,
    ),
    "the task by its own name": (
        RETRYING.replace("**BOUND", 'name="job", shared=False').replace("self", "job", 1).replace(
            "(job)", "()").replace("self.retry", "job.retry"), 3, (5, 5),
    ),
    "two waits": (RETRYING + "    except KeyError:\n        raise self.retry(countdown=9)\n", 3, NOT_KNOWN),
    "a wait at random": (RETRYING.replace("=5", "=random.randint(1, 9)"), 3, NOT_KNOWN),
    "a wait at a date": (RETRYING.replace("countdown=5", "eta=tomorrow()"), 3, NOT_KNOWN),
    "a wait that a function computes": (RETRYING.replace("=5", "=later(self.request.retries)"), 3, NOT_KNOWN),
    "a wait that doubles": (RETRYING.replace("=5", "=2 ** self.request.retries"), 3, (1, 2)),
    "a wait in a variable": (
        RETRYING.replace("    try:", "    wait = min(30 * 2 ** self.request.retries, 50)\n    try:").replace(
            "=5", "=wait"), 3, (30, 50),
    ),
    "a wait that a module says": ("PAUSE = 60\n" + RETRYING.replace("=5", "=PAUSE * 2"), 3, (120, 120)),
    "a wait of the task's own": (
        RETRYING.replace("=5", "=self.default_retry_delay * (self.request.retries + 1)"), 3, (180, 360),
    ),
    "a priority": (RETRYING.replace("=5", "=5, priority=9, queue='slow'"), 3, (5, 5)),
    "options of the task": (
        RETRYING.replace("max_retries=2", "retry_kwargs={'max_retries': 6}").replace(
            "=5", "=5, **self.retry_kwargs"), 7, (5,) * 6,
    ),
    "beside autoretry_for": (RETRYING.replace("max_", "autoretry_for=(KeyError,), max_", 1), 3, NOT_KNOWN),
    "a guard on request.retries": (
        RETRYING.replace("max_retries=2", "max_retries=20").replace(
            "        raise", "        if self.request.retries < 3:\n            raise"), 4, (5, 5, 5),
    ),
    "a guard that returns": (
        RETRYING.replace("max_retries=2", "max_retries=20").replace(
            "        raise",
            "        if random.random() > 1 and self.request.retries > 2:\n            return\n"
            "        if self.request.retries > 5:\n            return\n        raise"), 7, (5,) * 6,
    ),
    "a guard on the task's own limit": (
        RETRYING.replace("        raise", "        if self.request.retries == self.max_retries:\n"
                         "            return\n        raise"), 3, (5, 5),
    ),
    "a guard on the task's own limit, in a variable": (
        RETRYING.replace("    try:", "    last = self.request.retries >= self.max_retries\n    try:").replace(
            "        raise", "        if last:\n            return\n        raise"), 3, (5, 5),
    ),
    "the number of retries in a log": (
        RETRYING.replace("        raise", "        logger.info('%s of %s', self.request.retries, self)\n"
                         "        print(f'{self.request.retries}')\n        raise"), 3, (5, 5),
    ),
    "a helper that retries": (
        "def again(task, *, error):\n    raise task.retry(exc=error, countdown=5)\n"
        "@app.task(**BOUND, max_retries=2)\ndef job(self):\n    return again(self, error=OSError())\n",
        3, (5, 5),
    ),
    "a helper that looks at the task": (
        RETRYING.replace("os.getpid()", "os.getpid(name(task=self))")
        + "def name(task):\n    return task.name\n", 3, (5, 5),
    ),
    "a method of the base class that retries": (
        CLASS.format(method="def later(self): self.retry(countdown=5)", options="").replace(
            "os.getpid()", "self.later()"), 4, (5, 5, 5),
    ),
    "a decorator around the body": (
        DECORATOR + RETRYING.replace("def job", "@logged\ndef job"), 3, (5, 5),
    ),
    "a decorator that retries": (
        "def retrying(function):\n    def inner(self):\n        try:\n            return function(self)\n"
        "        except OSError as error:\n            raise self.retry(exc=error)\n    return inner\n"
        "@app.task(**BOUND)\n@retrying\ndef job(self):\n    os.getpid()\n", 4, (180,) * 3,
    ),
    "a decorator that keeps an error, and raises it at last": (
        KEEPING.format(raises="if kept: raise kept"), 3, (5, 5),
    ),
    "a decorator that keeps an error, and asks for None": (
        KEEPING.format(raises="if kept is not None: raise kept"), 3, (5, 5),
    ),
    "the task's own name for the error of its last retry": (
        "@app.task(**BOUND)\ndef job(self):\n    try:\n        self.retry(countdown=5)\n"
        "    except self.MaxRetriesExceededError:\n        return 1\n", 4, (5,) * 3,
    ),
    "a Reject that drops the message": (
        "@app.task(name='job', shared=False)\ndef job():\n    if os.getpid():\n"
        "        raise Reject('no', requeue=False)\n    raise Reject('never')\n", 1, (),
    ),
    "an apply_async that locks what is sent first": (
        SENDING.format(first="if not options.get('retries'): self.lock()", options="**options"), 3, (0, 0),
    ),
    "an apply_async that adds what no retry reads": (
        SENDING.format(first="more = {'shadow': 'x'}\n        options = {**options, **more, 'priority': 3}\n"
                       "        options.setdefault('headers', None)", options="**options"), 3, (0, 0),
    ),
    "a retry of its own that counts": (
        CLASS.format(method="def retry(self, *args, **options):\n        logger.info('%s', self.name)\n"
                     "        raise super().retry(*args, **options)", options="autoretry_for=(OSError,)"),
        4, (180,) * 3,
    ),
    "a context manager that swallows nothing": (
        "@contextlib.contextmanager\ndef timed():\n    yield\n"
        + RETRYING.replace("        raise", "        with timed():\n            raise"), 3, (5, 5),
    ),
    "a __call__ that only measures": (
        CLASS.format(method="def __call__(self, *args):\n        with open(os.devnull):\n"
                     "            return super().__call__(*args)",
                     options="autoretry_for=(OSError,)"), 4, (180,) * 3,
    ),
    "somebody else's max_retries": (
        "class Client:\n    def set(self): self.max_retries = 9\n"
        "def connected(client: Client):\n    client.max_retries = 7\n    return client\n"
        "client = Client()\n" + RETRYING.replace(
            "os.getpid()", "connected(client).set()\n        client.max_retries = 3\n        os.getpid()"
        ), 3, (5, 5),
    ),
    "a limit that a module sets": (RETRYING + "job.max_retries = 4\n", 5, (5,) * 4),
    "a function that nobody calls": (
        RETRYING + "def more(task):\n    task.max_retries = 9\n    task.retry()\n", 3, (5, 5),
    ),
    "another task's own methods": (
        RETRYING + "class Own(Task):\n    abstract = True\n    def tune(self): self.max_retries = 9\n"
        "@app.task(base=Own, name='other', shared=False)\ndef other():\n    other.tune()\n", 3, (5, 5),
    ),
}  # fmt: skip


#: Hooks before a run that write the limit: the lines of one, an actor's options, and the runs.
LIMITS: dict[str, tuple[str, str, int]] = {
    "a number": ('message.options["max_retries"] = 1', "max_retries=5", 2),
    "a number, if there is none": ('message.options.setdefault("max_retries", 2)', "", 3),
    "the message's, the actor's, or a setting": (
        'actor = broker.get_actor(message.actor_name)\n        most = message.options.get("max_retries", '
        'actor.options.get("max_retries", settings.MOST))\n        message.options["max_retries"] = most',
        "", 4,
    ),
    "the message's, the actor's, or a setting; the actor has one": (
        'actor = broker.actors[message.actor_name]\n        most = message.options.get("max_retries", '
        'actor.options.get("max_retries", settings.MOST))\n        message.options["max_retries"] = most',
        "max_retries=1", 2,
    ),
    "its own setting, if the message has none": (
        'if "max_retries" not in message.options: message.options["max_retries"] = self.most', "", 5
    ),
}  # fmt: skip
LIMITING = """
from types import SimpleNamespace
settings = SimpleNamespace(MOST=3)
class Limits(Middleware):
    def __init__(self): self.most = 4
    def before_process_message(self, broker, message):
        {line}
broker.add_middleware(Limits())
ran = []
@dramatiq.actor(broker=broker, min_backoff=1, max_backoff=2, {options})
def job():
    ran.append(1)
    raise {error}
"""
#: Middleware, and code of actors, that are no reason to know less.
READ_ON_DRAMATIQ: dict[str, str] = {
    "a hook for declarations": """
class Schedule(Middleware):
    def after_declare_actor(self, broker, actor):
        actor.options["max_retries"] = 5
        self.send = actor.send
broker.add_middleware(Schedule())
@dramatiq.actor(broker=broker)
def job(): pass
""",
    "a hook that pops its own option": """
class Spans(Middleware):
    KEY = "span"
    def before_process_message(self, broker, message):
        message.options["span"] = object()
        message.options.update(trace=1)
        print(dict(message.options), f"{message.options}", "retries" in message.options)
    def after_process_message(self, broker, message, *, result=None, exception=None):
        span = message.options.pop(self.KEY, None)
        options = message.options
        options.setdefault("trace", None)
broker.add_middleware(Spans())
@dramatiq.actor(broker=broker, max_retries=5)
def job(): pass
""",
    "a hook that calls methods of Python's own objects": """
class Queue:
    def get(self, message): message.options["max_retries"] = 1
    def close(self, message): message.fail()
class Reads(Middleware):
    def before_process_message(self, broker, message):
        message.options.get("trace")
        self.spans.pop(message.message_id).close()
broker.add_middleware(Reads())
@dramatiq.actor(broker=broker, max_retries=5)
def job(): pass
""",
    "a hook that sends another actor's message": """
class Tells(Middleware):
    def after_skip_message(self, broker, message):
        job.send()
broker.add_middleware(Tells())
@dramatiq.actor(broker=broker, max_retries=5)
def job(): pass
""",
    "an actor that reads an option of its own": """
@dramatiq.actor(broker=broker, max_retries=5)
def job():
    message = CurrentMessage.get_current_message()
    print(message.options.get("trace"), message.options["span"])
""",
    "an actor that starts a worker's hook of somebody else": """
class Limits:
    def before_enqueue(self, broker, message, delay):
        message.options["max_retries"] = 1
@dramatiq.actor(broker=broker, max_retries=5)
def job(): pass
""",
}


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
    assert (found.native, found.policy, found.differences) == (NativeRetries.unknown(), None, ())
    assert found.verdict == NOT_KNOWN


@pytest.mark.parametrize(("text", "runs", "waits"), READ.values(), ids=READ)
def test_what_is_read(module: Any, text: str, runs: Any, waits: tuple[float, ...] | str) -> None:
    """A number only where no other can be right."""
    found = plan_of(module, CELERY + text)
    assert not found.open
    assert found.native is not None
    listed = waits if isinstance(waits, str) else tuple(map(WaitRange.of, waits))
    assert (found.native.runs, found.native.waits) == (runs, listed)
    assert (found.verdict, found.policy is None, found.exact) == ("read", False, True)
    if waits == NOT_KNOWN or len({*waits}) > 1:
        assert found.entry == {}, "a policy would take the place of the code's own waits"


@pytest.mark.parametrize("text", READ_ON_DRAMATIQ.values(), ids=READ_ON_DRAMATIQ)
def test_what_is_read_on_dramatiq(module: Any, text: str) -> None:
    """A middleware that lets the options of retries alone is no reason to know less."""
    found = plan_of(module, DRAMATIQ + text)
    assert not found.open
    assert found.native is not None
    assert (found.native.runs, found.verdict) == (6, "read")


@pytest.mark.parametrize("moved", [False, True], ids=["dramatiq", "bridge"])
@pytest.mark.parametrize("error", ["OSError", "dramatiq.Retry", "dramatiq.Retry('later', delay=None)"])
@pytest.mark.parametrize(("line", "options", "runs"), LIMITS.values(), ids=LIMITS)
def test_a_hook_that_writes_the_limit(
    module: Any, line: str, options: str, runs: int, error: str, moved: bool
) -> None:
    """The plan reads what it writes, and a worker runs the job so often. A plain Retry is like any error."""
    fleet = module(DRAMATIQ + LIMITING.format(line=line, options=options, error=error))
    (found,) = of_dramatiq(fleet.broker)
    assert not found.open
    assert found.native is not None
    assert found.native.runs == runs
    if moved:
        install(fleet.broker, Bridge(), policies={"job": found.entry})
    worker = Worker(fleet.broker, worker_timeout=20, worker_threads=1)
    worker.start()
    fleet.job.send()
    eventually(lambda: fleet.broker.dead_letters)
    worker.stop()
    assert len(fleet.ran) == runs


#: Ways in which a task sets a limit of its own.
OWN_LIMITS = {
    "self": "self.max_retries = 9",
    "another name of it": "task = self\n    task.max_retries = 9",
    "by its name": "setattr(self, 'max_retries', 9)",
    "a helper": "tuned(self)",
}
TWO = """
def tuned(task):
    task.max_retries = 9
@app.task(**BOUND, autoretry_for=(OSError,))
def job(self):
    {line}
    os.getpid()
@app.task(bind=True, name="other", shared=False, autoretry_for=(OSError,))
def other(self):
    {other}os.getpid()
"""


@pytest.mark.parametrize("moved", [False, True], ids=["celery", "bridge"])
@pytest.mark.parametrize("line", OWN_LIMITS.values(), ids=OWN_LIMITS)
def test_a_task_that_sets_its_own_limit(module: Any, line: str, moved: bool) -> None:
    """`self` of a bound task is that task alone: the others are known, and run as often as was read."""
    fleet = module(CELERY + TWO.format(line=line, other=""))
    job, other = of_celery(fleet.app)
    assert (job.verdict, other.verdict) == (NOT_KNOWN, "read")
    assert other.native is not None
    assert other.native.runs == 4
    if moved:
        install_celery(fleet.app, Bridge(), policies={"other": other.entry, "job": {}})
    assert max(runs_of_job(fleet)) == 10
    assert max(runs_of_job(fleet, "other")) == 4


def test_a_task_that_sets_the_limit_of_another(module: Any) -> None:
    """By its name it is the other's alone; of a task that is not known it may be any."""
    for line, unknown in (
        ("other.max_retries = 9", ["other"]),
        ("app.tasks[self.name].max_retries = 9", ["job", "other"]),
    ):
        sys.modules.pop("fleet_of_a_test", None)
        fleet = module(CELERY + TWO.format(line=line, other="") + "# " * len(unknown))
        assert [one.name for one in of_celery(fleet.app) if one.open] == unknown


HANDING = [
    name for name in READ if name.startswith("an apply_async") or name == "a retry of its own that counts"
]


@pytest.mark.parametrize("moved", [False, True], ids=["celery", "bridge"])
@pytest.mark.parametrize("name", HANDING)
def test_a_base_that_hands_on(module: Any, name: str, moved: bool) -> None:
    """A worker sends the retries of such a base as often as was read."""
    fleet = module(
        CELERY + READ[name][0].replace("app.task(**BOUND,", "app.task(**BOUND, default_retry_delay=0,")
    )
    (found,) = of_celery(fleet.app, ["job"])
    assert found.native is not None
    if moved:
        install_celery(fleet.app, Bridge(), policies={"job": found.entry})

    def fails() -> None:
        raise OSError

    fleet.os = SimpleNamespace(getpid=fails)
    told: list[str] = []
    signals.task_prerun.connect(lambda **_: told.append("run"), weak=False)
    signals.task_failure.connect(lambda **_: told.append("end"), weak=False)
    with worker_here(fleet.app, pool="solo"):
        fleet.job.apply_async()
        eventually(lambda: "end" in told)
    assert told.count("run") == found.native.runs == READ[name][1]


def test_a_word_for_each_retry(module: Any) -> None:
    """A line is shown with the words of the code, so that a reader finds it."""
    own = """
class Log:
    def retry(self): pass
@app.task(name="job", shared=False)
def job(number):
    Log.made(number).log.retry()
"""
    found = plan_of(module, CELERY + own)
    assert found.open[0].why == "Log.made(number).log.retry is used in no plain way"


#: Outside a worker, `__call__` begins a run of its own in older versions of Celery.
EAGER = [name for name in (*READ, *NOT_READ) if "__call__" not in name]
HAPPENS = {name: READ[name][:2] for name in EAGER if name in READ and isinstance(READ[name][1], int)}


def runs_of_job(fleet: Any, name: str = "job") -> list[int]:
    """How often a job runs if its call fails, and if it does not."""
    ran: list[int] = []

    def fails(*_: Any) -> None:
        raise OSError

    def begins(sender: Any = None, **_: Any) -> None:
        ran[-1] += 1

    signals.task_prerun.connect(begins, weak=False)
    for getpid in (fails, lambda *_: 1):
        fleet.os = SimpleNamespace(getpid=getpid, devnull=os.devnull)
        ran.append(0)
        with suppress(Retry):  # from before_start
            fleet.app.tasks[name].apply(throw=False)
    signals.task_prerun.disconnect(begins)
    return ran


@pytest.mark.parametrize("moved", [False, True], ids=["celery", "bridge"])
@pytest.mark.parametrize(("text", "runs"), HAPPENS.values(), ids=HAPPENS)
def test_what_is_read_is_what_happens(module: Any, text: str, runs: int, moved: bool) -> None:
    """The largest number of runs, whether its call fails or not: by Celery alone, and under the entry."""
    found = plan_of(module, CELERY + text)
    fleet: Any = sys.modules["fleet_of_a_test"]
    if moved:
        install_celery(fleet.app, Bridge(), policies={"job": found.entry})
    assert max(runs_of_job(fleet)) == runs


#: Celery's `apply` makes no retry that is caught, where its workers and the bridge do; nor one by hand.
CAUGHT = re.compile("around|swallow|does not raise|by hand|which the task sets")


@pytest.mark.parametrize("name", [name for name in EAGER if name in NOT_READ and not CAUGHT.search(name)])
def test_what_is_not_known_keeps_its_numbers(module: Any, name: str) -> None:
    """An empty policy, as a plain install, moves such a task, and it runs as often as before."""
    before = runs_of_job(module(CELERY + NOT_READ[name]))
    del sys.modules["fleet_of_a_test"]
    fleet = module(f"{CELERY}{NOT_READ[name]}\n")
    install_celery(fleet.app, Bridge(), policies={"job": {}})
    assert runs_of_job(fleet) == before


REQUESTS = {
    "nothing": ("pass", True),
    "a log of time limits": (
        "def on_timeout(self, soft, timeout):\n        result = super().on_timeout(soft, timeout)\n"
        "        print(self.name)\n        return result", True,
    ),
    "a log of failures": (
        "def on_failure(self, exc_info, send_failed_event=True, return_ok=False):\n        print(exc_info)\n"
        "        return super().on_failure(exc_info, send_failed_event=send_failed_event, "
        "return_ok=return_ok)", True,
    ),
    "failures that end here": ("def on_failure(self, exc_info, *args, **kwargs): pass  # HERE", False),
    "failures that are retried": (
        "def on_failure(self, exc_info, *args, **kwargs):  # HERE\n        self.task.retry(countdown=5)\n"
        "        return super().on_failure(exc_info, *args, **kwargs)", False,
    ),
    "another time limit": (
        "def on_timeout(self, soft, timeout): super().on_timeout(soft, timeout=1)  # HERE", False
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "is_read"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_class_of_its_own(module: Any, method: str, is_read: bool) -> None:
    """It works in the worker's main process. It is read as far as it hands on to Celery's own methods."""
    own = f"""
from celery.worker.request import Request
class Own(Request):
    {method}
class Custom(Task):
    Request = Own
@app.task(**BOUND, base=Custom)
def job(self):
    os.getpid()
"""
    found = plan_of(module, CELERY + own)
    assert bool(found.open) is not is_read
    assert is_read or found.native == NativeRetries.unknown()


def test_source_that_is_not_there() -> None:
    """Code without readable source may do anything with its task, so the plan knows nothing of the task."""
    names: dict[str, Any] = {"__name__": "elsewhere"}
    exec("def hidden(self):\n    print(self)\n", names)
    found = only(app_with(names["hidden"], bind=True))
    assert (found.native, found.open[0].why) == (NativeRetries.unknown(), "its source cannot be read")
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
