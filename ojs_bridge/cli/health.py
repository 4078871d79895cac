"""`ojs-bridge health`: the answer to a probe, in its exit code."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from ..operations.health import SECONDS
from .commands import INCOMPLETE, OUT_OF_REACH, AsJson
from .finding import Place
from .printing import answer, table


def health(
    *,
    place: Place,
    timeout: Annotated[float, Option(min=0.1, help="The seconds to wait for answers.")] = SECONDS,
    as_json: AsJson = False,
) -> int | None:
    """Tell whether store and, with --app, broker answer, workers were seen lately, and no retry is overdue.

    Exit codes: 0 all is well; 1 no worker was seen lately, or a retry is overdue; 3 the store or the broker
    is away.
    """
    found = place.bridge.health.check(timeout)
    rows = ((name, check.status, check.message) for name, check in found.checks.items())
    answer(found.to_ojs(), table(("", "status", ""), rows), as_json=as_json)
    return {"away": OUT_OF_REACH, "degraded": INCOMPLETE}.get(found.status)
