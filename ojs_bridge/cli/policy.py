"""`ojs-bridge policy`: check retry policies before they are rolled out, and see when their retries come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from rich.text import Text
from typer import Argument, Option

from ..config.policies import Named, policy_in, read_file
from ..config.settings import the_retry
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..rules.failures import VISIBILITY_TIMEOUT
from ..rules.notations import spoken
from ..rules.policy import RetryPolicy
from ..testing.explaining import MOST, PlannedWait, explain
from .commands import INCOMPLETE, AsJson, command, group_of, json_of
from .finding import APP, app_of, tasks_of
from .printing import Rows, plain, say, show, show_json, table

group = group_of("policy", "Check retry policies, and see their schedules.")

_FILE = (
    "TOML or JSON: one policy, or a table `policies` of partial ones by task name, and perhaps a `default`."
)
#: The columns of the longest bar.
_WIDTH = 50
#: From here on a coefficient is more likely meant as an exponent.
_LARGE = 3.0


@command(group, "check")
def check(file: Annotated[str, Argument(metavar="FILE", help=_FILE)], as_json: AsJson = False) -> int | None:
    """Print the problems of each policy in a file, or OK; the exit code is 1 if a policy is invalid."""
    policies = read_file(file)
    for named in policies:
        _tell(named, as_json=as_json)
    if not (policies or as_json):
        show(f"{plain(file)}: OK, but it names no task, and no task is taken")
    return INCOMPLETE if any(named.problems for named in policies) else None


@command(group, "show")
def show_(
    file: Annotated[str | None, Argument(metavar="[FILE]", help=_FILE)] = None,
    policy: Annotated[str | None, Option(metavar="JSON", help="A policy, in place of a file.")] = None,
    as_json: AsJson = False,
) -> int | None:
    """Show when the retries of a policy come: of a file, --policy, the configured `retry`, or the default."""
    policies = _named(file, policy)
    for named in policies:
        if named.policy is None:
            _tell(named, as_json=False)
        else:
            _show(named.name, named.policy, as_json=as_json)
    return INCOMPLETE if any(named.problems for named in policies) else None


@command(group, "explain")
def explain_(
    file: Annotated[str | None, Argument(metavar="[FILE]", help=_FILE)] = None,
    policy: Annotated[str | None, Option(metavar="JSON", help="A policy, in place of a file.")] = None,
    app: Annotated[
        str | None, Option(metavar="MODULE:APP", help=f"The app or broker that has the task, or {APP}.")
    ] = None,
    task: Annotated[str | None, Option(metavar="NAME", help="A task or actor of --app.")] = None,
    error: Annotated[
        str, Option(metavar="TYPE", help="The error type of each attempt, such as external.timeout.")
    ] = "any.error",
    as_json: AsJson = False,
) -> int | None:
    """Explain what would become of each attempt of a task, or under a policy, that fails with an error."""
    if task is not None or app is not None:
        _explain(task or "", _task_of(app or os.environ.get(APP), task), error, as_json=as_json)
        return None
    policies = _named(file, policy)
    for named in policies:
        if named.policy is None:
            _tell(named, as_json=as_json)
        else:
            _explain(named.name, named.policy, error, as_json=as_json)
    return INCOMPLETE if any(named.problems for named in policies) else None


def _explain(name: str, policy: Any, error: str, *, as_json: bool) -> None:
    try:
        explained = explain(policy, plain(error))
    except TypeError as not_ours:
        raise ConfigurationError(f"task: {not_ours}") from None
    if as_json:
        show_json({"name": name, "error": error, **explained.to_json()})
    else:
        show(f"{name}:", *str(explained).splitlines())


def _task_of(app: str | None, name: str | None) -> Any:
    """Return a task of an app; raises ConfigurationError."""
    if not (app and name):
        raise ConfigurationError("task: --app MODULE:APP and --task NAME name a task together")
    loaded = app_of(app)
    tasks = tasks_of(loaded)
    if name not in tasks:
        raise ConfigurationError(f"task: {app} has no {name!r}; it has {', '.join(sorted(tasks))}")
    return tasks[name]


def _named(file: str | None, policy: str | None) -> list[Named]:
    if file and policy is not None:
        raise ValueError("policy: either a file or --policy, not both")
    if file:
        return read_file(file)
    try:
        return [Named("policy", RetryPolicy.merge(the_retry(), policy_in(json_of("policy", policy))))]
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
        _note(named.name, named.policy)


def _show(name: str, policy: RetryPolicy, *, as_json: bool) -> None:
    """Show a policy, and its first fifty waits."""
    # No pattern of a policy matches this error.
    waits = [step.wait for step in explain(policy, VISIBILITY_TIMEOUT).steps if step.wait]
    if as_json:
        show_json({"name": name, "policy": policy.to_ojs(), "schedule": [asdict(wait) for wait in waits]})
        return
    fields = ", ".join(f"{field} {plain(value)}" for field, value in policy.to_ojs().items())
    show(f"{name}: {fields}")
    _note(name, policy)
    if not waits:
        show("It is run once and never retried.")
        return
    show("", _table(waits), *_bars(waits))
    more = policy.runs - 1 - MOST
    if more > 0:
        show(f"... and {more:,} more, {spoken(waits[-1].planned)} or longer apart")


def _note(name: str, policy: RetryPolicy | None) -> None:
    """Say on stderr that a large coefficient multiplies: an example of the specification has an exponent."""
    if policy and policy.backoff_strategy == "exponential" and policy.backoff_coefficient >= _LARGE:
        factor = f"{policy.backoff_coefficient:g}"
        say(
            f"{name}: each wait is {factor} times the one before; example 12.3 of the specification has such "
            'a coefficient for polynomial backoff, which is backoff_strategy = "polynomial"'
        )


def _table(waits: Sequence[PlannedWait]) -> Rows:
    headings = ("retry", "waits", "with jitter", "after the first run")
    rows = []
    for wait in waits:
        same = wait.shortest == wait.longest
        jittered = "" if same else f"{spoken(wait.shortest)} to {spoken(wait.longest)}"
        rows.append((wait.retry, spoken(wait.planned), jittered, spoken(wait.since_first)))
    return replace(table(headings, rows), justify="right")


def _bars(waits: Sequence[PlannedWait]) -> Iterator[Text]:
    """Yield a bar for each wait: full up to the shortest with jitter, light up to the longest."""
    most = max((w.longest for w in waits), default=0.0) or 1.0
    for wait in waits:
        sure, maybe = (round(_WIDTH * seconds / most) for seconds in (wait.shortest, wait.longest))
        bar = "█" * sure + "░" * (maybe - sure)
        yield Text(f"{wait.retry:>5} │{bar or '▏':<{_WIDTH}} {spoken(wait.planned)}")
