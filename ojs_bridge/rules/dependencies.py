"""Dependencies: what jobs need that may fail, such as a bank's API; which of them a job has, and an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

from ..errors import ConfigurationError
from .breaker import Breaker
from .budget import Budget
from .decision import EXPIRED, Complete, DeadLettered, Decision, Discarded, RetryAt
from .failures import TIMEOUT, VISIBILITY_TIMEOUT, WORKER_DEATH, Failure
from .notations import check_pattern, matches, rate_at
from .rates import every_of

#: The `ojs_depends` of a task or an actor: the name of a dependency, or several, which may have weights.
DependsLike: TypeAlias = "str | Sequence[str] | Mapping[str, int] | None"
#: The most for which a job counts where no concurrency bounds it.
MAX_WEIGHT = 1000
#: The last words of error types that a dependency gives when it works: it answers, if only to refuse.
ANSWERS = ("rate_limited", "unauthorized", "rejected")
#: The types of failures that say nothing of a dependency, unless they are among its errors.
_SILENT = {TIMEOUT, VISIBILITY_TIMEOUT, WORKER_DEATH, EXPIRED}


@dataclass(frozen=True, slots=True)
class Dependency:
    """A dependency of jobs: it has the errors of some types, and the jobs of some types need it.

    `errors` and `jobs` are lists of patterns, such as `external.stripe.*` and `billing.*`. A job may also say
    with `ojs_depends` that it needs it. Both may also be mappings to weights: a job of `{"reports.*": 5}`
    counts for five. The `breaker` holds its jobs while it fails. No more of them begin
    than the `rate` allows, such as `"100/m"`, and no more run at a time than `concurrency` says, all workers
    together. With a `key`, the name of an argument, each value of this argument has a rate and a concurrency
    of its own. Their retries are at most such a share of their first attempts as the `budget` says, a Budget
    or only its share, such as 0.2. Raises ConfigurationError.
    """

    name: str
    errors: Sequence[str] = ()
    jobs: Sequence[str] | Mapping[str, int] = field(default=(), hash=False)
    breaker: Breaker | None = None
    rate: str | float | None = None
    concurrency: int | None = None
    key: str | None = None
    budget: Budget | float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ConfigurationError(f"dependency: name: {self.name!r:.100} must be a name")
        place = f"dependency {self.name!r}"
        for name in ("errors", "jobs"):
            patterns: Any = getattr(self, name)
            has_weights = name == "jobs" and isinstance(patterns, Mapping)
            if isinstance(patterns, str) or not (isinstance(patterns, Sequence) or has_weights):
                raise ConfigurationError(f"{place}: {name}: {patterns!r:.100} must be a list of patterns")
            try:
                for pattern in patterns:
                    check_pattern(f"{place}: {name}", "" if pattern is None else pattern)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
            object.__setattr__(self, name, patterns if has_weights else tuple(patterns))
        if not (self.errors or self.jobs or self.is_limited or self.budget is not None):
            raise ConfigurationError(f"{place}: errors, jobs: at least one of them must have a pattern")
        if self.breaker is not None and not isinstance(self.breaker, Breaker):
            raise ConfigurationError(f"{place}: breaker: {self.breaker!r:.100} is not a Breaker")
        if self.breaker and not self.errors:
            raise ConfigurationError(
                f"{place}: errors: a breaker needs the patterns of the errors that it counts"
            )
        self._check_limits(place)

    def _check_limits(self, place: str) -> None:
        if self.rate is not None:
            rate_at(f"{place}: rate", self.rate)
        try:
            object.__setattr__(self, "budget", None if self.budget is None else Budget.of(self.budget))
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from None
        most, key = self.concurrency, self.key
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigurationError(f"{place}: concurrency: {most!r:.100} must be an integer of at least 1")
        if key is not None and not (isinstance(key, str) and key):
            raise ConfigurationError(f"{place}: key: {key!r:.100} must be the name of an argument")
        if key is not None and not self.is_limited:
            raise ConfigurationError(f"{place}: key: {key!r} needs a rate or a concurrency beside it")
        for pattern, weight in self.jobs.items() if isinstance(self.jobs, Mapping) else ():
            self.check_weight(f"{place}: jobs: {pattern!r:.100}", weight)

    def check_weight(self, place: str, weight: object) -> None:
        """Raise ConfigurationError, which begins with a place, for a weight that no job may have here."""
        most, of = (self.concurrency, "the concurrency, ") if self.concurrency else (MAX_WEIGHT, "")
        if type(weight) is not int or not 1 <= weight <= most:
            rule = f"an integer of at least 1, and at most {of}{most:,}"
            raise ConfigurationError(f"{place}: {weight!r:.100} must be {rule}")

    def weight(self, type_: str) -> int:
        """Return for how many jobs one of a type counts: as the first pattern says that matches it."""
        weights = self.jobs.items() if isinstance(self.jobs, Mapping) else ()
        return next((weight for pattern, weight in weights if matches(type_, pattern)), 1)

    @property
    def is_limited(self) -> bool:
        """Whether it has a rate or a concurrency."""
        return self.rate is not None or self.concurrency is not None

    @property
    def every(self) -> timedelta | None:
        """The length of time in which one job begins, by its rate; None without a rate."""
        return None if self.rate is None else every_of(self.rate)

    def has_error(self, error_type: str) -> bool:
        """Return whether an error type is one of its errors."""
        return any(matches(error_type, pattern) for pattern in self.errors)


class Dependencies:
    """The dependencies of a fleet by name, and those of each job type. Raises ConfigurationError."""

    def __init__(self, declared: Iterable[Dependency] = ()) -> None:
        if isinstance(declared, str | Mapping) or not isinstance(declared, Iterable):
            raise ConfigurationError(f"dependencies: {declared!r:.100} must be a list of Dependencies")
        self.by_name: dict[str, Dependency] = {}
        for one in declared:
            if not isinstance(one, Dependency):
                raise ConfigurationError(f"dependencies: {one!r:.100} is not a Dependency")
            if one.name in self.by_name:
                raise ConfigurationError(f"dependencies: two are called {one.name!r}")
            self.by_name[one.name] = one
        #: The job types that say themselves what they need.
        self._said: dict[str, Mapping[str, int | None]] = {}
        self._of_type: dict[str, tuple[Dependency, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def declare(self, type_: str, depends: DependsLike) -> None:
        """Take what a job type says with `ojs_depends`.

        Raises ConfigurationError for an unknown name, and for a wrong weight.
        """
        several = isinstance(depends, list | tuple | set | Mapping)
        names: Any = depends if several else (depends,) if depends else ()
        said: Mapping[str, int | None] = depends if isinstance(depends, Mapping) else dict.fromkeys(names)
        for name in names:
            if not isinstance(name, str) or name not in self.by_name:
                known = ", ".join(self.by_name) or "none"
                raise ConfigurationError(
                    f"ojs_depends: {name!r:.100} is not the name of a dependency; there are: {known}"
                )
            if isinstance(depends, Mapping):
                self.by_name[name].check_weight(f"ojs_depends: {name!r:.100}", depends[name])
        if said != self._said.get(type_, {}):
            self._said[type_] = said
            self._of_type.pop(type_, None)

    def of_type(self, type_: str) -> tuple[Dependency, ...]:
        """Return the dependencies of a job type, in the order in which they are declared."""
        found = self._of_type.get(type_)
        if found is None:
            said = self._said.get(type_, {})
            found = self._of_type[type_] = tuple(
                one
                for one in self.by_name.values()
                if one.name in said or any(matches(type_, pattern) for pattern in one.jobs)
            )
        return found

    def weight(self, dependency: Dependency, type_: str) -> int:
        """Return for how many jobs one of a type counts: as it says itself, or as the dependency says."""
        return self._said.get(type_, {}).get(dependency.name) or dependency.weight(type_)

    def jobs_of(self, name: str) -> tuple[str, ...]:
        """Return the patterns of the jobs that need a dependency, and the types that say so themselves."""
        patterns = self.by_name[name].jobs
        said = (type_ for type_, names in self._said.items() if name in names)
        return (*patterns, *(type_ for type_ in said if not any(matches(type_, p) for p in patterns)))

    def unused(self, types: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the patterns of jobs that match none of some types, each after its dependency's name.

        The pattern is empty if a dependency has limits, and no jobs.
        """
        for one in self.by_name.values():
            if (one.is_limited or one.budget) and not self.jobs_of(one.name):
                yield one.name, ""
            for pattern in one.jobs:
                if not any(matches(type_, pattern) for type_ in types):
                    yield one.name, pattern

    def names_of(self, type_: str) -> Sequence[str]:
        """Return the names of the dependencies of a job type."""
        return [one.name for one in self.of_type(type_)]

    @property
    def limited(self) -> Sequence[Dependency]:
        """Those that have a rate or a concurrency."""
        return [one for one in self.by_name.values() if one.is_limited]

    @property
    def budgets(self) -> Mapping[str, Budget]:
        """The budgets of those that have one, by their names."""
        return {name: Budget.of(one.budget) for name, one in self.by_name.items() if one.budget}

    def of_error(self, error_type: str, among: Iterable[Dependency] | None = None) -> Dependency | None:
        """Return the first dependency, of some or of all, that has an error type; None if none has it."""
        ones = self.by_name.values() if among is None else among
        return next((one for one in ones if one.has_error(error_type)), None)


