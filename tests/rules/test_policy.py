"""The retry policy: fields, defaults, merging, validation and its wire form (spec sections 2, 6, 8, 11)."""

import copy
import json
import math
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.errors import InvalidRetryPolicy, NotExpressible
from ojs_bridge.rules.backoff import Intervals, Jitter
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.notations import format_duration
from ojs_bridge.rules.policy import LARGEST, PolicyFields, RetryPolicy

SCHEMA = json.loads(Path(__file__).with_name("data").joinpath("retry-policy.schema.json").read_text())
DEFAULT = {
    "max_attempts": 3,
    "initial_interval": "PT1S",
    "backoff_coefficient": 2.0,
    "max_interval": "PT5M",
    "jitter": True,
    "non_retryable_errors": [],
    "on_exhaustion": "discard",
}
STRATEGIES = ["exponential", "linear", "polynomial", "none"]
STRATEGY = "must be 'exponential', 'linear', 'polynomial' or 'none', or in Python a callable"
FORMS = "must be an ISO 8601 duration string such as 'PT30S', or a timedelta"
DURATION = "is not an ISO 8601 duration such as PT1S, PT0.5S or PT5M"


def problems(*partials: Any) -> tuple[str, ...]:
    """Return the problems of a policy, line by line."""
    with pytest.raises(InvalidRetryPolicy) as error:
        RetryPolicy.merge(*partials)
    return error.value.problems


def effective(*partials: Any) -> dict[str, Any]:
    """Return the merged policy as the spec's seven fields."""
    return RetryPolicy.merge(*partials).to_ojs()


@pytest.mark.requirement("RET-09")
def test_the_default_policy() -> None:
    """Sections 8 and 12.2 have the policy of a job without one."""
    assert effective() == effective(None) == effective({}) == DEFAULT
    assert RetryPolicy.merge() == RetryPolicy()


@pytest.mark.requirement("RET-10")
@pytest.mark.parametrize(
    ("given_", "changed"),
    [
        pytest.param({"max_attempts": 10, "on_exhaustion": "dead_letter"}, {}, id="8.1"),
        pytest.param({"max_attempts": 1}, {}, id="12.1"),
        pytest.param(
            {
                "max_attempts": 25,
                "initial_interval": "PT15S",
                "backoff_coefficient": 4.0,
                "max_interval": "PT1H",
                "jitter": True,
                "non_retryable_errors": ["payment.card_stolen", "payment.card_expired", "validation.*"],
                "on_exhaustion": "dead_letter",
            },
            {"max_interval": "PT1H"},
            id="12.3",
        ),
        pytest.param(
            {
                "max_attempts": 5,
                "initial_interval": "PT30S",
                "backoff_coefficient": 2.0,
                "max_interval": "PT15M",
                "jitter": True,
                "non_retryable_errors": [
                    "auth.invalid_credentials",
                    "auth.account_suspended",
                    "resource.not_found",
                    "validation.*",
                    "external.crm.api_deprecated",
                ],
                "on_exhaustion": "dead_letter",
            },
            {},
            id="12.4",
        ),
        pytest.param(
            {
                "max_attempts": 60,
                "initial_interval": "PT10S",
                "backoff_coefficient": 1.0,
                "max_interval": "PT10S",
                "jitter": False,
                "non_retryable_errors": [],
                "on_exhaustion": "dead_letter",
            },
            {},
            id="12.5",
        ),
        pytest.param({"max_attempts": 1, "on_exhaustion": "dead_letter"}, {}, id="12.6"),
    ],
)
def test_the_effective_policies_of_the_spec(given_: dict[str, Any], changed: dict[str, Any]) -> None:
    """Sections 8.1 and 12: a given field wins, and a missing field has its default."""
    assert effective(given_) == {**DEFAULT, **given_, **changed}


@pytest.mark.requirement("RET-10")
def test_null_is_absent() -> None:
    """A null takes no field back to the default: it counts as absent (decisions.md)."""
    assert RetryPolicy.merge({"max_attempts": 5}, dict.fromkeys(RetryPolicy.model_fields)).max_attempts == 5


