"""A bulk operation as the store keeps it: its choice, its state and its progress."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias, get_args

from ..spec.job import format_time
from .letters import Kind, wanted
from .replaying import check_rate, override_of

Action: TypeAlias = Literal["retry", "purge", "run", "cancel"]
#: The actions on parked retries; the others are on dead letters.
ON_RETRIES = ("run", "cancel")
#: The names of the actions in the audit.
RECORDED: Mapping[Action, str] = {
    "retry": "dead_letter.replay",
    "purge": "dead_letter.delete",
    "run": "retry.run",
    "cancel": "retry.cancel",
}
State: TypeAlias = Literal["running", "stopping", "interrupted", "stopped", "failed", "done"]

#: The most ids of an operation.
MAX_IDS = 10_000


@dataclass(frozen=True, slots=True)
class Operation:
    """A bulk operation: dead letters are replayed or purged, or parked retries are run now or cancelled.

    `ids` is the number of ids that were chosen, None where a filter chose. `total` is the number of letters
    or retries that matched in the beginning, None where they were not counted. `died_again` counts the jobs
    among the last 200 replayed ones that are dead letters again. `why` says what ended it. `record` is the
    id of the audit's record of its beginning, or of its last resumption.
    """

    id: str
    action: Action
    state: State
    began_at: datetime
    updated_at: datetime
    kind: Mapping[str, Any] = field(default_factory=dict)
    ids: int | None = None
    override: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    stop_if_failing: float | None = None
    total: int | None = None
    matched: int = 0
    succeeded: int = 0
    failed: int = 0
    died_again: int = 0
    errors: Sequence[Sequence[str]] = ()
    why: str = ""
    cursor: str | None = None
    record: str = ""
    revision: int = 1

    @property
    def has_ended(self) -> bool:
        """Whether no process carries it out any more."""
        return self.state not in ("running", "stopping")

    def to_ojs(self) -> dict[str, Any]:
        """Return the operation in JSON; of the override it has only the names of the changed fields."""
        told = asdict(self)
        for name in ("cursor", "revision", "override", "record"):
            del told[name]
        return {
            **told,
            "changes": sorted(self.override),
            "errors": [{"job_id": letter_id, "error": why} for letter_id, why in self.errors],
            "began_at": format_time(self.began_at),
            "updated_at": format_time(self.updated_at),
        }


def check(
    action: Action,
    ids: Sequence[str] | None,
    override: Mapping[str, Any] | None,
    rate: float | None,
    stop_if_failing: float | None,
    kind: Kind,
) -> None:
    """Raise ValueError for an operation that cannot be, and InvalidRetryPolicy."""
    if action not in get_args(Action):
        raise ValueError(f"action: {action!r} must be one of {', '.join(get_args(Action))}")
    if ids is not None and not 0 < len(ids) <= MAX_IDS:
        raise ValueError(f"ids: {len(ids)} of them; there must be 1 to {MAX_IDS}")
    if ids is not None and any(kind.values()):
        raise ValueError("ids: filters go without them")
    wanted(kind)
    check_rate(rate)
    override_of(override or {})
    try:
        json.dumps(override)
    except (TypeError, ValueError) as error:
        raise ValueError(f"override: it must be JSON: {error}") from None
    if action != "retry" and (any((override or {}).values()) or rate or stop_if_failing is not None):
        raise ValueError(f"action: a {action} has no override, no rate and no stop_if_failing")
    if action in ON_RETRIES and kind.get("group"):
        raise ValueError("group: parked retries have none")
    if stop_if_failing is None:
        return
    if not (isinstance(stop_if_failing, int | float) and 0 <= stop_if_failing < 1):
        raise ValueError(f"stop_if_failing: {stop_if_failing!r} must be a share, from 0 to below 1")
    if rate is None:
        raise ValueError(
            "stop_if_failing: it needs a rate, so that the first jobs end before the last are sent"
        )
