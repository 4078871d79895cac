"""The actors of a broker and their policies: each is resolved once, when the actor is declared."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from numbers import Real
from typing import Any

from dramatiq import Actor, Message
from dramatiq.middleware import Retries
from dramatiq.middleware.middleware import MiddlewareError
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF, DEFAULT_MIN_BACKOFF

from ..adapters.terms import Terms, misnamed
from ..bridge import Bridge
from ..config.policies import MISNAMED
from ..engine.layers import INTERVALS, WAITS, Layers, NativeJitter, TaskPolicy, in_ojs
from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState
from ..messages import DEPENDS_OPTION, OUTBOX_OPTION, RETRY_OPTION
from ..rules.backoff import Rng
from ..rules.job import Job
from ..rules.notations import format_interval
from ..rules.policy import LARGEST
from .translate import WORKER_ERRORS, InvalidOptions, bare_job, job_of

logger = logging.getLogger("ojs_bridge")

#: The actor option that says which failures are retried (`retry_on`).
RETRY_ON_OPTION = "ojs_retry_on"
#: The actor option that carries an error map.
ERRORS_OPTION = "ojs_errors"
#: The actor option that says whether its long delays wait in the store.
PARK_OPTION = "ojs_park_delays"

#: The settings of a broker that has no `Retries`, and what Dramatiq then does with each of its actors.
NO_RETRIES: Mapping[str, Any] = {"max_retries": 0}
ONCE: Mapping[str, Any] = {"max_attempts": 1}

#: How many ids of messages that were made and not sent a process knows at most.
_MOST_UNSENT = 10_000

#: The mean of the factor by which Dramatiq's jitter stretches a wait.
_MEAN = 1.5

#: The native options that a message may bring, and the field of a policy that each of them sets.
NATIVE_FIELDS = (
    ("max_retries", "max_attempts"),
    ("min_backoff", "initial_interval"),
    ("max_backoff", "max_interval"),
)
INTERVAL_OPTIONS = frozenset(("min_backoff", "max_backoff"))
OF_MESSAGES = INTERVAL_OPTIONS | {"max_retries"}
#: The options that `Retries` alone reads.
OF_RETRIES = OF_MESSAGES | {"on_retry_exhausted", "retry_when"}


class BootError(MiddlewareError, ConfigurationError):
    """The worker cannot start as it is set up. Dramatiq would swallow it if it were no MiddlewareError."""


class Actors:
    """The policies of a broker's actors; the canary says which of their jobs are under the bridge."""

    def __init__(self, bridge: Bridge, terms: Terms) -> None:
        self._bridge, self._terms = bridge, terms
        #: The actors of whose jobs the canary takes only a part.
        self._partly: set[str] = set()
        #: The policies by actor name; None for an actor that keeps the native retries.
        self.tasks: dict[str, TaskPolicy | None] = {}
        #: The shortest and the longest native waits by actor name, which a message may change one by one.
        self._backoffs: dict[str, dict[str, Any]] = {}
        #: The actors whose `retry_when` decides, so that Dramatiq reads no `max_retries`.
        self._asking: set[str] = set()
        #: Why an actor keeps the native retries, if it is not for the policies.
        self._wrong: dict[str, str] = {}
        #: The policy of an actor that this process does not know.
        self.undeclared = bridge.engine.task()
        #: The ids of messages that a process has made and not sent, with the process; None if nobody asks.
        self.unsent: OrderedDict[str, int] | None = None
        #: The actors and native options of which the log has said that they meet a policy.
        self._met: set[tuple[str, str]] = set()
        #: The settings of the stock `Retries`; None if the broker never had it.
        self.stock: Mapping[str, Any] | None = None

    def declare(self, actor: Actor[..., Any]) -> None:
        """Resolve an actor's policy; raises InvalidRetryPolicy and ConfigurationError."""
        name, options = actor.actor_name, actor.options
        own, said = options.get(RETRY_OPTION), options.get(RETRY_ON_OPTION)
        self._check_options(actor)
        make = functools.partial(self._new_message, actor, actor.message_with_options)
        actor.message_with_options = make  # type: ignore[method-assign]
        is_own = own is not None or said is not None
        if not (is_own or self._terms.canary.covers_all(name)):
            self._partly.add(name)
        if self._terms.policies.of(name) is None and not is_own:
            self.tasks[name] = None
            return
        waits = {**(self.stock or {}), **options}
        wrong = unreadable(options if self.stock is NO_RETRIES else waits)
        if wrong:
            self._leave_native(name, options, wrong, is_own=is_own)
            return
        self._backoffs[name] = {key: waits[key] for key in INTERVAL_OPTIONS & waits.keys()}
        try:
            self._bridge.engine.dependencies.declare(name, options.get(DEPENDS_OPTION))
            native = self._native(options) if own is None else Layers(options=options_as_policy(options))
            task = self.tasks[name] = self._bridge.engine.task(
                self._terms.policies.layers("actor", name, native, own, said),
                errors=options.get(ERRORS_OPTION),
                reserved=WORKER_ERRORS,
                afresh=self._terms.begins_afresh,
            )
        except InvalidRetryPolicy as error:
            raise InvalidOptions(error.under(f"actor {name}").problems) from None
        except ConfigurationError as error:
            raise BootError(f"actor {name}: {error}") from None
        if self.stock and self.stock.get("retry_when") is not None and task.layers.limit_is_native:
            options.setdefault("retry_when", self.stock["retry_when"])
        if options.get("retry_when") is not None:
            self._asking.add(name)
        if task.layers.framework is ONCE and (unread := sorted(OF_RETRIES & options.keys())):
            logger.warning(
                "actor %s: %s is not read, as before, because its broker has no Retries",
                *(name, ", ".join(unread)),
            )

    def _check_options(self, actor: Actor[..., Any]) -> None:
        name, options = actor.actor_name, actor.options
        if not MISNAMED.isdisjoint(options) and (lines := self._misnamed(actor, options, ours=True)):
            raise InvalidOptions([f"actor {name}: {line}" for line in lines])
        for option in (PARK_OPTION, OUTBOX_OPTION):
            if (said := options.get(option)) not in (None, True, False):
                raise BootError(f"actor {name}: {option}: {said!r} must be true or false")

    def _new_message(
        self, actor: Actor[..., Any], make: Callable[..., Message[Any]], **options: Any
    ) -> Message[Any]:
        """Make a message of an actor; a policy of its own is checked here, before a group sends the first."""
        if not MISNAMED.isdisjoint(options) and (lines := self._misnamed(actor, options, ours=False)):
            raise InvalidOptions([f"a message of {actor.actor_name}: {line}" for line in lines])
        message = make(**options)
        if options.get(RETRY_OPTION) is not None:
            self.header_of(message, options[RETRY_OPTION])
        # An actor of a class of its own may give its messages ids that they share.
        if self.unsent is not None and getattr(make, "__func__", None) is Actor.message_with_options:
            self.unsent[message.message_id] = os.getpid()
            if len(self.unsent) > _MOST_UNSENT:
                self.unsent.popitem(last=False)
        return message

    def _misnamed(self, actor: Actor[..., Any], options: Mapping[str, Any], *, ours: bool) -> list[str]:
        """Return the lines of `misnamed`, without the options that another middleware knows."""
        others = [m.actor_options for m in actor.broker.middleware if not isinstance(m, Retries)]
        known = set[str]().union(*others)
        unknown = {name: value for name, value in options.items() if name not in known}
        return misnamed(unknown, RETRY_OPTION, ours=ours)

    def task_of(self, message: Message[Any]) -> TaskPolicy | None:
        """Return the policy of a message's job; None if Dramatiq itself retries it."""
        name = message.actor_name
        task = self.tasks.get(name)
        if task is None or name not in self._partly:
            return task
        return task if self._terms.canary.covers(name, message.message_id) or _wishes(message) else None

    def of_message(self, task: TaskPolicy, message: Message[Any]) -> TaskPolicy:
        """Return an actor's policy with the native options of a message; raises InvalidRetryPolicy.

        The shortest and the longest wait go together: one that the message does not bring is its actor's. The
        log says once of each option that it meets a policy.
        """
        layers = task.layers
        if OF_MESSAGES.isdisjoint(message.options) or (layers.framework is ONCE and layers.limit_is_native):
            return task
        options = self._brought(message)
        if not INTERVAL_OPTIONS.isdisjoint(options):
            options = {**self._backoffs.get(message.actor_name, {}), **options}
        native = options_as_policy(options)
        if not native:
            return task
        self._say_meetings(task, message, in_ojs(native) if any(map(layers.owner, WAITS)) else native)
        return task.of_message(native)

    def _brought(self, message: Message[Any]) -> dict[str, Any]:
        """Return the native options of a message that count; one that cannot be read does not."""
        name = message.actor_name
        options = {option: message.options[option] for option in OF_MESSAGES & message.options.keys()}
        if name in self._asking:
            options.pop("max_retries", None)
        for option, why in unreadable(options).items():
            del options[option]
            if (name, option) not in self._met:
                self._met.add((name, option))
                logger.warning("actor %s: %s of its messages does not count: %s", name, option, why)
        return options

    def _say_meetings(self, task: TaskPolicy, message: Message[Any], native: Mapping[str, Any]) -> None:
        for option, field in NATIVE_FIELDS:
            met = message.actor_name, option
            owners = {*map(task.layers.owner, INTERVALS if field in INTERVALS else [field])}
            counts = owners.isdisjoint(("install", "task"))
            if option not in message.options or met in self._met or (counts and not task.layers.owner(field)):
                continue
            said = task.policy.to_ojs(only={field: native[field]})[field]
            if said == native[field]:
                continue
            self._met.add(met)
            word = "counts" if counts else "does not count"
            logger.warning(
                "actor %s: %s=%r of its messages %s, where a policy says %s=%r",
                *(message.actor_name, option, message.options[option], word, field, said),
            )

    def header_of(self, message: Message[Any], partial: Any) -> dict[str, Any]:
        """Return the header of a message that brings its own partial policy; raises InvalidRetryPolicy."""
        name = message.actor_name
        task = self.tasks.get(name, self.undeclared)
        if task is None:
            why = self._wrong.get(name, "`policies` leaves this actor to native retries")
            raise InvalidOptions([f"{RETRY_OPTION} of {name}: {why}"])
        try:
            return self._bridge.engine.initial_header(bare_job(message), task, partial).state
        except InvalidRetryPolicy as error:
            raise InvalidOptions(error.under(f"{RETRY_OPTION} of {name}").problems) from None

    def check(self, names: Collection[str]) -> None:
        """Check the set-up as a worker starts, and say in the log which jobs the canary takes.

        Raises BootError for a pattern of `policies` that matches none of these names, for a pattern of
        `canary` that matches no actor with a policy, for a class in a `retry_on` that cannot be imported, and
        for an `acks_late` among the policies.
        """
        moved = [name for name, task in self.tasks.items() if task is not None]
        try:
            if self._terms.policies.acks_late:
                raise ConfigurationError("policies: acks_late is an option of Celery's tasks alone")
            self._terms.policies.check(names, "actor of this broker")
            for task in self.tasks.values():
                if task is not None:
                    task.layers.retries.resolve()
            self._terms.canary.check(moved, "actor under the bridge")
        except ConfigurationError as error:
            raise BootError(str(error)) from None
        self._bridge.engine.tell_unused(names, "actor of this broker")
        if not self._partly.isdisjoint(moved):
            canary = self._terms.canary
            logger.warning("canary: under the bridge are %s; Dramatiq itself retries the rest", canary)

    def _leave_native(
        self, name: str, options: dict[str, Any], wrong: Mapping[str, str], *, is_own: bool
    ) -> None:
        """Leave an actor to Dramatiq whose options cannot be read; it harms no other actor.

        Raises InvalidOptions for one that has a policy of its own.
        """
        if is_own:
            raise InvalidOptions([f"actor {name}: {line}" for line in wrong.values()])
        self.tasks[name] = None
        self._wrong[name] = f"it keeps the native retries, for {'; '.join(wrong.values())}"
        logger.warning("actor %s: %s", name, self._wrong[name])
        if "throws" in wrong:
            # Dramatiq loses the thread of a run that fails with such a `throws`.
            del options["throws"]

    def _native(self, options: Mapping[str, Any]) -> Layers:
        """Return what Dramatiq alone does with an actor: its options over those of the stock `Retries`."""
        if self.stock is None:
            return Layers(options=options_as_policy(options))
        if self.stock is NO_RETRIES:
            return Layers(ONCE)
        framework = options_as_policy({**self.stock, **options})
        said = {name: framework[name] for name in options_as_policy(options)}
        return Layers({**framework, "on_exhaustion": "dead_letter"}, options=said)