def outcomes(depends: Sequence[Dependency], decision: Decision) -> Iterator[tuple[Dependency, bool]]:
    """Yield what the end of a run says of its job's dependencies: each with whether it has failed.

    A failure is that of the first dependency that has its type, and says nothing of the others. With an error
    of none of them, they have worked.
    """
    failure = failure_in(decision)
    if failure is None:
        if isinstance(decision, Complete):
            yield from ((one, False) for one in depends)
        return
    if at_fault := next((one for one in depends if one.has_error(failure.type)), None):
        yield at_fault, failure.type.rpartition(".")[2] not in ANSWERS
    elif failure.type not in _SILENT and getattr(decision, "cause", "") != "invalid":
        yield from ((one, False) for one in depends)


def failure_in(decision: Decision) -> Failure | None:
    """Return the failure of a run, if it has failed."""
    return decision.failure if isinstance(decision, RetryAt | Discarded | DeadLettered) else None


def limited(depends: Sequence[Dependency], failure: Failure) -> Dependency | None:
    """Return the dependency that has answered that there are too many calls; None if no answer says so.

    It is the first that has the error's type, or else the only one of the job.
    """
    if failure.type.rpartition(".")[2] != ANSWERS[0]:
        return None
    its = next((one for one in depends if one.has_error(failure.type)), None)
    return its or (depends[0] if len(depends) == 1 else None)
