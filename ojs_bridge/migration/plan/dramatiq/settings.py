"""What an actor and its broker's middleware say about retries, put together as Dramatiq itself does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dramatiq import Actor
from dramatiq.broker import Broker
from dramatiq.middleware import AgeLimit, Middleware, Retries, TimeLimit
from dramatiq.results import Results

from ....dramatiq import OJSRetries
from ....dramatiq.translate import names_exceptions
from ....engine.runs import TaskPolicy
from ...native.formulas import dramatiq_wait
from ..planned import ENDLESS, NOT_KNOWN, Endless, Runs, Wait

#: What an actor may leave to the middleware.
_INHERITED = ("max_retries", "min_backoff", "max_backoff", "retry_when")
_STOCK = Retries()


@dataclass(frozen=True, slots=True)
class Settings:
    """An actor's options over those of its broker's middleware, in milliseconds."""

    actor: Actor[..., Any]
    #: The middleware that retries; without one nothing does.
    retries: Retries | None
    max_retries: Any
    min_backoff: Any
    max_backoff: Any
    retry_when: Any
    throws: Any

    @classmethod
    def of(cls, actor: Actor[..., Any], broker: Broker) -> Settings:
        """Return what counts for an actor of a broker."""
        middleware = retries_of(broker)
        over = {name: getattr(middleware or _STOCK, name) for name in _INHERITED}
        own = {name: actor.options[name] for name in _INHERITED if name in actor.options}
        return cls(actor, middleware, throws=actor.options.get("throws"), **(over | own))

    def sets(self, name: str) -> bool:
        """Return whether the actor, or a middleware with other settings than Dramatiq's, says this itself."""
        return name in self.actor.options or getattr(self, name) != getattr(_STOCK, name)

    @property
    def broken(self) -> str | None:
        """The first option over which Dramatiq itself raises when a job fails, so that the job is lost."""
        if not names_exceptions(self.throws):
            return "throws"
        if self.max_retries is not None and not _is_number(self.max_retries):
            return "max_retries"
        if self.runs == 1:
            return None
        if not (_is_number(self.min_backoff) and math.isfinite(self.min_backoff)):
            return "min_backoff"
        return None if _is_number(self.max_backoff) else "max_backoff"

    @property
    def runs(self) -> Runs:
        """How often a job runs at most; what `retry_when` will say is not known."""
        if self.retries is None:
            return 1
        return NOT_KNOWN if self.retry_when is not None else self.counted

    @property
    def counted(self) -> int | Endless:
        """How often a job runs by `max_retries` alone, which counts retries."""
        if self.max_retries is None or not self.max_retries < math.inf:
            return ENDLESS
        return max(math.ceil(float(self.max_retries)), 0) + 1

    @property
    def is_asked(self) -> bool:
        """Whether the bridge asks the `retry_when` there is: it does an actor's, not its middleware's."""
        return "retry_when" in self.actor.options

    def wait(self, n: int) -> Wait:
        """Return the wait before retry n."""
        return dramatiq_wait(n, self.min_backoff, self.max_backoff)

    @property
    def thrown(self) -> tuple[type[BaseException], ...]:
        """The exception classes that are not retried."""
        classes = self.throws if isinstance(self.throws, tuple) else (self.throws,)
        return classes if self.throws else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def retries_of(broker: Broker) -> Retries | None:
    """Return the middleware that retries: the stock one, else the bridge's, which has taken its settings."""
    found = [m for m in broker.middleware if isinstance(m, Retries)]
    return next((m for m in found if not isinstance(m, OJSRetries)), next(iter(found), None))


def task_policy(broker: Broker, actor: Actor[..., Any]) -> TaskPolicy | None:
    """Return the policy of an actor that is under the bridge already."""
    own = next((m for m in broker.middleware if isinstance(m, OJSRetries)), None)
    return own._actors.tasks.get(actor.actor_name) if own else None


def time_limit(broker: Broker, actor: Actor[..., Any]) -> float | None:
    """Return the milliseconds after which a run is interrupted; None for never."""
    limit = _over(broker, actor, TimeLimit, "time_limit")
    return limit if limit and math.isfinite(limit) else None


def max_age(broker: Broker, actor: Actor[..., Any]) -> float | None:
    """Return the milliseconds after which a job is not begun any more; None for never."""
    return _over(broker, actor, AgeLimit, "max_age") or None


def ignores_results(broker: Broker, actor: Actor[..., Any]) -> bool:
    """Return whether the broker stores results, but not this actor's."""
    has_results = any(isinstance(m, Results) for m in broker.middleware)
    return has_results and not _over(broker, actor, Results, "store_results")


def _over(broker: Broker, actor: Actor[..., Any], cls: type[Middleware], option: str) -> Any:
    of_middleware = next((getattr(m, option) for m in broker.middleware if isinstance(m, cls)), None)
    return actor.options.get(option, of_middleware)