def _wishes(message: Message[Any]) -> bool:
    """Return whether a job has a policy of its own, or an unreadable header, which may hold a policy."""
    if message.options.get(RETRY_OPTION) is not None:
        return True
    job = job_of(message, Job(message.message_id, message.actor_name, message.queue_name))
    return isinstance(job, InvalidState) or bool(job.retry)


def unreadable(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the native options that cannot be read, each with the reason; Dramatiq fails over them, too."""
    wrong = {}
    for name in sorted(OF_MESSAGES & options.keys()):
        value, is_time = options[name], name in INTERVAL_OPTIONS
        if value is None or isinstance(value, int) or (is_time and isinstance(value, timedelta)):
            continue
        is_number = isinstance(value, (Real, Decimal)) and not math.isnan(value)
        if not is_number or (is_time and math.isinf(value)):
            wrong[name] = f"{name}={value!r} is no number"
    if not names_exceptions(options.get("throws")):
        wrong["throws"] = f"throws={options['throws']!r} must be exception classes"
    return wrong


def names_exceptions(throws: Any) -> bool:
    """Return whether a `throws` option can be matched; with any other value Dramatiq loses a thread."""
    try:
        return not throws or not isinstance(None, throws)
    except Exception:  # noqa: BLE001 - a metaclass is the user's code
        return False


def without_bad_throws(message: Message[Any], job: Job) -> None:
    """Take a `throws` option from a message with which Dramatiq would lose a thread; the log says so."""
    if not names_exceptions(message.options.get("throws")):
        logger.warning("job %s: its throws option names no exception classes", job)
        del message.options["throws"]


def options_as_policy(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the native options of an actor or a message as a partial policy.

    `max_retries` counts retries, and `max_attempts` runs. `retry_when` takes the place of `max_retries`. The
    jitter is Dramatiq's own: it draws a wait between once and twice `min_backoff`, where the specification
    draws between half and one and a half times `initial_interval`. The options must be readable.
    """
    partial: dict[str, Any] = {}
    if options.get("retry_when") is not None:
        partial["max_attempts"] = LARGEST
    elif "max_retries" in options:
        retries = options["max_retries"]
        is_endless = retries is None or not retries < LARGEST
        partial["max_attempts"] = LARGEST if is_endless else max(math.ceil(retries), 0) + 1
    if options.get("min_backoff") is not None or options.get("max_backoff") is not None:
        partial.update(_intervals(options.get("min_backoff"), options.get("max_backoff")))
    return partial


def _intervals(first: Any, longest: Any) -> dict[str, Any]:
    first, longest = (
        each / timedelta(milliseconds=1) if isinstance(each, timedelta) else each for each in (first, longest)
    )
    cap = DEFAULT_MAX_BACKOFF if longest is None else min(max(longest, 1), DEFAULT_MAX_BACKOFF)
    if first is not None and first <= 0:
        first, cap = 0, 1  # Dramatiq doubles a wait of zero, and it stays zero.
    # The cap comes first: JSON has integers that no float can hold.
    least = float(min(DEFAULT_MIN_BACKOFF if first is None else first, cap))
    start, mean = (min(max(each, 1), float(cap)) for each in (least, _MEAN * least))
    jitter = NativeJitter(_Jitter(float(cap) / 1000), _duration(mean), said=None)
    return {"initial_interval": _duration(start), "max_interval": _duration(float(cap)), "jitter": jitter}


@dataclass(frozen=True, slots=True)
class _Jitter:
    """Draws as Dramatiq does: from once to twice a wait, and between half the cap and the cap beyond it."""

    cap: float

    def __call__(self, _n: int, seconds: float, rng: Rng) -> float:
        drawn = seconds * (1 + rng.random())
        return drawn if drawn <= self.cap else self.cap * (1 + rng.random()) / 2


def _duration(milliseconds: float) -> str:
    return format_interval(timedelta(milliseconds=milliseconds))
