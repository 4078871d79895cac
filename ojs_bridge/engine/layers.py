"""The layers of a job's policy, from the framework to the job itself, and the rule `retry_on` beside them."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeAlias

from ..errors import ConfigurationError
from ..rules.backoff import CustomJitter, Rng
from ..rules.failures import ErrorMap
from ..rules.notations import read_duration
from ..rules.policy import AnyPartial, RetryPolicy, fields_of, known_words
from ..rules.responses import ANSWERS
from .threads import cached

logger = logging.getLogger("ojs_bridge")

#: A value of `retry_on`: `"failure"`, `"asked"`, exception classes, or their dotted names.
RetryOnLike: TypeAlias = "str | type[BaseException] | Sequence[str | type[BaseException]]"

_FAILURE, _ASKED = "failure", "asked"
#: Why a failure is not retried.
NOT_ASKED = "which this task does not ask to retry"


class RetryOn:
    """The failures of a task that are retried, while attempts are left.

    With `"failure"` all failures are retried, and with `"asked"` those for which the task's code asks. With
    exception classes their instances are retried, too, but none of `never`. A class may be given by its name,
    as in `"shop.SoldOut"`: a worker imports it when it starts. `place` is where the value was written. Raises
    ConfigurationError.
    """

    def __init__(
        self, said: RetryOnLike, place: str = "retry_on", *, never: tuple[type[BaseException], ...] = ()
    ) -> None:
        #: Whether every failure is retried.
        self.is_every = said == _FAILURE
        #: Whether a failure is retried only if the code asks for it.
        self.is_asked = said == _ASKED
        self._place, self._never = place, never
        self._named = [] if self.is_every or self.is_asked else _listed(said, place)
        self._classes: tuple[type[BaseException], ...] | None = None

    def rules_out(self, exc: BaseException) -> str | None:
        """Return why an error of the task's code is not retried, or None; raises ConfigurationError."""
        if self.is_every or issubclass(type(exc), ANSWERS):
            return None
        if issubclass(type(exc), self.resolve()) and not issubclass(type(exc), self._never):
            return None
        return NOT_ASKED

    def resolve(self) -> tuple[type[BaseException], ...]:
        """Return the classes; raises ConfigurationError for a name that stands for no class."""
        if self._classes is None:
            self._classes = tuple(_class(self._place, named) for named in self._named)
        return self._classes


def _listed(said: object, place: str) -> list[Any]:
    listed = [*said] if isinstance(said, (list, tuple)) else [said]
    for named in listed:
        if not ((isinstance(named, str) and named) or is_exception(named)):
            raise ConfigurationError(
                f"{place}: {named!r} must be 'failure', 'asked', or exception classes, or names of them"
            )
    return listed


def _class(place: str, named: Any) -> type[BaseException]:
    cls: Any = imported(place, named)
    if not is_exception(cls):
        raise ConfigurationError(f"{place}: {named!r} is no exception class")
    return cls  # type: ignore[no-any-return]


#: The specification: every failure is retried that is not non-retryable.
EVERY_FAILURE = RetryOn(_FAILURE)
#: Only what the code of a task asks for.
ASKED = RetryOn(_ASKED)


def is_exception(cls: object) -> bool:
    """Return whether a value is an exception class."""
    return isinstance(cls, type) and issubclass(cls, BaseException)


def imported(place: str, name: Any) -> Any:
    """Import a dotted name and return its value; a value that is no text is returned as it is.

    A builtin needs no module. `place` is where the name was written. Raises ConfigurationError.
    """
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module) if module else builtins, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{place}: {name!r} cannot be imported: {error}") from error


#: The field that says how often a job runs, and the fields that together say when.
ATTEMPTS = "max_attempts"
INTERVALS = frozenset({"initial_interval", "max_interval"})
WAITS = INTERVALS | {"backoff_coefficient", "backoff_strategy", "jitter"}
NUMBERS = WAITS | {ATTEMPTS}


@dataclass(frozen=True, slots=True)
class NativeJitter:
    """A framework's own way to draw a wait. It counts until an owner sets one of the fields in WAITS.

    Then, and where a policy stands in JSON, `initial_interval` is `interval`, with which the specification's
    jitter has the same mean below the cap. `said` is True if the task's own options ask for a jitter.
    """

    draw: CustomJitter
    interval: str
    said: bool | None

    def __call__(self, n: int, seconds: float, rng: Rng) -> float:
        """Return the delay of a retry with jitter, in seconds."""
        return self.draw(n, seconds, rng)


def in_ojs(partial: Mapping[str, Any]) -> dict[str, Any]:
    """Return a partial policy without a framework's own jitter."""
    jitter = partial.get("jitter")
    if not isinstance(jitter, NativeJitter):
        return dict(partial)
    return {**partial, "initial_interval": jitter.interval, "jitter": jitter.said}


def with_ojs_jitter(policy: RetryPolicy) -> RetryPolicy:
    """Return a policy with the specification's jitter in the place of a framework's own."""
    if not isinstance(policy.jitter, NativeJitter):
        return policy
    return RetryPolicy.merge(policy, {"initial_interval": policy.jitter.interval, "jitter": True})


