"""The page of the frameworks' own tests is made by a run, and names each test that differs."""

from pathlib import Path

from scripts.native.__main__ import NOT_EXPLAINED, PAGE, Runner, Suite
from scripts.native.reasons import REASONS

TESTS = """
from pathlib import Path

import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker


def middleware():
    return [type(m).__name__ for m in StubBroker().middleware]


def test_is_alike():
    assert "Callbacks" in middleware()


def test_skips():
    pytest.skip("on both sides")


@pytest.mark.parametrize("name", ["one", "another"])
def test_of_an_app(name):
    assert "_ojs_installation" not in vars(Celery(name))


def test_of_a_broker():
    assert "OJSRetries" not in middleware()


def test_of_a_subtest(subtests):
    with subtests.test():
        assert "OJSRetries" not in middleware()


def test_fails_once():
    again = Path("ran").exists()
    if "OJSRetries" in middleware():
        Path("ran").touch()
        assert again
"""


def test_a_difference_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(TESTS, "utf-8")
    lines = Runner(Suite("Celery", ("test_both.py",), "", ()), tmp_path, tmp_path).compare()
    assert "| alone | 6 | 1 | 0 |" in lines
    assert "| bridged | 2 | 1 | 4 |" in lines
    assert [line for line in lines if line.startswith("| `")] == [
        f"| `test_both.py` `test_of_a_broker` | 1 | passed, failed | {NOT_EXPLAINED} |",
        f"| `test_both.py` `test_of_a_subtest` | 1 | passed, failed | {NOT_EXPLAINED} |",
        f"| `test_both.py` `test_of_an_app` | 2 | passed, failed | {NOT_EXPLAINED} |",
    ]


def test_the_page_explains_each_difference() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert rows
    assert {row.split(" | ")[-1].removesuffix(" |") for row in rows} <= set(REASONS.values())