@pytest.mark.requirement("RET-10")
def test_a_policy_as_a_partial_brings_only_what_it_sets() -> None:
    """A default that no owner wrote overrides nothing."""
    merged = RetryPolicy.merge({"max_interval": "PT10M"}, RetryPolicy(max_attempts=9))
    assert (merged.max_attempts, merged.max_interval) == (9, timedelta(minutes=10))


@pytest.mark.requirement("RET-16")
def test_validation_comes_after_the_merge() -> None:
    """Halves that are invalid alone may be valid together, and the other way round (decisions.md)."""
    assert RetryPolicy.merge({"initial_interval": "PT10M"}, {"max_interval": "PT20M"}).max_attempts == 3
    assert problems({"initial_interval": "PT2S"}, {"max_interval": "PT1.5S"}) == (
        "max_interval: PT1.5S must be >= initial_interval, PT2S",
    )
    assert RetryPolicy.merge({"max_attempts": -1}, {"max_attempts": 1}).max_attempts == 1


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize(("max_attempts", "runs"), [(0, 1), (1, 1), (2, 2), (3, 3), (25, 25)])
def test_zero_and_one_both_run_once(max_attempts: int, runs: int) -> None:
    """Section 2.2 has the table."""
    assert RetryPolicy(max_attempts=max_attempts).runs == runs


@pytest.mark.parametrize("strategy", ["none", "constant"])
def test_constant_is_read_as_none(strategy: str) -> None:
    """The wire has one word for it."""
    policy = RetryPolicy.merge({"backoff_strategy": strategy})
    assert policy.backoff_strategy == policy.to_ojs()["backoff_strategy"] == "none"


