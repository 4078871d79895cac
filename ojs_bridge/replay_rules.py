"""Dead letters that are replayed by themselves (spec section dlq 7, DLQ-R003)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from .duration import read_duration
from .errors import ConfigurationError
from .store import LetterFilter

#: How often the rules are applied.
PERIOD = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """Replays dead letters of some kind `delay` after they died, each job at most `max_replays` times.

    `queue`, `type` and `error_type` are filters as in a listing, `delay` an ISO 8601 duration or a timedelta.
    Replays by hand count too. Raises ConfigurationError.
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
        object.__setattr__(self, "delay", delay)

    def where(self, now: datetime) -> LetterFilter:
        """Return which letters are due for this rule."""
        return LetterFilter(self.queue, self.type, self.error_type, until=now - read_duration(self.delay))


def checked(rules: Iterable[ReplayRule]) -> tuple[ReplayRule, ...]:
    """Return rules whose names differ; raises ConfigurationError."""
    found = tuple(rules)
    for rule in found:
        if not isinstance(rule, ReplayRule):
            raise ConfigurationError(f"replay_rules: {rule!r} is not a ReplayRule")
    names = [rule.name for rule in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"replay_rules: two rules are called {name!r}")
    return found
