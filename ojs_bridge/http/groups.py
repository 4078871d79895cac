"""The routes of groups of dead letters. What is done to a group is done to the letters of a filter."""

from __future__ import annotations

from typing import cast

from ..bridge import Bridge
from ..rules.fingerprint import is_fingerprint
from . import shapes
from .answers import not_found
from .requests import GroupsQuery, MuteBody
from .routes import Operation, answers

GROUPS: list[Operation] = []


class Groups:
    """Serves the groups of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._groups = bridge.dead_letters.groups

    @answers(GROUPS, "GET", "/dead-letter/groups")
    def list(self, query: GroupsQuery) -> shapes.Groups:
        """List dead letters by their faults."""
        start, limit = int(query.cursor or 0), query.limit
        choice = {"order": query.order, "muted": query.muted, "limit": limit + 1, "offset": start}
        found = self._groups.list(**choice, **query.kind())  # type: ignore[arg-type]
        groups = [cast(shapes.Group, group.to_ojs()) for group in found[:limit]]
        return {"groups": groups, "next_cursor": str(start + limit) if len(found) > limit else None}

    @answers(GROUPS, "POST", "/dead-letter/groups/{id}/mute")
    def mute(self, job_id: str, body: MuteBody) -> shapes.Mute:
        """Leave a group out of the list, until it has twice as many deaths; its letters stay."""
        return cast(shapes.Mute, self._groups.mute(_checked(job_id), until=body.until).to_ojs())

    @answers(GROUPS, "DELETE", "/dead-letter/groups/{id}/mute")
    def unmute(self, job_id: str) -> shapes.Unmuted:
        """Take a mute back."""
        self._groups.unmute(_checked(job_id))
        return {"muted": False, "fingerprint": job_id}


def _checked(fingerprint: str) -> str:
    if not is_fingerprint(fingerprint):
        raise not_found("group", fingerprint)
    return fingerprint
