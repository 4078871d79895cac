"""The terms of an `install`: its policies, the canary, and what both adapters say of a misnamed policy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from typing_extensions import Self

from ..bridge import Bridge
from ..config.policies import FIELDS, MISNAMED, Policies, PoliciesOrFile, is_policy
from ..config.settings import check_outbox, the_policies
from ..config.sources import Given
from ..errors import ConfigurationError
from ..rules.notations import check_pattern, matches

#: The variable that counts if no canary is given: a number, or a JSON object.
VARIABLE = "OJS_BRIDGE_CANARY"
#: A percentage of all jobs, or name patterns, such as `billing.*`, and the percentage of each.
Percentages: TypeAlias = "float | Mapping[str, float]"
#: The native retries of a job from before the bridge count as attempts; or not, if they exceed its policy.
InFlight: TypeAlias = Literal["counted", "afresh"]

_BYTES = 8
_PLACES = 1 << (8 * _BYTES)
_WHOLE = 100.0


class Canary:
    """The `canary` of an `install`: a percentage of the jobs, or one for each name pattern.

    If several patterns match a name, the last pattern counts. If none matches, no job of that name is under
    the bridge. A job's id decides: alike on all workers, and for all attempts. When the percentage grows, no
    job leaves the bridge. Without an argument OJS_BRIDGE_CANARY counts; without both every job is under the
    bridge. Raises ConfigurationError for a value that is no percentage from 0 to 100.
    """

    def __init__(self, percentages: Percentages | None = None) -> None:
        self._source = "canary"
        if percentages is None and (text := os.environ.get(VARIABLE)):
            self._source = VARIABLE
            percentages = _read(text)
        self._patterns = self._checked(_WHOLE if percentages is None else percentages)

    def percentage(self, name: str) -> float:
        """Return the percentage of the jobs of a task or actor that is under the bridge."""
        matching = [p for pattern, p in self._patterns.items() if matches(name, pattern)]
        return matching[-1] if matching else 0

    def covers(self, name: str, job_id: str) -> bool:
        """Return whether a job of a task or actor is under the bridge."""
        return _place(job_id) * 100 < self.percentage(name) * _PLACES

    def covers_all(self, name: str) -> bool:
        """Return whether all jobs of a task or actor are under the bridge."""
        return self.percentage(name) == _WHOLE

    def check(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigurationError for a pattern that matches none of these names, which are of a `what`."""
        known = list(names)
        for pattern in self._patterns:
            if pattern != "*" and not any(matches(name, pattern) for name in known):
                raise ConfigurationError(f"{self._source}[{pattern!r}] names no {what}")

    def __str__(self) -> str:
        """Return the percentages as a worker's log shows them."""
        return ", ".join(f"{percentage:g} % of {pattern}" for pattern, percentage in self._patterns.items())

    def _checked(self, percentages: object) -> dict[str, float]:
        if not isinstance(percentages, Mapping):
            return {"*": self._percentage(self._source, percentages)}
        for pattern in percentages:
            try:
                check_pattern(self._source, pattern)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
        return {p: self._percentage(f"{self._source}[{p!r}]", value) for p, value in percentages.items()}

    @staticmethod
    def _percentage(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigurationError(f"{name}: {value!r} must be a percentage, a number from 0 to 100")
        if not 0 <= value <= _WHOLE:
            raise ConfigurationError(f"{name}: {value!r} must be between 0 and 100")
        return value


@dataclass(frozen=True, slots=True)
class Terms:
    """What an `install` says of the tasks or actors of its app or broker."""

    policies: Policies
    canary: Canary
    begins_afresh: bool = False
    park_delays: bool | None = None
    outbox: bool | None = None

    @classmethod
    def of(
        cls,
        place: str,
        bridge: object,
        policies: PoliciesOrFile | None,
        canary: Percentages | None,
        in_flight: InFlight,
        park_delays: bool | None,
        outbox: bool | None,
    ) -> Self:
        """Check the arguments of an `install`; raises InvalidRetryPolicy and ConfigurationError."""
        if not isinstance(bridge, Bridge):
            raise ConfigurationError(f"{place}: {bridge!r} is no Bridge; policies have the name policies=")
        if in_flight not in get_args(InFlight):
            raise ConfigurationError(f"in_flight: {in_flight!r} must be 'counted' or 'afresh'")
        if park_delays not in (None, True, False):
            raise ConfigurationError(f"park_delays: {park_delays!r} must be true or false")
        if outbox is not None:
            check_outbox(Given("outbox", outbox), bridge.store)
        return cls(the_policies(policies), Canary(canary), in_flight == "afresh", park_delays, outbox)


def misnamed(given: Mapping[str, Any], right: str, *, ours: bool = False) -> list[str]:
    """Return a line for each part of a policy that stands under another name than the `right` one.

    Frameworks and users have options of such names, too: only what looks like a policy is one, unless the
    names are `ours` alone.
    """
    lines = []
    for name in sorted(({*MISNAMED, "ojs_retry"} & given.keys()) - {right}):
        value = given[name]
        if name in FIELDS:
            lines.append(f"{name}: is a field of a policy: {right}={{{name!r}: {value!r}}}")
        elif is_policy(value) or (ours and value is not None):
            lines.append(f"{name}: a policy has the name {right} here: {right}={value!r}")
    return lines


def _read(text: str) -> Percentages:
    try:
        percentages = json.loads(text)
    except (ValueError, RecursionError):
        percentages = None
    if isinstance(percentages, bool) or not isinstance(percentages, (int, float, dict)):
        raise ConfigurationError(f"{VARIABLE}: {text!r} is neither a number nor a JSON object")
    return percentages


def _place(job_id: str) -> int:
    """Return a job's place among all jobs, from 0 to below 2**64."""
    # A message that was enqueued without the framework may have a number for an id.
    digest = hashlib.blake2b(str(job_id).encode("utf-8", "surrogatepass"), digest_size=_BYTES)
    return int.from_bytes(digest.digest(), "big")