@pytest.mark.requirement("RET-16", "RET-20")
@pytest.mark.parametrize(
    ("partial", "line"),
    [
        ({"max_attempts": -1}, "max_attempts: -1 must be >= 0"),
        ({"max_attempts": True}, "max_attempts: true must be a non-negative integer"),
        ({"max_attempts": "3"}, 'max_attempts: "3" must be a non-negative integer'),
        ({"max_attempts": 3.0}, "max_attempts: 3.0 must be a non-negative integer"),
        ({"max_attempts": math.nan}, "max_attempts: NaN must be a non-negative integer"),
        ({"max_attempts": [3]}, "max_attempts: [3] must be a non-negative integer"),
        ({"max_attempts": 2**63}, "max_attempts: 9223372036854775808 must be <= 9223372036854775807"),
        ({"max_attempts": 10**5000}, "max_attempts: <int> must be <= 9223372036854775807"),
        ({"initial_interval": "1s"}, f'initial_interval: "1s" {DURATION}'),
        ({"initial_interval": "PT1S\n"}, f'initial_interval: "PT1S\\n" {DURATION}'),
        ({"initial_interval": 5}, f"initial_interval: 5 {FORMS}"),
        ({"initial_interval": "PT0S"}, 'initial_interval: "PT0S" must be greater than zero'),
        ({"initial_interval": timedelta(0)}, "initial_interval: P0D must be greater than zero"),
        ({"initial_interval": timedelta(-1)}, "initial_interval: -P1D must not be negative"),
        (
            {"initial_interval": "PT0.0000001S"},
            'initial_interval: "PT0.0000001S" must be greater than zero',
        ),
        ({"backoff_coefficient": 0.99}, "backoff_coefficient: 0.99 must be >= 1.0"),
        ({"backoff_coefficient": -2}, "backoff_coefficient: -2 must be >= 1.0"),
        ({"backoff_coefficient": "2"}, 'backoff_coefficient: "2" must be a number >= 1.0'),
        ({"backoff_coefficient": True}, "backoff_coefficient: true must be a number >= 1.0"),
        ({"backoff_coefficient": math.nan}, "backoff_coefficient: NaN must be a finite number >= 1.0"),
        ({"backoff_coefficient": math.inf}, "backoff_coefficient: Infinity must be a finite number >= 1.0"),
        ({"backoff_coefficient": 10**5000}, "backoff_coefficient: <int> must be a number >= 1.0"),
        ({"max_interval": "P1W"}, f'max_interval: "P1W" {DURATION}'),
        (
            {"max_interval": "P9999999Y"},
            'max_interval: "P9999999Y" is longer than any duration this machine can hold',
        ),
        ({"max_interval": "PT0.5S"}, "max_interval: PT0.5S must be >= initial_interval, PT1S"),
        (
            {"initial_interval": "PT10M"},
            "max_interval: PT5M, the default, must be >= initial_interval, PT10M",
        ),
        ({"jitter": "yes"}, 'jitter: "yes" must be a boolean, or in Python a Jitter or another callable'),
        ({"jitter": {}}, "jitter: {} must be a boolean, or in Python a Jitter or another callable"),
        ({"jitter": 1}, "jitter: 1 must be a boolean, or in Python a Jitter or another callable"),
        ({"non_retryable_errors": "a.b"}, 'non_retryable_errors: "a.b" must be an array of strings'),
        ({"non_retryable_errors": {"a": 1}}, "non_retryable_errors: {'a': 1} must be an array of strings"),
        ({"non_retryable_errors": ["a.b", 5]}, "non_retryable_errors[1]: 5 must be a string"),
        ({"non_retryable_errors": [""]}, 'non_retryable_errors[0]: "" must not be an empty string'),
        (
            {"non_retryable_errors": ["\ud800"]},
            'non_retryable_errors[0]: "\\ud800" must be a string of valid Unicode',
        ),
        ({"on_exhaustion": "retry"}, "on_exhaustion: \"retry\" must be one of 'discard' or 'dead_letter'"),
        ({"on_exhaustion": "DEAD"}, "on_exhaustion: \"DEAD\" must be one of 'discard' or 'dead_letter'"),
        ({"on_exhaustion": 0}, "on_exhaustion: 0 must be one of 'discard' or 'dead_letter'"),
        ({"backoff_strategy": "fibonacci"}, f'backoff_strategy: "fibonacci" {STRATEGY}'),
        ({"backoff_strategy": 2}, f"backoff_strategy: 2 {STRATEGY}"),
        ({"max_retries": 3}, "max_retries: 3 is not a field of a retry policy"),
        ({"Max_Attempts": 3}, "Max_Attempts: 3 is not a field of a retry policy"),
        ({"self": 3}, "self: 3 is not a field of a retry policy"),
        ({7: 3}, "7: is not a field of a retry policy"),
        ({"\ud800": 3}, '"\\ud800": is not a field of a retry policy'),
        (["max_attempts"], "['max_attempts']: must be an object of retry policy fields"),
        (5, "5: must be an object of retry policy fields"),
        ("max_attempts=5", '"max_attempts=5": must be an object of retry policy fields'),
        (
            {"max_attempts": 8, "backoff_strategy": Intervals("PT1M", "PT30M", "PT10M")},
            "max_interval: PT5M, the default, must be >= the longest of backoff_strategy's Intervals, PT30M",
        ),
    ],
)  # fmt: skip
def test_each_broken_rule_has_its_line(partial: Any, line: str) -> None:
    """Section 11.1 and the schema: the line names the field, the value and the rule."""
    assert problems(partial) == (line,)


@pytest.mark.requirement("RET-03")
def test_a_coefficient_below_one_is_rejected_and_one_is_not() -> None:
    """Section 2.2 has the limit."""
    assert problems({"backoff_coefficient": math.nextafter(1.0, 0.0)})
    assert RetryPolicy.merge({"backoff_coefficient": 1}).backoff_coefficient == 1.0


@pytest.mark.requirement("RET-16")
def test_an_invalid_policy_says_everything_at_once() -> None:
    """The error has one line for each broken rule, and the spec's error type."""
    with pytest.raises(ValueError) as error:
        RetryPolicy.merge({"max_attempts": -1, "initial_interval": "5s", "jitter": None, "tries": 3})
    assert isinstance(error.value, InvalidRetryPolicy)
    assert error.value.type == "validation.retry_policy_invalid"
    assert str(error.value) == (
        f'invalid retry policy: max_attempts: -1 must be >= 0; initial_interval: "5s" {DURATION}; '
        "tries: 3 is not a field of a retry policy"
    )


