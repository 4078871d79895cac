"""The routes of groups of errors."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field
from typing_extensions import TypedDict

from ..bridge import Bridge
from ..operations.group import ErrorGroup, Mute, Resolution
from ..rules.faults import State
from ..rules.fingerprint import is_fingerprint
from . import shapes
from .answers import not_found
from .requests import GroupsQuery, MuteBody, ResolveBody
from .routes import Operation, answers

GROUPS: list[Operation] = []


class Unmuted(TypedDict):
    """The answer when a mute is taken back, or was none."""

    muted: Literal[False]
    fingerprint: str


class Unresolved(TypedDict):
    """The answer when a resolution is taken back, or was none."""

    resolved: Literal[False]
    fingerprint: str


class Group(TypedDict):
    """Errors of one fault. `message`, `frame` and `sample_id` are those of the newest letter.

    A fault whose jobs still retry may have no letter: then `count` is 0, and `sample_id` null. `retrying` is
    the number of jobs that failed with it and retry, `per_minute` that of deaths a minute now. `frame` is the
    place in the user's own code where the error was raised. `first_at` is the first death of the fault,
    whatever became of its letter. On SQL, `types` and `queues` are those of the newest hundred letters at
    least. `resolved` is there while the state is `resolved` or `came_back`.
    """

    fingerprint: str
    state: State
    state_since: shapes.Time | None
    error_type: str
    pattern: str
    frame: str | None
    message: str
    sample_id: str | None
    count: shapes.Count
    retrying: shapes.Count
    per_minute: Annotated[float, Field(ge=0)]
    first_at: shapes.Time
    last_at: shapes.Time
    types: list[str]
    queues: list[str]
    deaths: shapes.Timeline
    muted: Mute | None
    resolved: Resolution | None


class GroupsPage(TypedDict):
    """A page of groups."""

    groups: list[Group]
    next_cursor: str | None


class Groups:
    """Serves the groups of errors of a bridge."""

    resource = "group"

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def get(self, fingerprint: str) -> ErrorGroup:
        """Return a group; raises NotFound."""
        return self._bridge.groups.get(fingerprint)

    @answers(GROUPS, "GET", "/dead-letter/groups")
    def groups(self, query: GroupsQuery) -> GroupsPage:
        """List dead letters by their faults."""
        start, limit = int(query.cursor or 0), query.limit
        choice = {"order": query.order, "muted": query.muted, "limit": limit + 1, "offset": start}
        chosen = self._bridge.groups.list(query.where(), state=query.states, **choice)  # type: ignore[arg-type]
        groups = [cast(Group, group.to_ojs()) for group in chosen[:limit]]
        return {"groups": groups, "next_cursor": str(start + limit) if len(chosen) > limit else None}

    @answers(GROUPS, "POST", "/dead-letter/groups/{id}/mute")
    def mute(self, job_id: str, body: MuteBody) -> Mute:
        """Leave a group out of the list, for seven days or until a time; its letters stay."""
        return self._bridge.groups.mute(_checked(job_id), until=body.until)

    @answers(GROUPS, "DELETE", "/dead-letter/groups/{id}/mute")
    def unmute(self, job_id: str) -> Unmuted:
        """Take a mute back."""
        self._bridge.groups.unmute(_checked(job_id))
        return {"muted": False, "fingerprint": job_id}

    @answers(GROUPS, "POST", "/dead-letter/groups/{id}/resolve")
    def resolve(self, job_id: str, body: ResolveBody) -> Resolution:
        """Say that the fault of a group is mended; its letters stay, and its next death brings it back."""
        return self._bridge.groups.resolve(_checked(job_id), body.mark)

    @answers(GROUPS, "DELETE", "/dead-letter/groups/{id}/resolve")
    def unresolve(self, job_id: str) -> Unresolved:
        """Take a resolution back."""
        self._bridge.groups.unresolve(_checked(job_id))
        return {"resolved": False, "fingerprint": job_id}


def _checked(fingerprint: str) -> str:
    if not is_fingerprint(fingerprint):
        raise not_found("group", fingerprint)
    return fingerprint
