"""Which dependencies a job has, and which one an error; what a dependency and a breaker refuse."""

from __future__ import annotations

from typing import Any

import pytest

from ojs_bridge import Breaker, Budget, ConfigurationError, Dependency
from ojs_bridge.rules.dependencies import Dependencies

STRIPE = Dependency("stripe", errors=["external.stripe.*"], jobs=["billing.*", "refund"])
MAIL = Dependency("mail", errors=["external.*"], jobs=["*.mail"])
HAND = Dependency("by hand", errors=["database.*"])


def test_a_job_has_dependencies_by_its_type_and_by_what_it_says() -> None:
    known = Dependencies([STRIPE, MAIL, HAND])
    known.declare("report", "by hand")
    known.declare("billing.mail", ["by hand"])
    assert known.of_type("billing.charge") == (STRIPE,)
    assert known.of_type("billing.mail") == (STRIPE, MAIL, HAND)
    assert known.of_type("report") == (HAND,)
    assert known.of_type("other") == ()
    assert known.jobs_of("by hand") == ("report", "billing.mail")
    assert known.jobs_of("stripe") == ("billing.*", "refund")
    known.declare("report", None)
    assert known.of_type("report") == ()


def test_a_budget_may_be_its_share_alone() -> None:
    one, other = (
        Dependency("a", jobs=["x"], budget=0.5),
        Dependency("b", jobs=["x"], budget=Budget(0.5, "1/s")),
    )
    assert one.budget == other.budget
    assert Dependencies([STRIPE, one, other]).budgets == {"a": Budget(0.5), "b": Budget(0.5)}


def test_a_job_counts_for_as_many_as_it_says_or_the_first_pattern_that_matches() -> None:
    heavy = Dependency("bank", jobs={"report.big": 4, "report.*": 2, "*": 1}, concurrency=5)
    known = Dependencies([heavy, STRIPE])
    known.declare("export", {"bank": 5, "stripe": 1})
    known.declare("report.mail", "bank")
    types = ("report.big", "report.mail", "export", "other")
    assert [known.weight(heavy, type_) for type_ in types] == [4, 2, 5, 1]
    assert known.weight(STRIPE, "billing.charge") == 1
    assert known.of_type("export") == (heavy, STRIPE)
    assert known.jobs_of("bank") == ("report.big", "report.*", "*")
    known.declare("export", None)
    assert known.weight(heavy, "export") == 1


def test_what_a_worker_tells_of_dependencies_that_none_of_its_types_needs() -> None:
    known = Dependencies([STRIPE, HAND, Dependency("bank", budget=0.5), Dependency("shop", rate="1/s")])
    known.declare("report", "shop")
    assert [*known.unused(["billing.charge"])] == [("stripe", "refund"), ("bank", "")]


def test_the_first_dependency_that_has_an_error_type_has_it() -> None:
    known = Dependencies([STRIPE, MAIL])
    assert known.of_error("external.stripe.timeout") == STRIPE
    assert known.of_error("external.stripe.timeout", [MAIL]) == MAIL
    assert known.of_error("external.timeout") == MAIL
    assert known.of_error("database.conflict") is None


INVALID: list[tuple[Any, str]] = [
    (lambda: Dependency(""), "dependency: name: '' must be a name"),
    (lambda: Dependency("a"), "dependency 'a': errors, jobs: at least one of them must have a pattern"),
    (lambda: Dependency("a", errors="x"), "dependency 'a': errors: 'x' must be a list of patterns"),
    (lambda: Dependency("a", jobs=[""]), "dependency 'a': jobs: '' must be a name, or a pattern such as "),
    (lambda: Dependency("a", jobs=[3]), "dependency 'a': jobs: 3 must be a name, or a pattern such as "),  # type: ignore[list-item]
    (lambda: Dependency("a", ["x"], breaker=True), "dependency 'a': breaker: True is not a Breaker"),  # type: ignore[arg-type]
    (
        lambda: Dependency("a", jobs=["x"], breaker=Breaker()),
        "dependency 'a': errors: a breaker needs the patterns of the errors that it counts",
    ),
    *(
        (
            lambda share=share: Dependency("a", jobs=["x"], budget=share),
            f"dependency 'a': budget: {share!r} must be a share of first attempts, above 0 and at most 1",
        )
        for share in (0, -0.1, 1.01, 20, float("nan"), True, "20%")
    ),
    (lambda: Dependency("a", jobs={"": 1}), "dependency 'a': jobs: '' must be a name, or a pattern such as "),
    *(
        (
            lambda weight=weight: Dependency("a", jobs={"x": weight}, concurrency=5),
            f"dependency 'a': jobs: 'x': {weight!r} must be an integer of at least 1, and at most the "
            "concurrency, 5",
        )
        for weight in (0, 6, -1, True, 1.0, "2", None)
    ),
    (
        lambda: Dependency("a", jobs={"x": 1001}, rate="1/s"),
        "dependency 'a': jobs: 'x': 1001 must be an integer of at least 1, and at most 1,000",
    ),
    (
        lambda: Dependencies([Dependency("a", concurrency=2)]).declare("x", {"a": 3}),
        "ojs_depends: 'a': 3 must be an integer of at least 1, and at most the concurrency, 2",
    ),
    (
        lambda: Dependencies([STRIPE]).declare("x", {"bank": 3}),
        "ojs_depends: 'bank' is not the name of a dependency; there are: stripe",
    ),
    (lambda: Dependencies([STRIPE, STRIPE]), "dependencies: two are called 'stripe'"),
    (lambda: Dependencies("stripe"), "dependencies: 'stripe' must be a list of Dependencies"),  # type: ignore[arg-type]
    (lambda: Dependencies(["stripe"]), "dependencies: 'stripe' is not a Dependency"),  # type: ignore[list-item]
    (
        lambda: Dependencies([STRIPE, MAIL]).declare("a", "bank"),
        "ojs_depends: 'bank' is not the name of a dependency; there are: stripe, mail",
    ),
    (
        lambda: Dependencies().declare("a", 5),
        "ojs_depends: 5 is not the name of a dependency; there are: none",
    ),  # type: ignore[arg-type]
    (lambda: Breaker(share=0), "breaker: share: 0 must be a number above 0, and at most 1"),
    (lambda: Breaker(share=1.1), "breaker: share: 1.1 must be a number above 0, and at most 1"),
    (lambda: Breaker(share="half"), "breaker: share: 'half' must be a number above 0, and at most 1"),  # type: ignore[arg-type]
    (lambda: Breaker(least=0), "breaker: least: 0 must be an integer of at least 1"),
    (lambda: Breaker(probes=0), "breaker: probes: 0 must be an integer of at least 1"),
    (lambda: Breaker(probes=True), "breaker: probes: True must be an integer of at least 1"),
    (lambda: Breaker(window="soon"), "breaker: window: 'soon' is not an ISO 8601 duration"),
    (lambda: Breaker(window="PT2H"), "breaker: window: 'PT2H' must be at most PT1H"),
    (lambda: Breaker(cool_down="PT0S"), "breaker: cool_down: 'PT0S' must be greater than zero"),
    (lambda: Breaker(ramp="fast"), "breaker: ramp: 'fast' must be a rate, such as "),
]


@pytest.mark.parametrize(("make", "message"), INVALID)
def test_what_is_refused(make: Any, message: str) -> None:
    """The error names field, value and rule."""
    with pytest.raises(ConfigurationError) as error:
        make()
    assert str(error.value).startswith(message)