def test_a_long_value_is_shown_in_part() -> None:
    """A line stays a line."""
    (line,) = problems({"initial_interval": "P" * 10_000})
    too_long = "is longer than the 100 characters that a duration may have"
    assert line == f'initial_interval: "{"P" * 79}… {too_long}'


@pytest.mark.parametrize(
    ("partial", "said"),
    [
        ({"non_retryable_errors": ["a"] * 1001}, "must have at most 1,000 entries, not 1,001"),
        ({"non_retryable_errors": ["a" * 258]}, "must have at most 257 characters"),
        ({f"f{n}": 1 for n in range(51)}, "has 51 fields; a retry policy has 8"),
        ({"f" * 1_000: 1}, f"{'f' * 80}: 1 is not a field of a retry policy"),
    ],
)
def test_a_policy_has_bounds(partial: dict[str, Any], said: str) -> None:
    """A message can hold anything, and each failure reads it."""
    (line,) = problems(partial)
    assert line.endswith(said)
    assert len(line) < 200


def test_a_policy_is_a_value() -> None:
    """A policy is frozen, hashable, copied and pickled without loss."""
    policy = RetryPolicy(max_attempts=9, non_retryable_errors=["a.*"])
    assert len({policy, RetryPolicy(max_attempts=9, non_retryable_errors=("a.*",))}) == 1
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    with pytest.raises(ValueError, match="frozen"):
        policy.max_attempts = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (
            "backoff_strategy",
            Intervals("PT1S"),
            "backoff_strategy: Intervals(intervals=(datetime.timedelta(seconds=1),)) exists only in Python "
            "code; the Open Job Spec has exponential, linear, polynomial and none",
        ),
        (
            "backoff_strategy",
            len,
            "backoff_strategy: <built-in function len> exists only in Python code; "
            "the Open Job Spec has exponential, linear, polynomial and none",
        ),
        (
            "jitter",
            Jitter(0, 1),
            "jitter: Jitter(low=0, high=1) exists only in Python code; "
            "the Open Job Spec has true, a factor in [0.5, 1.5), and false",
        ),
    ],
)
def test_what_only_python_can_say_has_no_wire_form(field: str, value: Any, why: str) -> None:
    """`to_ojs` refuses and says why; the other fields can still be written."""
    policy = RetryPolicy.merge({field: value, "max_attempts": 9})
    with pytest.raises(NotExpressible) as error:
        policy.to_ojs()
    assert str(error.value) == why
    assert policy.to_ojs(only={"max_attempts": 9}) == {"max_attempts": 9}


def test_the_jitter_of_the_spec_by_another_name() -> None:
    """True means Jitter(0.5, 1.5)."""
    assert RetryPolicy(jitter=Jitter(0.5, 1.5)).to_ojs()["jitter"] is True


@pytest.mark.parametrize("text", ["PT24H", "PT36H", "PT48H30M", "PT168H", "PT0.5S"])
def test_an_interval_has_no_days(text: str) -> None:
    """Section 4.2 advises against them."""
    assert (
        RetryPolicy.merge({"initial_interval": "PT0.1S", "max_interval": text}).to_ojs()["max_interval"]
        == text
    )


def test_a_partial_wire_form() -> None:
    """The form has only the named fields, normalised."""
    partial = {"initial_interval": timedelta(seconds=90), "backoff_strategy": "constant", "jitter": None}
    assert RetryPolicy.merge(partial).to_ojs(only=partial) == {
        "initial_interval": "PT1M30S",
        "backoff_strategy": "none",
    }


@pytest.mark.requirement("RET-07", "RET-18")
@pytest.mark.parametrize(
    ("error_type", "pattern"),
    [
        ("validation.payload_invalid", "validation.payload_invalid"),
        ("validation.schema_error", None),
        ("auth.token_expired", "auth.*"),
        ("auth.forbidden", "auth.*"),
        ("auth", None),
        ("external.auth.failure", None),
        ("auth.", "auth.*"),
        ("auth.*", "auth.*"),
        ("authority.denied", None),
        ("Auth.forbidden", None),
        ("validation.payload_invalid.deep", None),
        ("auth.deep.er", "auth.*"),
        ("", None),
    ],
)
def test_the_matching_table_of_the_spec(error_type: str, pattern: str | None) -> None:
    """Section 6.2 has the table; its edges are added."""
    policy = RetryPolicy.merge({"non_retryable_errors": ["validation.payload_invalid", "auth.*"]})
    assert policy.non_retryable_pattern(Failure(error_type)) == pattern


