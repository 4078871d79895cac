"""What `ojs-bridge retries drain` answers."""

from __future__ import annotations

from ..operations.draining import Drained
from .failing import INCOMPLETE
from .printing import say, show, show_json, table


def told(number: int) -> str:
    """Return a number of parked retries in words."""
    return "1 retry" if number == 1 else f"{number:,} retries"


def show_drained(drained: Drained, *, as_json: bool) -> int | None:
    """Answer with what a drain has done and what stays; returns the exit code."""
    if as_json:
        errors = [{"id": job_id, "error": why} for job_id, why in drained.failed.items()]
        show_json(
            {
                "published": drained.published,
                "failed": errors,
                "held": drained.held,
                "others": dict(drained.others),
            }
        )
    else:
        _show(drained)
    return INCOMPLETE if drained.failed or drained.held else None


def _show(drained: Drained) -> None:
    show(f"{told(drained.published)} published")
    if drained.failed:
        show(table(("id", "why it stays"), drained.failed.items()))
    if drained.held:
        say(
            f"staying: {told(drained.held)} that others publish at this moment, or that "
            "workers which still run have parked again; stop those, and drain again in a minute"
        )
    for framework, number in drained.others.items():
        say(f"staying: {told(number)} of {framework}; drain with an app of its own, --app MODULE:APP")
