"""The models of requests that begin a bulk operation, or show what its edits would do."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from ..operations.operation import (
    MAX_IDS,
    JsonAction,
    action_from_json,
    check,
    check_forever,
    check_probe,
    with_changes,
)
from ..rules import edits
from .requests import AnyFilter, Asked, Change, Filter, Finite, Override, Purge, Rate, Time, Word

Ids: TypeAlias = Annotated[list[Word], Field(min_length=1, max_length=MAX_IDS)]


class Edits(Asked):
    """Changes of arguments by their names; a name stands in one of them only."""

    set: dict[Word, Finite] | None = None
    rename: dict[Word, Word] | None = None
    remove: list[Word] | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        self.changes()
        return self

    def changes(self) -> edits.Edits:
        """Return the edits as the library takes them."""
        return edits.Edits(self.set or {}, self.rename or {}, self.remove or ())


class Edited(Change):
    """What edits would do to ten letters of a filter, or of some ids: the oldest, or the newest."""

    action: Literal["retry"] = "retry"
    filter: Filter | None = None
    ids: Ids | None = None
    changes: Edits
    newest: bool = False

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.ids is not None and self.filter is not None:
            raise ValueError("ids: either ids or a filter, not both")
        return self


class Begin(Purge):
    """A bulk operation on the letters or waiting jobs of a filter, or of some ids; `at` is for a move."""

    model_config = ConfigDict(json_schema_extra={"required": ["action", "confirm"]})

    filter: AnyFilter | None = None
    action: JsonAction
    at: Time | None = None
    ids: Ids | None = None
    override: Override | None = None
    changes: Edits | None = None
    rate: Rate | None = None
    stop_if_failing: (
        Annotated[float, Field(ge=0, lt=1, description="The share of replayed jobs that die again")] | None
    ) = None
    limit: (
        Annotated[int, Field(ge=1, le=MAX_IDS, description="A probe: so many letters; the rest later")] | None
    ) = None
    newest: Annotated[bool, Field(description="With a limit: the newest letters, not the oldest")] = False
    forever: Annotated[bool, Field(description="A purge that keeps nothing for an undo")] = False

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        override = with_changes(dict(self.override or ()), self.edits())
        action = action_from_json(self.action)
        check_probe(action, self.ids, self.limit, newest=self.newest)
        check_forever(action, forever=self.forever)
        check(action, self.ids, override, self.rate, self.stop_if_failing, self.at, self.where())
        return self

    def edits(self) -> edits.Edits | None:
        """Return the edits as the library takes them, if there are any."""
        return self.changes.changes() if self.changes else None
