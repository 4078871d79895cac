"""The plan of what has a retry policy already: what the bridge does is what it is."""

from __future__ import annotations

from ...errors import NotExpressible
from ...spec.policy import LARGEST, AnyPartial, RetryPolicy, partial_to_ojs
from .comparing import policy_wait
from .planned import ENDLESS, Hazard, Native, Planned


def already_ojs(name: str, what: str, policy: RetryPolicy, partial: AnyPartial | None) -> Planned:
    """Return the plan of a task with a partial policy of its own, and `policy`, what that resolves to."""
    kept = policy.on_exhaustion == "dead_letter"
    native = Native.computed(
        ENDLESS if policy.max_attempts >= LARGEST else policy.runs,
        lambda n: policy_wait(policy, n),
        retries="every error, under the bridge",
        final=", ".join(policy.non_retryable_errors) or "nothing",
        at_the_end="it is kept as a dead letter" if kept else "it is discarded",
    )
    text = f"it {what} already, with {attempts_of(policy)}: there is nothing to move"
    notes: tuple[str, ...] = ()
    try:
        found = partial_to_ojs(partial)
    except NotExpressible as error:
        found, notes = {}, (str(error),)
    attempts = {} if policy.max_attempts >= LARGEST else {"max_attempts": policy.max_attempts}
    return Planned(name, native, {**attempts, **found}, notes, (Hazard("already-moved", text),))


def attempts_of(policy: RetryPolicy) -> str:
    """Return how many attempts a policy allows, in words."""
    return "no max_attempts" if policy.max_attempts >= LARGEST else f"max_attempts={policy.runs}"
