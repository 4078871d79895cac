"""`ojs-bridge policy`: check policies before they are rolled out, and see what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from ..config.policy_files import Named, read_file
from ..config.settings import the_retry
from ..errors import InvalidRetryPolicy
from ..spec.duration import spoken
from ..spec.policy import RetryPolicy
from .charts import bars, schedule_table, write_png
from .failing import INCOMPLETE
from .operation import command
from .options import AsJson
from .printing import plain, say, show, show_json
from .replays import json_of
from .schedule import MOST, Wait, retries_of, schedule

group = typer.Typer(
    name="policy", help="Check retry policies, and see their schedules.", no_args_is_help=True
)

_FILE = (
    "TOML or JSON: one policy, or a table `policies` of partial ones by task name, and perhaps a `default`."
)


@command(group, "check")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help=_FILE)], as_json: AsJson = False
) -> int | None:
    """Say of each policy of a file what is wrong with it, or OK; exit code 1 if one is invalid."""
    found = read_file(file)
    for named in found:
        _tell(named, as_json=as_json)
    return INCOMPLETE if any(named.problems for named in found) else None


@command(group, "show")
def show_(
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help=_FILE)] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="JSON", help="A policy, in place of a file.")
    ] = None,
    png: Annotated[str | None, typer.Option("--png", metavar="PATH", help="Also draw it, as a PNG.")] = None,
    as_json: AsJson = False,
) -> int | None:
    """Show when retries come: of a file, --policy, the configured `retry`, or the spec's default."""
    found = _named(file, policy)
    schedules: dict[str, Sequence[Wait]] = {}
    for named in found:
        if named.policy is None:
            _tell(named, as_json=False)
            continue
        schedules[named.name] = [*schedule(named.policy)]
        _show(named.name, named.policy, schedules[named.name], as_json=as_json)
    if png:
        write_png(png, schedules)
        say(f"written to {png}")
    return INCOMPLETE if any(named.problems for named in found) else None


def _named(file: str | None, policy: str | None) -> list[Named]:
    if file and policy is not None:
        raise ValueError("policy: either a file or --policy, not both")
    if file:
        return read_file(file)
    try:
        return [Named("policy", RetryPolicy.merge(the_retry(), json_of("policy", policy)))]
    except InvalidRetryPolicy as error:
        raise error.under("policy") if policy is not None else error from None


def _tell(named: Named, *, as_json: bool) -> None:
    if as_json:
        show_json({"name": named.name, "valid": not named.problems, "problems": named.problems})
        return
    for problem in named.problems:
        say(f"{named.name}: {problem}")
    if not named.problems:
        show(f"{named.name}: OK")


def _show(name: str, policy: RetryPolicy, waits: Sequence[Wait], *, as_json: bool) -> None:
    if as_json:
        show_json({"name": name, "policy": policy.to_ojs(), "schedule": [asdict(wait) for wait in waits]})
        return
    fields = ", ".join(f"{field} {plain(value)}" for field, value in policy.to_ojs().items())
    show(f"{name}: {fields}")
    if not waits:
        show("It is run once and never retried.")
        return
    show("", schedule_table(waits), *bars(waits))
    more = retries_of(policy) - MOST
    if more > 0:
        show(f"... and {more:,} more, {spoken(waits[-1].planned)} or longer apart")
