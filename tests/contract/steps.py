"""What each run of a test's job does: a test writes it down as data, which travels to a worker as JSON.

The nth argument of a job is the step of its nth run, and the last one repeats. `raises(OSError, "down")` is a
step, and so is each call of a function here under `@step`. A test that calls it makes the data
`[name, args, kwargs]`; a worker calls the function with its run. Any other value is what a run returns.
"""

from __future__ import annotations

import os
import pkgutil
import resource
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeAlias

from ojs_bridge import OJSError, Retry
from tests.contract import hostile
from tests.contract.notes import client, until

KEEP = {"on_exhaustion": "dead_letter"}
P = ParamSpec("P")
Step: TypeAlias = Any


class CardStolen(Exception):
    pass


class CardFraud(Exception):
    pass


class AuthExpired(Exception):
    pass


class Declined(OJSError):
    type = "bank.declined"
    code = "DISCARD"


class Opaque:
    """A value that no encoder knows."""

    def __repr__(self) -> str:
        return "<opaque>"


#: The error map of a task.
ERRORS: dict[type[BaseException], Any] = {
    CardStolen: "payment.card_stolen",
    CardFraud: ("payment.fraud", "DEAD_LETTER"),
}
#: Stands in the data of a step for an `Opaque`.
OPAQUE = {"opaque": True}


@dataclass(frozen=True)
class Run:
    """A run of a job, as its step sees it; `task` is Celery's, and `url` is that of the notes."""

    n: int
    task: Any = None
    named: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    again: Callable[[], object] | None = None

    def does(self, steps: Sequence[Step]) -> Any:
        """Do the step of this run."""
        return self.do(steps[min(self.n, len(steps)) - 1])

    def do(self, step: Step) -> Any:
        """Do a step, or return a value that is none."""
        if not isinstance(step, (list, tuple)) or len(step) != 3 or str(step[0]) not in STEPS:
            return step
        name, args, kwargs = step
        return STEPS[name](self, *_read(args), **_read(kwargs))


STEPS: dict[str, Callable[..., Any]] = {}


def step(does: Callable[Concatenate[Run, P], Any]) -> Callable[P, Step]:
    """Let a function be called for the data of a step; a run calls the function itself."""
    STEPS[does.__name__] = does

    def say(*args: P.args, **kwargs: P.kwargs) -> Step:
        return [does.__name__, _written([*args]), _written(kwargs)]

    return say


def an(error: type[BaseException], *args: Any, **kwargs: Any) -> Any:
    """An error among the arguments of a step."""
    return {"error": _written([error, [*args], kwargs])}


def _written(value: Any) -> Any:
    """A value with names in the place of classes."""
    if isinstance(value, type):
        return {"class": f"{value.__module__}.{value.__qualname__}"}
    if isinstance(value, dict):
        return {name: _written(each) for name, each in value.items()}
    return [_written(each) for each in value] if isinstance(value, (list, tuple)) else value


def _read(value: Any) -> Any:
    """The inverse of `_written`, for all but the steps inside a step, which the step itself does."""
    if isinstance(value, (list, tuple)):
        return value if len(value) == 3 and str(value[0]) in STEPS else [_read(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        return pkgutil.resolve_name(value["class"])
    if "error" in value:
        error, args, kwargs = _read(value["error"])
        return error(*args, **kwargs)
    return Opaque() if value == OPAQUE else {name: _read(each) for name, each in value.items()}


@step
def raises(run: Run, error: type[BaseException], *args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error."""
    raise error(*args, **kwargs)


@step
def raises_hostile(run: Run, name: str) -> NoReturn:
    """Raise an error that fights back."""
    raise hostile.ERRORS[name]("down")


@step
def raises_what_is_named(run: Run, error: type[BaseException], *args: Any, name: str) -> NoReturn:
    """Raise an error whose last argument the job was given by name."""
    raise error(*args, run.named[name])


@step
def raises_its_number(run: Run, text: str, padding: int = 0) -> NoReturn:
    """Raise an error of a text and the number of the run."""
    raise OSError(f"{text} {run.n}" + (" " + "x" * padding) * bool(padding))


@step
def raises_more_each_time(run: Run) -> NoReturn:
    """Raise an error that is too large for a header, the larger the later."""
    raise Retry("a" * 1000, "m" * 100_000, details={"object": Opaque(), "blob": "x" * (run.n - 1) * 100_000})


@step
def returns(run: Run, value: Any) -> Any:
    """Return a value that is only made in the worker."""
    return value


@step
def retries(run: Run, *, then: Step = None, due_in: Any = None, **options: Any) -> Any:
    """Call Celery's `self.retry`; then do another step, if that did not raise."""
    if due_in is not None:
        options["eta"] = run.task.app.now() + timedelta(seconds=due_in)
    run.task.retry(**options)
    return run.do(then)


@step
def calls_itself(run: Run, *steps: Step) -> Any:
    """Call the task as a function."""
    return run.task(*steps)


@step
def sets(run: Run, option: str, value: Any, then: Step = None) -> Any:
    """Set an option of the task; then do another step."""
    setattr(run.task, option, value)
    return run.do(then)


@step
def is_replaced_by(run: Run, name: str, *steps: Step) -> Any:
    """Replace this job by one of another task."""
    return run.task.replace(run.task.app.tasks[name].si(*steps))


@step
def calls(run: Run, name: str, *args: Any) -> Any:
    """Call a function by its full name."""
    return pkgutil.resolve_name(name)(*args)


@step
def asks(run: Run, url: str) -> int:
    """Ask a service, and return the status of its answer if it is none of an error."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return int(answer.status)


@step
def sends_again(run: Run, then: Step = None) -> Any:
    """Send the job's own message once more; then do another step."""
    assert run.again is not None
    run.again()
    return run.do(then)


@step
def waits_for(run: Run, key: str, then: Step = True) -> Any:
    """Wait until the test sets a key; then do another step."""
    until(run.url, key)
    return run.do(then)


@step
def sleeps(run: Run, seconds: float, then: Step = None) -> Any:
    """Sleep; then do another step."""
    time.sleep(seconds)
    return run.do(then)


@step
def naps(run: Run, seconds: float, then: Step = None) -> Any:
    """Sleep so lightly that an exception from another thread is heard at once; then do another step."""
    for _ in range(round(seconds * 100)):
        time.sleep(0.01)
    return run.do(then)


@step
def halts(run: Run) -> None:
    """Stop for the test to kill the worker."""
    client(run.url).rpush("halts", run.task.request.id)
    time.sleep(120)


@step
def dies(run: Run, *, at_once: bool = False) -> None:
    """Be killed."""
    sigkill(0 if at_once else 0.1)


def sigkill(after: float = 0.1) -> None:
    """Die; Celery itself runs a job again whose child dies within its first milliseconds."""
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


@step
def exits(run: Run) -> NoReturn:
    """Die by the job's own will."""
    time.sleep(0.1)
    os._exit(3)


@step
def takes_the_stack(run: Run, seconds: float) -> None:
    """Leave this process hardly any room on its stacks when the job has ended, for so many seconds."""
    room = sys.getrecursionlimit()

    def take() -> None:
        sys.setrecursionlimit(28)
        time.sleep(seconds)
        sys.setrecursionlimit(room)

    threading.Timer(0.3, take).start()


@step
def uses_up_descriptors(run: Run, seconds: float) -> None:
    """Open files until this process can open nothing more; close them after so many seconds."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))

    def let_go() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)

    threading.Timer(seconds, let_go).start()
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