@pytest.mark.requirement("RET-18")
@pytest.mark.parametrize("entry", ["*", "a*", "a.*.c", ".*"])
def test_a_star_elsewhere_is_an_ordinary_character(entry: str) -> None:
    """Only a trailing `.*` is a wildcard; a bare `*` matches nothing but itself."""
    policy = RetryPolicy.merge({"non_retryable_errors": [entry]})
    assert policy.non_retryable_pattern(Failure("a.b.c")) is None
    assert policy.non_retryable_pattern(Failure(entry)) == entry


@pytest.mark.requirement("RET-18")
def test_an_unmapped_exception_matches_by_its_bare_name_too() -> None:
    """`ValueError` matches as well as `builtins.ValueError`; a mapped exception matches by its type only."""
    policy = RetryPolicy.merge({"non_retryable_errors": ["ValueError"]})
    assert policy.non_retryable_pattern(Failure("builtins.ValueError", alias="ValueError")) == "ValueError"
    assert policy.non_retryable_pattern(Failure("validation.amount")) is None


@pytest.mark.requirement("RET-20")
def test_the_schema_is_the_specs_and_a_strategy() -> None:
    """Section 14, plus `backoff_strategy`, which section 3 permits."""
    ours = RetryPolicy.json_schema()
    assert ours["properties"].pop("backoff_strategy") == {
        "type": "string",
        "enum": STRATEGIES,
        "default": "exponential",
        "description": "How the delay grows over successive retries.",
    }
    assert ours == SCHEMA, "take out each other word that the specification does not have, as above"


def test_a_type_checker_knows_each_word() -> None:
    """`PolicyFields` is what it reads of a partial policy in a user's code."""
    assert PolicyFields.__annotations__.keys() == RetryPolicy.model_fields.keys()


durations = st.timedeltas(timedelta(0), timedelta(days=9999)).map(format_duration)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from([0, 1, 2, 3.0, -1, 2.0, "PT0S", "PT1S", "PT10M", "P1Y", "P", "discard", "linear"])
)
json_values = st.recursive(
    scalars | durations,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*RetryPolicy.model_fields]


class Hostile:
    """Says nothing about itself."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


python_values = (
    json_values
    | st.builds(Hostile)
    | st.integers(min_value=10**300)
    | st.builds(pow, st.just(10), st.just(5000))
    | st.sampled_from([len, Jitter(0, 1), Intervals("PT1S"), object, ..., "\ud800"])
    | st.timedeltas()
    | st.binary()
    | st.datetimes()
    | st.complex_numbers()
    | st.frozensets(st.integers())
    | st.lists(st.builds(Hostile), max_size=2)
)
wild_keys = st.sampled_from([*FIELDS, "self", "cls", "", "\ud800", "model_config"]) | st.text(max_size=8)


@pytest.mark.requirement("RET-16")
@given(
    st.lists(
        python_values | st.dictionaries(wild_keys | st.integers(), python_values, max_size=5), max_size=3
    )
)
def test_whatever_is_merged_is_a_policy_or_an_invalid_one(partials: list[Any]) -> None:
    """No input raises another error, and every problem is readable."""
    try:
        policy = RetryPolicy.merge(*partials)
    except InvalidRetryPolicy as error:
        assert error.problems
        assert all(": " in problem for problem in error.problems)
        str(error).encode()
    else:
        assert policy.initial_interval <= policy.max_interval
        assert 1 <= policy.runs <= LARGEST


def likely(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Policies with any of the fields, most of them with a value that is nearly right."""
    return st.fixed_dictionaries(
        {},
        optional={
            "max_attempts": st.integers(-1, 60) | values,
            "initial_interval": durations | values,
            "backoff_coefficient": st.floats(0, 10) | st.integers(0, 5) | values,
            "max_interval": durations | values,
            "jitter": st.booleans() | values,
            "non_retryable_errors": st.lists(st.text(max_size=5), max_size=3) | values,
            "on_exhaustion": st.sampled_from(["discard", "dead_letter"]) | values,
        },
    )