@dataclass(frozen=True)
class Layers:
    """The partial policies of a job in their order: a later one wins field by field.

    Between `initial_interval` and `max_interval`, a native option gives way to an owner's field.

    `framework` is what the framework does without any option, and `options` and `message` are the native
    options of the task and of its message. An owner says the others: `app`, `install`, `task` and `job`.
    `retry_on` says which failures are retried; None is Celery's way: those that the code asks for, until an
    owner says how often a job runs.
    """

    framework: Mapping[str, Any] = field(default_factory=dict)
    app: AnyPartial | None = None
    options: Mapping[str, Any] | None = None
    message: Mapping[str, Any] | None = None
    install: Sequence[AnyPartial] = ()
    task: AnyPartial | None = None
    job: AnyPartial | None = None
    retry_on: RetryOn | None = EVERY_FAILURE

    def policy(self) -> RetryPolicy:
        """Merge the layers; raises InvalidRetryPolicy."""
        framework, options, message = self.framework, self.options, self.message
        if not NUMBERS.isdisjoint(self._numbers):
            framework = {name: value for name, value in framework.items() if name not in WAITS}
        if message and not INTERVALS.isdisjoint(self._said["install"] | self._said["task"]):
            message = {name: value for name, value in message.items() if name not in INTERVALS}
        if not WAITS.isdisjoint(self._numbers):
            # Only native options have a framework's own jitter.
            options, message = options and in_ojs(options), message and in_ojs(message)
        owners, native = (*self.install, self.task, self.job), {**(options or {}), **(message or {})}
        if not INTERVALS.isdisjoint(native) and not INTERVALS.isdisjoint(self._numbers):
            native = _giving_way(native, owners)
        return RetryPolicy.merge(framework, self.app, native, *owners)

    def owner(self, name: str) -> str | None:
        """Return the owner that has set a field: job, task, install or app; None if none has."""
        for owner, said in self._said.items():
            if name in said:
                return owner
        return None

    @property
    def limit_is_native(self) -> bool:
        """Whether the framework says how often the job runs, because no owner has said it."""
        return bool(self.framework) and self.owner(ATTEMPTS) is None

    @property
    def waits_are_native(self) -> bool:
        """Whether the framework says when the job is retried, because no owner has set a number."""
        return bool(self.framework) and NUMBERS.isdisjoint(self._numbers)

    @property
    def is_native(self) -> bool:
        """Whether the framework says both: how often the job runs, and when it is retried."""
        return self.limit_is_native and self.waits_are_native

    @property
    def retries(self) -> RetryOn:
        """The failures that are retried."""
        if self.retry_on is None:
            return ASKED if self.owner(ATTEMPTS) is None else EVERY_FAILURE
        return self.retry_on

    @cached
    def _said(self) -> dict[str, frozenset[str]]:
        """The fields that each owner has set, the last owner first."""
        return {
            "job": frozenset(fields_of(self.job)),
            "task": frozenset(fields_of(self.task)),
            "install": frozenset().union(*map(fields_of, self.install)),
            "app": frozenset(fields_of(self.app)),
        }

    @cached
    def _numbers(self) -> frozenset[str]:
        """The fields by which owners say when a job runs.

        A job that says how often it runs leaves it to its task when it runs.
        """
        job, *others = self._said.values()
        return (job - {ATTEMPTS}).union(*others) & NUMBERS


def _giving_way(native: dict[str, Any], owners: Iterable[AnyPartial | None]) -> dict[str, Any]:
    """Return native options beneath those of owners: an interval that contradicts an owner's gives way.

    The shortest wait is no longer than an owner's longest wait, and the longest no shorter than an owner's
    shortest.
    """
    said: dict[str, Any] = {}
    for owner in owners:
        said.update(fields_of(owner))
    with suppress(TypeError, ValueError):  # the validation names what is no duration
        if "max_interval" in said and "initial_interval" in native:
            native["initial_interval"] = min(
                map(read_duration, (native["initial_interval"], said["max_interval"]))
            )
        if "initial_interval" in said and "max_interval" in native:
            native["max_interval"] = max(
                map(read_duration, (native["max_interval"], said["initial_interval"]))
            )
    return native


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """The settings of one task or actor, resolved once: the policy of its layers, and its error map.

    With `afresh` a job that was on its way when the bridge came, and is beyond its limit, begins at
    attempt 1.
    """

    layers: Layers
    policy: RetryPolicy
    errors: ErrorMap
    afresh: bool = False

    def of_message(self, native: Mapping[str, Any]) -> TaskPolicy:
        """Return the settings of a message that brings native options; raises InvalidRetryPolicy."""
        layers = replace(self.layers, message=native)
        return replace(self, layers=layers, policy=layers.policy())

    def of_job(self, retry: Mapping[str, Any] | None) -> TaskPolicy:
        """Return the settings of a message that may bring a partial policy; raises InvalidRetryPolicy.

        A word that this release does not know has no effect, and the log says so once.
        """
        if not retry:
            return self
        known = known_words(retry)
        if len(known) < len(retry):
            _tell_unknown(*sorted(f"{name!s:.80}" for name in retry.keys() - known.keys()))
        layers = replace(self.layers, job=known)
        return replace(self, layers=layers, policy=layers.policy())


@lru_cache
def _tell_unknown(*words: str) -> None:
    logger.warning(
        "the policy of a message has words that this release of ojs-bridge does not know, %s: "
        "they have no effect here, and its retries carry them on",
        ", ".join(map(repr, words)),
    )
