"""ISO 8601 durations (spec section 4)."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.notations import format_duration, parse_duration, read_duration

MALFORMED = "is not an ISO 8601 duration such as PT1S, PT0.5S or PT5M"
TOO_LONG = "is longer than any duration this machine can hold"


@pytest.mark.requirement("RET-02")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PT0.5S", timedelta(milliseconds=500)),
        ("PT1S", timedelta(seconds=1)),
        ("PT5S", timedelta(seconds=5)),
        ("PT30S", timedelta(seconds=30)),
        ("PT1M", timedelta(minutes=1)),
        ("PT5M", timedelta(minutes=5)),
        ("PT15M", timedelta(minutes=15)),
        ("PT1H", timedelta(hours=1)),
        ("PT24H", timedelta(hours=24)),
    ],
)
def test_the_recommended_durations(text: str, expected: timedelta) -> None:
    """Section 4.1 has the table."""
    assert parse_duration(text) == expected


@pytest.mark.requirement("RET-02")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("P1Y", timedelta(days=365)),
        ("P1M", timedelta(days=30)),
        ("P1D", timedelta(days=1)),
        ("P1Y2M3DT4H5M6.789S", timedelta(days=428, hours=4, minutes=5, seconds=6.789)),
        ("P1YT1.5S", timedelta(days=365, seconds=1.5)),
        ("PT90M", timedelta(minutes=90)),
        ("PT007S", timedelta(seconds=7)),
        ("PT0S", timedelta(0)),
        ("PT0.000001S", timedelta(microseconds=1)),
        ("P999999999D", timedelta(days=999_999_999)),
    ],
)
def test_dates_count_365_and_30_days(text: str, expected: timedelta) -> None:
    """Section 4.2: date components are read, with fixed lengths."""
    assert parse_duration(text) == expected


@pytest.mark.requirement("RET-19")
@pytest.mark.parametrize(
    "text",
    [
        # incomplete or misplaced
        "", "P", "PT", "P1", "1S", "T1S", "PTS", "PT1", "P1S", "PT1D", "P1H", "P1DT",
        # not the whole string
        "PT1S\n", " PT1S", "PT1S ", "PT 1S", "PT1S\x00", "\nPT1S",
        # a sign
        "-PT1S", "+PT1S", "PT-1S", "P-1D",
        # a week
        "P1W", "P1W1D",
        # a fraction where none may be, or a comma
        "PT1,5S", "PT1.S", "PT.5S", "PT1.5M", "PT1.5H", "P1.5D", "PT1e3S",
        # digits that are not ASCII
        "PT\N{ARABIC-INDIC DIGIT ONE}S", "PT\N{FULLWIDTH DIGIT ONE}S", "PT\N{SUPERSCRIPT TWO}S",
        # lower case
        "pt1s", "PT1s", "pT1S",
        # the wrong order, or twice
        "PT1S1M", "PT1M1H", "P1D1M", "PT1S1S", "PT1H1H",
        # other notations
        "P0001-01-01T00:00:00", "1s", "300s", "5", "five minutes", "PT1S/PT2S",
    ],
)  # fmt: skip
def test_what_is_not_iso_8601_is_rejected(text: str) -> None:
    """Section 4.2 says so."""
    with pytest.raises(ValueError) as error:
        parse_duration(text)
    assert str(error.value) == MALFORMED


@pytest.mark.requirement("RET-19")
@pytest.mark.parametrize(
    "text",
    [
        "P1000000000D",
        "P9999999Y",
        "P99999999999999M",
        "PT99999999999999999H",
        f"PT{'9' * 90}S",
        f"P{'9' * 90}Y",
    ],
)
def test_what_no_timedelta_holds_is_an_error(text: str) -> None:
    """An overflow is the user's mistake, not a crash."""
    with pytest.raises(ValueError) as error:
        parse_duration(text)
    assert str(error.value) == TOO_LONG


@pytest.mark.parametrize("around", ["P{}Y", "PT{}S", "PT0.{}S", "PT{}", "P{}Y{}M{}DT{}H{}M{}S"])
def test_a_text_of_many_digits_is_not_read(around: str) -> None:
    """The time to read digits grows with the square of their number."""
    with pytest.raises(ValueError, match=r"^is longer than the 100 characters that a duration may have$"):
        parse_duration(around.replace("{}", "1" * 100))


@given(st.timedeltas(min_value=timedelta(0)))
def test_a_duration_survives_its_text(duration: timedelta) -> None:
    """A duration that is written can be read, and is the same."""
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.requirement("RET-19")
@given(st.text() | st.from_regex(r"P[0-9YMDTHS.,+\-W]*"))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    """No text raises another error than ValueError, and no duration is negative."""
    try:
        read = parse_duration(text)
    except ValueError as error:
        bound = "is longer than the 100 characters that a duration may have"
        assert str(error) in {MALFORMED, TOO_LONG, *([bound] if len(text) > 100 else [])}
    else:
        assert read >= timedelta(0)


def test_python_code_may_write_a_timedelta() -> None:
    """A string and a timedelta mean the same."""
    assert read_duration("PT90S") == read_duration(timedelta(seconds=90)) == timedelta(seconds=90)


def test_a_negative_timedelta_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^must not be negative$"):
        read_duration(timedelta(microseconds=-1))


@pytest.mark.parametrize("value", [5, 1.5, None, True, b"PT1S", ["PT1S"]])
def test_other_types_are_no_durations(value: object) -> None:
    """A bare number has no unit."""
    with pytest.raises(TypeError, match=r"^must be an ISO 8601 duration string such as 'PT30S', or"):
        read_duration(value)
