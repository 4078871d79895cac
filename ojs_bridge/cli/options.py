"""The options that many commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Answer in JSON, one object a line.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", help="How many, 1 to 1000.")]
Cursor: TypeAlias = Annotated[
    str | None, typer.Option("--cursor", help="Go on after an earlier page: the cursor that it told.")
]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="All of them, page after page.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only show which.")]
Ids: TypeAlias = Annotated[list[str], typer.Argument(metavar="ID...", help="Job ids.")]
