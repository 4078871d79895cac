"""A breaker: while a dependency fails, its jobs are held, and a few probes ask whether it works again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ..errors import ConfigurationError
from .notations import duration_at, rate_at

#: The longest window: a breaker counts the calls of a window in buckets of a twelfth of it.
LONGEST_WINDOW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Breaker:
    """When the jobs of a dependency are held because it fails, and how they go on.

    It opens when at least `least` runs ended within the `window`, and of these at least a `share` failed with
    an error of the dependency. Then its jobs are held. After the `cool_down` so many `probes` run: it closes
    when all of them come back without such an error. When one fails, it stays open for another cool-down,
    twice as long, up to ten times. What was held goes on no faster than `ramp`, such as `"10/s"`; without it,
    than a quarter of the runs that there were in the window. Durations are ISO 8601 texts or timedeltas.
    Raises ConfigurationError.
    """

    share: float = 0.5
    least: int = 20
    window: str | timedelta = "PT1M"
    cool_down: str | timedelta = "PT20S"
    probes: int = 3
    ramp: str | float | None = None

    def __post_init__(self) -> None:
        share: object = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(
                f"breaker: share: {share!r:.100} must be a number above 0, and at most 1"
            )
        for name in ("least", "probes"):
            number: object = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ConfigurationError(f"breaker: {name}: {number!r:.100} must be an integer of at least 1")
        if self.window_ > LONGEST_WINDOW:
            raise ConfigurationError(f"breaker: window: {self.window!r} must be at most PT1H")
        duration_at("breaker: cool_down", self.cool_down)
        if self.ramp is not None:
            rate_at("breaker: ramp", self.ramp)

    @property
    def window_(self) -> timedelta:
        """The window."""
        return duration_at("breaker: window", self.window)
