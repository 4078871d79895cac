"""`ojs-bridge policy` needs no store and no framework."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import run

GOOD = """
[default]
max_attempts = 5
max_interval = "PT1H"

[policies."billing.*"]
initial_interval = "PT10M"
jitter = false

[policies.mail]
backoff_strategy = "linear"
"""


def checked(tmp_path: Path, name: str, text: str) -> tuple[int, list[str]]:
    """The exit code and the lines of a check."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    ran = run("policy", "check", str(tmp_path / name))
    return ran.code, [*ran.out.splitlines(), *ran.err.splitlines()]


def test_a_table_of_policies(tmp_path: Path) -> None:
    """Each policy is checked over the default, and named."""
    assert checked(tmp_path, "p.toml", GOOD) == (
        0,
        ["default: OK", "policies['billing.*']: OK", "policies['mail']: OK"],
    )


def test_one_policy_alone(tmp_path: Path) -> None:
    """The file is TOML or JSON."""
    assert checked(tmp_path, "p.toml", "max_attempts = 7") == (0, ["policy: OK"])
    assert checked(tmp_path, "p.json", '{"max_attempts": 7}') == (0, ["policy: OK"])


def test_every_problem_is_told(tmp_path: Path) -> None:
    """Each line has the name of its policy; the exit code is 1."""
    text = json.dumps(
        {
            "retries": 3,
            "default": {"max_attempts": 2},
            "policies": {
                "a": {"max_attempts": -1, "jitter": "yes"},
                "b": {"initial_interval": "PT10M"},
                "c": 7,
                "d": {},
            },
        }
    )
    assert checked(tmp_path, "p.json", text) == (
        1,
        [
            "default: OK",
            "policies['d']: OK",
            "retries: must stand in [default], or in [policies] under its name",
            "policies['a']: max_attempts: -1 must be >= 0",
            "policies['a']: jitter: \"yes\" must be a boolean, or in Python a Jitter or another callable",
            "policies['b']: max_interval: PT5M, the default, must be >= initial_interval, PT10M",
            "policies['c']: 7: must be an object of retry policy fields",
        ],
    )
    lines = run("policy", "check", "--json", str(tmp_path / "p.json")).json
    assert lines[1] == {"name": "default", "valid": True, "problems": []}
    assert lines[3]["problems"] == ["max_interval: PT5M, the default, must be >= initial_interval, PT10M"]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("p.toml", "max_attempts =", "is not TOML: "),
        ("p.json", "{", "is not JSON: "),
        ("p.json", "[" * 100_000, ""),
        ("p.json", "[]", "must hold an object"),
        ("p.yaml", "", "must end in .toml or .json"),
        ("p.toml", "policies = 3", "policies: must be a table of partial policies"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, told: str) -> None:
    """The error is one line, and the exit code is 1."""
    code, [line] = checked(tmp_path, name, text)
    assert code == 1
    assert told in line


def test_a_file_that_is_not_there() -> None:
    """The usage is wrong."""
    ran = run("policy", "check", "nowhere.toml")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "nowhere.toml" in ran.err


def test_the_schedule() -> None:
    """The schedule has the planned delays, the range of jitter, and the sum, each under the cap."""
    policy = '{"max_attempts": 5, "initial_interval": "PT30S", "max_interval": "PT2M"}'
    [told] = run("policy", "show", "--policy", policy, "--json").json
    assert told["policy"]["max_attempts"] == 5
    rows = [
        (w["retry"], w["planned"], w["shortest"], round(w["longest"], 6), w["since_first"])
        for w in told["schedule"]
    ]
    assert rows == [(1, 30, 15, 45, 30), (2, 60, 30, 90, 90), (3, 120, 60, 120, 210), (4, 120, 60, 120, 330)]
    shown = run("policy", "show", "--policy", policy).out
    assert "5 min 30 s" in shown
    assert "15 s to 45 s" in shown
    assert "    4 │" + "█" * 25 + "░" * 25 + " 2 min" in shown


def test_policies_without_a_schedule_or_with_a_long_one() -> None:
    """A policy that never retries, and a policy that hardly ends, have words for it."""
    assert "never retried" in run("policy", "show", "--policy", '{"max_attempts": 1}').out
    told = run("policy", "show", "--policy", '{"max_attempts": 9223372036854775807, "jitter": false}').out
    assert "... and 9,223,372,036,854,775,756 more, 5 min or longer apart" in told


def test_where_the_policy_comes_from(tmp_path: Path) -> None:
    """The policies come from a file, from the environment, or from the spec's default."""
    (tmp_path / "p.toml").write_text(GOOD, encoding="utf-8")
    shown = run("policy", "show", str(tmp_path / "p.toml"), "--json").json
    assert [told["name"] for told in shown] == ["default", "policies['billing.*']", "policies['mail']"]
    assert shown[1]["policy"]["max_attempts"] == 5
    [told] = run("policy", "show", "--json", OJS_BRIDGE_RETRY='{"max_attempts": 9}').json
    assert len(told["schedule"]) == 8
    assert len(run("policy", "show", "--json").json[0]["schedule"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "{"], "policy: '{' is not JSON: "),
        (["--policy", '{"max_attempts": -1}'], "policy: max_attempts: -1 must be >= 0"),
        (["--policy", "7"], "policy: 7: must be an object of retry policy fields"),
        (["p.toml", "--policy", "{}"], "policy: either a file or --policy, not both"),
    ],
)
def test_what_cannot_be_shown(words: list[str], told: str) -> None:
    """Each problem is a line, with the name of its field."""
    ran = run("policy", "show", *words)
    assert ran.code == 2
    assert told in ran.err


@pytest.mark.parametrize(
    "document",
    [
        '{"retry": {"max_attempts": 7}}',
        '{"type": "a.b", "args": [], "options": {"retry": {"max_attempts": 7}}}',
    ],
)
def test_the_policy_of_a_job(document: str, tmp_path: Path) -> None:
    """`check` and `show` take the policy as it stands in the job of another system."""
    assert checked(tmp_path, "job.json", document) == (0, ["policy: OK"])
    [told] = run("policy", "show", "--policy", document, "--json").json
    assert told["policy"]["max_attempts"] == 7


def test_a_coefficient_that_the_specification_reads_as_an_exponent() -> None:
    """A large coefficient multiplies, unless the strategy is said."""
    ran = run("policy", "show", "--policy", '{"backoff_coefficient": 4.0}')
    assert "each wait is 4 times the one before; example 12.3" in ran.err
    said = '{"backoff_coefficient": 4.0, "backoff_strategy": "polynomial"}'
    assert "12.3" not in run("policy", "show", "--policy", said).err