def documented_difference(instance: dict[str, Any]) -> bool:
    """Return whether the bridge differs from the schema on this, as decisions.md lists."""
    attempts = instance.get("max_attempts")
    coefficient = instance.get("backoff_coefficient")
    intervals = [instance.get(name) for name in ("initial_interval", "max_interval")]
    return (
        None in instance.values()
        or isinstance(attempts, float)
        or (isinstance(attempts, int) and attempts > LARGEST)
        or (isinstance(coefficient, float) and not math.isfinite(coefficient))
        or any(isinstance(i, str) and (i.endswith("\n") or not i.isascii()) for i in intervals)
        or (isinstance(coefficient, int) and coefficient > 10**308)
    )


def breaks_only_what_no_schema_can_say(error: InvalidRetryPolicy) -> bool:
    """Zero, the order of the two intervals, overflow and surrogates are beyond a JSON Schema."""
    endings = ("must be greater than zero", "this machine can hold", "a string of valid Unicode")
    return all(p.endswith(endings) or " must be >= initial_interval, " in p for p in error.problems)


@pytest.mark.requirement("RET-20")
@given(likely(json_values))
def test_the_schema_and_merge_agree(instance: dict[str, Any]) -> None:
    """`merge` accepts all that the spec's schema accepts, but for the documented differences."""
    accepted = jsonschema.Draft202012Validator(SCHEMA).is_valid(instance)
    if documented_difference(instance):
        return
    try:
        RetryPolicy.merge(instance)
    except InvalidRetryPolicy as error:
        assert not accepted or breaks_only_what_no_schema_can_say(error)
    else:
        assert accepted


@st.composite
def partials(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a partial policy that is valid in any combination."""
    return draw(
        st.fixed_dictionaries(
            {},
            optional={
                "max_attempts": st.integers(0, LARGEST),
                "initial_interval": st.timedeltas(timedelta(microseconds=1), timedelta(seconds=9)),
                "backoff_coefficient": st.floats(1, allow_infinity=False),
                "max_interval": st.timedeltas(timedelta(seconds=9)).map(format_duration),
                "jitter": st.booleans() | st.none(),
                "non_retryable_errors": st.lists(st.text(st.characters(codec="utf-8"), min_size=1)),
                "on_exhaustion": st.sampled_from(["discard", "dead_letter"]),
                "backoff_strategy": st.sampled_from([*STRATEGIES, "constant"]),
            },
        )
    )


@given(partials())
def test_a_policy_survives_its_wire_form(partial: dict[str, Any]) -> None:
    """The policy is the same after JSON and back, and valid by its own schema."""
    policy = RetryPolicy.merge(partial)
    wire = json.loads(json.dumps(policy.to_ojs()))
    assert RetryPolicy.merge(wire) == policy
    jsonschema.validate(
        wire, SCHEMA if policy.backoff_strategy == "exponential" else RetryPolicy.json_schema()
    )
    assert RetryPolicy.merge(policy.to_ojs(only=partial)) == policy


@pytest.mark.requirement("RET-10")
@given(partials(), partials(), partials())
def test_the_laws_of_merging(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    """The laws are identity, idempotence, associativity, and that the later one wins."""
    merge = RetryPolicy.merge
    assert merge(a) == merge(None, a) == merge({}, a, None) == merge(a, a) == merge(merge(a), merge(a))
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(a, b, c)
    wanted = {name: value for partial in (a, b) for name, value in partial.items() if value is not None}
    assert merge(a, b) == merge(wanted)


def test_a_copy_of_the_input_is_kept() -> None:
    """A later change of the input changes no policy."""
    patterns = ["a.*"]
    policy = RetryPolicy.merge({"non_retryable_errors": patterns})
    patterns.append("b.*")
    assert policy.non_retryable_errors == ("a.*",)
