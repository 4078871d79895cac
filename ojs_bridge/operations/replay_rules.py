"""Rules that replay dead letters automatically (spec section dlq 7, DLQ-R003)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..engine.context import Context
from ..engine.events import dead_letter
from ..engine.ports import Override
from ..engine.scheduler import once_a_period
from ..errors import ConfigurationError
from ..rules.duration import read_duration
from ..rules.job import Job
from ..rules.patterns import check_pattern
from ..store import Letter, LetterFilter
from .letters import needed
from .replaying import Replayer, pages_of

logger = logging.getLogger("ojs_bridge")

#: The time between two applications of the rules.
PERIOD = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """Replays dead letters of some kind a `delay` after their death, each job at most `max_replays` times.

    `queue`, `type` and `error_type` are filters as in a listing. `delay` is an ISO 8601 duration or a
    timedelta. Replays by an operator count, too. Raises ConfigurationError.
    """

    name: str
    queue: str | None = None
    type: str | None = None
    error_type: str | None = None
    delay: str | timedelta = "PT1H"
    max_replays: int = 1
    enabled: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ConfigurationError(f"replay rule: name: {self.name!r} must be a name")
        try:
            delay = read_duration(self.delay)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"replay rule {self.name!r}: delay: {self.delay!r} {error}") from None
        if type(self.max_replays) is not int or self.max_replays < 1:
            wrong = f"max_replays: {self.max_replays!r} must be an integer of at least 1"
            raise ConfigurationError(f"replay rule {self.name!r}: {wrong}")
        try:
            check_pattern("type", self.type)
            check_pattern("error_type", self.error_type)
        except ValueError as error:
            raise ConfigurationError(f"replay rule {self.name!r}: {error}") from None
        object.__setattr__(self, "delay", delay)

    def where(self, now: datetime) -> LetterFilter:
        """Return the filter for the letters that are due under this rule."""
        return LetterFilter(self.queue, self.type, self.error_type, until=now - read_duration(self.delay))


def checked(rules: Iterable[ReplayRule]) -> tuple[ReplayRule, ...]:
    """Return the rules; raises ConfigurationError for a wrong type, or for a name that stands twice."""
    if not isinstance(rules, Iterable):
        raise ConfigurationError(f"replay_rules: {rules!r} must be a list of ReplayRules")
    found = tuple(rules)
    for rule in found:
        if not isinstance(rule, ReplayRule):
            raise ConfigurationError(f"replay_rules: {rule!r} is not a ReplayRule")
    names = [rule.name for rule in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"replay_rules: two rules are called {name!r}")
    return found


class Rules:
    """Applies the replay rules of one bridge."""

    def __init__(self, rules: Sequence[ReplayRule], context: Context) -> None:
        self._rules = [rule for rule in rules if rule.enabled]
        self._context = context
        self._store = needed(context.store, "replay rules")
        self._clock = context.clock

    def apply(self) -> None:
        """Apply the rules, unless another worker of the fleet has done so in this minute, or does now."""
        for framework in self._context.publishers if self._rules else ():
            apply = functools.partial(self._apply_all, framework)
            once_a_period(self._store, f"replay:{framework}", PERIOD, self._clock, apply)

    def _apply_all(self, framework: str) -> None:
        for rule in self._rules:
            self._apply(rule, framework)

    def _apply(self, rule: ReplayRule, framework: str) -> None:
        publisher = self._context.publishers[framework]

        def due(letter: Letter) -> bool:
            ours = letter.framework == framework and publisher.knows(letter.type)
            return ours and letter.replay_count < rule.max_replays

        def told(job: Job) -> None:
            count, at = job.replay_count, self._clock()
            self._context.emit(dead_letter("replayed", job, at, replay_count=count, rule=rule.name))

        found = ([*filter(due, page)] for page in pages_of(self._store, rule.where(self._clock())))
        replayer = Replayer(self._context, told)
        done = replayer.many(found, Override())
        if done.matched:
            logger.info("replay rule %r: %d replayed, %d not", rule.name, done.succeeded, done.failed)
