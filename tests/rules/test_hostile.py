"""A job with any state in its message can be run, ended and written, or is refused."""

from __future__ import annotations

import json
import random
from datetime import datetime, timezone
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ojs_bridge import Bridge
from ojs_bridge.engine.runs import Refuse, Run
from ojs_bridge.errors import InvalidState
from ojs_bridge.rules.decision import decide
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import MAX_COUNT, Job, count_of, decoded, encode

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
BRIDGE = Bridge()

numbers = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**400, 1e308, float("inf"), float("nan")])
times = st.sampled_from(["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2026-11-21T00:00:00+23:59", "soon"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | numbers | times | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FIELDS = [
    "attempt",
    "retry",
    "errors",
    "errors_dropped",
    "next_retry_at",
    "created_at",
    "replay_count",
    "fence",
]
POLICY = [
    "max_attempts",
    "initial_interval",
    "backoff_coefficient",
    "max_interval",
    "jitter",
    "non_retryable_errors",
    "on_exhaustion",
    "backoff_strategy",
]
policies = st.dictionaries(st.sampled_from(POLICY), values, max_size=4)
entries = st.lists(st.dictionaries(st.sampled_from(["attempt", "type", "details"]), values), max_size=12)
states = st.builds(
    lambda fields, policy, errors: {"v": 1, **fields, **policy, **errors},
    st.dictionaries(st.sampled_from([*FIELDS, "chain", "other"]), values, max_size=5),
    st.just({}) | policies.map(lambda retry: {"retry": retry}),
    st.just({}) | entries.map(lambda errors: {"errors": errors}),
)
headers = states | states.map(json.dumps) | states.map(lambda s: json.dumps(s).encode()) | values
counters = st.just(0) | st.integers(0, MAX_COUNT) | values


@settings(max_examples=300)
@given(headers | st.binary() | st.text(), counters)
def test_any_header_and_any_counter_end(state: object, retries: object) -> None:
    """Both adapters read it so: the job runs and fails, and its state can be written; or it is refused."""
    count = count_of(retries) or 0
    bare = Job("j-1", "billing.charge", "default", 1 + count, fence=count)
    job = decoded(state, bare, retries)
    begun = BRIDGE.engine.admit(job, bare, BRIDGE.engine.task())
    if isinstance(begun, Refuse):
        ended = BRIDGE.engine.carrying.after(begun.job, begun.decision)
    else:
        assert isinstance(begun, Run)
        assert 0 <= begun.job.fence <= 2 * MAX_COUNT
        failure = Failure("a.b", "down")
        decision = decide(begun.policy, begun.job, failure, now=NOW, rng=random.Random(1))
        ended = BRIDGE.engine.carrying.after(begun.job, decision)
    json.dumps(ended.errors)
    try:
        text: Any = encode(ended).text
    except InvalidState as error:
        assert "its budget is" in str(error)
    else:
        json.loads(text)
