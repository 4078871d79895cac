"""Every requirement has a test, and the page of requirements is up to date."""

import pytest

from tests.requirements import COMMAND, PAGE, REQUIREMENTS, page, proofs

PROMISED = [r.id for r in REQUIREMENTS]


@pytest.mark.parametrize("requirement", PROMISED)
def test_each_requirement_has_a_test(requirement: str) -> None:
    assert proofs()[requirement], f"no test is marked @pytest.mark.requirement({requirement!r})"


def test_what_is_promised() -> None:
    """The page has all twenty requirements on retries, and all six on dead letters."""
    musts = [*(f"RET-{n:02}" for n in range(1, 21)), *(f"DLQ-{n:03}" for n in range(1, 7))]
    assert PROMISED[: len(musts)] == musts


def test_no_marker_names_an_unknown_requirement() -> None:
    """A marker with a typing error would prove nothing."""
    assert set(proofs()) <= {r.id for r in REQUIREMENTS}


def test_the_page_is_up_to_date() -> None:
    """The script writes the page; nobody edits it."""
    assert PAGE.read_text(encoding="utf-8") == page(), f"run {COMMAND} and commit {PAGE.name}"
