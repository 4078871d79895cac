"""The model of a request that begins a bulk operation."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from ..operations.operation import (
    MAX_IDS,
    JsonAction,
    action_from_json,
    check,
    check_forever,
    check_probe,
)
from .requests import AnyFilter, Override, Purge, Rate, Time, Word


class Begin(Purge):
    """A bulk operation on the letters or waiting jobs of a filter, or of some ids; `at` is for a move."""

    model_config = ConfigDict(json_schema_extra={"required": ["action", "confirm"]})

    filter: AnyFilter | None = None
    action: JsonAction
    at: Time | None = None
    ids: Annotated[list[Word], Field(min_length=1, max_length=MAX_IDS)] | None = None
    override: Override | None = None
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
        override = dict(self.override or ())
        action = action_from_json(self.action)
        check_probe(action, self.ids, self.limit, newest=self.newest)
        check_forever(action, forever=self.forever)
        check(action, self.ids, override, self.rate, self.stop_if_failing, self.at, self.where())
        return self
