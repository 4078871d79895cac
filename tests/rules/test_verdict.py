"""The verdict: what each state of a fleet is called, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.facts import (
    MINUTES,
    ErrorFacts,
    Facts,
    HoldFacts,
    HostFacts,
    MarkFacts,
    Minutes,
    Part,
    QueueFacts,
    TypeFacts,
)
from ojs_bridge.rules.rise import DEATHS, RETRIES, minute_of, rise_of
from ojs_bridge.rules.verdict import verdict_of
from ojs_bridge.rules.words import cut, number_of

#: Half past three, and half a minute.
AT = datetime(2026, 11, 28, 3, 30, 30, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
OK = Part("ok")
BANK = ErrorFacts("f" * 16, "external.down", "bank answered 503", retrying=96)
HOST = HostFacts("celery", "billing-1", 2)
WELL = Facts(
    AT,
    OK,
    OK,
    runs=(600,) * MINUTES,
    usual_deaths=(0.0,) * MINUTES,
    usual_runs=600.0,
    hosts=(HOST,),
    queues=(QueueFacts("celery", "billing", 0, keeps_up=True, workers=2),),
    last_seen_at=AT,
)


def minutes(counts: Mapping[int, int]) -> Minutes:
    """So many in the minute that began so many minutes ago."""
    return tuple(counts.get(MINUTES - 1 - place, 0) for place in range(MINUTES))


def since(ago: int, number: int) -> Minutes:
    """So many a minute in each whole minute since so many minutes ago, and half of them in this one."""
    return minutes({**dict.fromkeys(range(1, ago + 1), number), 0: number // 2})


def of_type(name: str = "billing.charge", **fields: Any) -> TypeFacts:
    fields.setdefault("runs", (100,) * MINUTES)
    return TypeFacts(name, **{"usual_deaths": 0.0, "usual_retried": 0.0, **fields})


def breaker(held: int, ago: int) -> HoldFacts:
    at = AT - ago * MINUTE
    return HoldFacts("breaker:bank", "jobs of the dependency bank", at, held, ("billing.charge",), "bank")


def pause(held: int, **fields: Any) -> HoldFacts:
    return HoldFacts("pause:type=a", "jobs of a", AT - 5 * MINUTE, held, ("a",), by="ops", **fields)


BLEEDS = of_type(deaths=since(18, 75), error=BANK, depends=("bank",))
STANCHED = of_type(deaths=minutes(dict.fromkeys(range(16, 19), 70)), error=BANK, depends=("bank",))
VAT = ErrorFacts("", "KeyError", "'vat_id'")
GROWS = of_type("mail", retried=since(10, 94), usual_retried=6.0, error=VAT, retry_error=BANK)
SEARCH = QueueFacts("celery", "search", 9, AT - 17 * MINUTE, 4.0, 4.2, keeps_up=True, workers=1)
SILENT = HostFacts("celery", "search-2", 0, 1, AT - 20 * MINUTE, ("search",))


@pytest.mark.parametrize(
    ("facts", "level", "sentence"),
    [
        (WELL, "well", "All is well. No job died in the last hour; usually none does."),
        (replace(WELL, deaths=minutes({7: 1}), usual_deaths=(1 / 30,) * MINUTES), "well",
         "All is well. One job died in the last hour; usually 2 do."),
        (replace(WELL, usual_deaths=None, usual_runs=None, deaths=minutes({7: 3})), "well",
         "All is well. 3 jobs died in the last hour."),
        (replace(WELL, runs=(0,) * MINUTES, usual_runs=None), "well",
         "All is well. No job ran in the last hour."),
        # What bleeds: the type, how many, what is usual, since when, and the error's own words.
        (replace(WELL, types=(BLEEDS,)), "bad",
         "billing.charge: 75 deaths a minute, usually 0, since 2026-11-28T03:12:00Z: bank answered 503, "
         "dependency bank."),
        (replace(WELL, types=(BLEEDS,), holds=(breaker(412, 0),)), "bad",
         "billing.charge: 75 deaths a minute, usually 0, since 2026-11-28T03:12:00Z: bank answered 503, "
         "dependency bank; its breaker holds 412 jobs."),
        (replace(WELL, types=(replace(BLEEDS, usual_deaths=None, error=None, depends=()),)), "bad",
         "billing.charge: 75 deaths a minute, since 2026-11-28T03:12:00Z."),
        (replace(WELL, types=(of_type(deaths=since(59, 75)),)), "bad",
         "billing.charge: 75 deaths a minute, usually 0, for an hour or more."),
        (replace(WELL, types=(BLEEDS, of_type("crm", deaths=since(9, 30)))), "bad",
         "billing.charge: 75 deaths a minute, usually 0, since 2026-11-28T03:12:00Z: bank answered 503, "
         "dependency bank, and 1 more job type dies."),
        # What dies most now comes first, though more have died of what ends.
        (replace(WELL, types=(of_type("crm", deaths=minutes({**dict.fromkeys(range(3, 9), 900), 2: 9, 1: 9})),
                              of_type("mail", deaths=since(2, 60)))), "bad",
         "mail: 60 deaths a minute, usually 0, since 2026-11-28T03:28:00Z, and 1 more job type dies."),
        (replace(WELL, types=(of_type("crm", deaths=minutes({3: 30})),), deaths=minutes({3: 30, 20: 4})),
         "well", "It is well again. 34 jobs died in the last hour; usually none does."),
        (replace(WELL, types=(of_type("crm", deaths=minutes(dict.fromkeys(range(2, 60, 5), 1))),)), "bad",
         "crm: 12 deaths in the last hour, usually 0."),
        (replace(WELL, types=(of_type("crm", deaths=minutes(dict.fromkeys(range(4, 60, 5), 1))),)), "slow",
         "crm: 12 deaths in the last hour, usually 0."),
        (replace(WELL, types=(of_type("crm", deaths=minutes(dict.fromkeys(range(4, 60, 5), 55))),)), "slow",
         "crm: 660 deaths in the last hour, usually 0."),
        (replace(WELL, types=(of_type("crm", deaths=since(9, 31), error=VAT),)), "bad",
         "crm: 31 deaths a minute, usually 0, since 2026-11-28T03:21:00Z: KeyError: 'vat_id'."),
        # A burst of which a few still die is told as less and less a minute, and never by the hour.
        (replace(WELL, types=(of_type("crm", deaths=minutes({2: 1, 3: 50})),)), "bad",
         "crm: 0.2 deaths a minute, usually 0, since 2026-11-28T03:27:00Z."),
        # What is contained is no emergency any more.
        (replace(WELL, types=(STANCHED,), holds=(breaker(412, 15),)), "slow",
         "bank: its breaker is open since 2026-11-28T03:15:30Z, 412 jobs held; bank answered 503."),
        (replace(WELL, holds=(pause(18, forgotten="still on after 3 d"),)), "slow",
         "jobs of a are paused by ops since 2026-11-28T03:25:30Z: 18 jobs held; still on after 3 d."),
        # What may die soon.
        (replace(WELL, types=(GROWS,)), "slow",
         "mail: 94 retries a minute, usually 6, since 2026-11-28T03:20:00Z: bank answered 503; none has "
         "died."),
        # What is slow, and what stands still.
        (replace(WELL, queues=(replace(SEARCH, depth=3651, in_per_second=9.1, keeps_up=False),)), "slow",
         "The queue search falls behind by 4.9 jobs a second; the oldest job waits for 17 min."),
        (replace(WELL, queues=(SEARCH,)), "slow",
         "The queue search is late: the oldest job waits for 17 min."),
        (replace(WELL, queues=(replace(SEARCH, depth=2200, oldest_at=AT - 3 * MINUTE, in_per_second=0.0,
                                       out_per_second=2.7),)), "slow",
         "The queue search is late: 2,200 jobs wait, and they take 13 min 35 s; the oldest job waits for "
         "3 min."),
        (replace(WELL, queues=(replace(SEARCH, depth=2200, oldest_at=None, out_per_second=2.7),)), "slow",
         "The queue search is late: 2,200 jobs wait, and they take 13 min 35 s."),
        (replace(WELL, queues=(replace(SEARCH, depth=2200, oldest_at=AT - 5 * MINUTE, in_per_second=2.7,
                                       out_per_second=2.7, keeps_up=False),)), "slow",
         "The queue search does not get shorter: 2,200 jobs wait; the oldest job waits for 5 min."),
        (replace(WELL, queues=(QueueFacts("celery", "search", 9, keeps_up=False),)), "bad",
         "No worker takes the queue search: 9 jobs wait."),
        (replace(WELL, hosts=(replace(HOST, seen=5), SILENT)), "slow",
         "The host search-2 is silent since 2026-11-28T03:10:30Z: 1 worker of celery."),
        (replace(WELL, hosts=(replace(HOST, seen=1), SILENT)), "bad",
         "The host search-2 is silent since 2026-11-28T03:10:30Z: 1 worker of celery."),
        (replace(WELL, hosts=(HOST, SILENT, replace(SILENT, host="search-3", silent_since=AT - MINUTE))),
         "bad", "2 of 3 hosts are silent since 2026-11-28T03:29:30Z: search-2, search-3."),
        (replace(WELL, hosts=(HOST, replace(HOST, framework="dramatiq"), SILENT,
                              replace(SILENT, framework="dramatiq"))), "slow",
         "The host search-2 is silent since 2026-11-28T03:10:30Z: 1 worker of celery, 1 worker of dramatiq."),
        (replace(WELL, hosts=(replace(HOST, seen=9),
                              *(replace(SILENT, host=f"s-{number}") for number in range(7)))), "slow",
         "7 of 8 hosts are silent since 2026-11-28T03:10:30Z: s-0, s-1, s-2, s-3, s-4 and 2 more."),
        (replace(WELL, hosts=(HOST, SILENT, replace(SILENT, host="search-3")),
                 queues=(replace(SEARCH, keeps_up=False),)), "bad",
         "2 of 3 hosts are silent since 2026-11-28T03:10:30Z: search-2, search-3."),
        (replace(WELL, hosts=(replace(HOST, seen=3, silent=1, silent_since=AT - MINUTE),)), "slow",
         "1 of 4 workers on billing-1 is silent since 2026-11-28T03:29:30Z."),
        (replace(WELL, hosts=(replace(HOST, seen=9), SILENT,
                              replace(HOST, framework="dramatiq", host="search-2"))), "slow",
         "No worker of celery on search-2 answers since 2026-11-28T03:10:30Z."),
        (replace(WELL, hosts=(SILENT,), queues=(QueueFacts("celery", "search", 9, keeps_up=False),)), "bad",
         "No worker of celery answers since 2026-11-28T03:10:30Z: 9 jobs wait."),
        (replace(WELL, hosts=()), "slow", "No worker runs: none was seen in the last 90 s."),
        (replace(WELL, runs=(*(600,) * 50, *(0,) * 10)), "slow",
         "No job has ended for 10 minutes; usually 600 a minute do."),
        (replace(WELL, overdue="the oldest parked retry is 300 s overdue"), "slow",
         "Parked jobs are late: the oldest parked retry is 300 s overdue."),
        # What answers late is slow.
        (replace(WELL, broker=Part("degraded")), "slow", "The broker takes long to answer."),
        # What is away is one sentence, whatever else there is.
        (replace(WELL, types=(BLEEDS,), store=Part("away", "refused", AT)), "away",
         "The store is away since 2026-11-28T03:30:30Z: no job begins."),
        (replace(WELL, store=Part("away", "refused", AT), fail_open=True), "away",
         "The store is away since 2026-11-28T03:30:30Z: jobs begin without their reservations."),
        (replace(WELL, types=(BLEEDS,), broker=Part("away", "refused", AT)), "away",
         "The broker is away since 2026-11-28T03:30:30Z: no job comes to a worker."),
        (replace(WELL, broker=Part("away", "celery: refused", AT, "celery")), "away",
         "The broker of celery is away since 2026-11-28T03:30:30Z: no job of it comes to a worker."),
        (replace(WELL, broker=Part("away", "", AT), store=Part("away", "", AT)), "away",
         "The store and the broker are away since 2026-11-28T03:30:30Z: no job begins."),
        (Facts(AT, Part("degraded"), OK), "slow",
         "The store takes long to answer, and nothing is known yet."),
    ],
)  # fmt: skip
def test_one_sentence(facts: Facts, level: str, sentence: str) -> None:
    verdict = verdict_of(facts)
    assert (verdict.sentence, verdict.level) == (sentence, level)
    assert verdict.about not in verdict.lines
    assert verdict.level != "away" or verdict.lines == ()


@pytest.mark.parametrize(
    "quiet",
    [
        of_type(deaths=minutes({0: 1})),
        of_type(deaths=minutes({0: 4})),
        of_type(deaths=minutes(dict.fromkeys(range(0, 60, 12), 1))),
        of_type(deaths=minutes({30: 200, 31: 200})),
        of_type(deaths=(30,) * MINUTES, usual_deaths=30.0),
        of_type(deaths=(50,) * MINUTES, usual_deaths=30.0),
        of_type(retried=(9,) * MINUTES, usual_retried=6.0),
        of_type(retried=(90,) * MINUTES, usual_retried=None),
        of_type(retried=minutes({3: 60, 4: 47}), retry_error=BANK),
    ],
)
def test_no_cry_over_little(quiet: TypeFacts) -> None:
    """Over one death, over what has ended, or over what is usual."""
    assert verdict_of(replace(WELL, types=(quiet,))).level == "well"


@pytest.mark.parametrize(
    ("deaths", "usual", "level", "lines"),
    [
        ({2: 30, 4: 25}, 0, "bad", []),
        ({0: 1, 3: 30, 4: 25}, 0, "bad", []),
        ({3: 30, 4: 25}, 0, "well",
         ["mail.send: 55 deaths from 2026-11-28T03:26:00Z to 2026-11-28T03:28:00Z; none since"]),
        ({15: 55}, 0, "well",
         ["mail.send: 55 deaths from 2026-11-28T03:15:00Z to 2026-11-28T03:16:00Z; none since"]),
        ({16: 55}, 0, "well", []),
        ({1: 4, 5: 55}, 0, "well", []),
        ({3: 4}, 0, "well", []),
        ({**dict.fromkeys(range(60), 30), 8: 2000}, 30, "well",
         ["mail.send: 2,000 deaths from 2026-11-28T03:22:00Z to 2026-11-28T03:23:00Z; no more than usual "
          "since"]),
    ],
)  # fmt: skip
def test_deaths_that_are_over_are_not_bad(
    deaths: Mapping[int, int], usual: float, level: str, lines: list[str]
) -> None:
    """Over is what has had none in the last two whole minutes, nor in this one; it is told for a while."""
    mail = of_type("mail.send", deaths=minutes(deaths), usual_deaths=usual, error=VAT)
    verdict = verdict_of(replace(WELL, types=(mail,)))
    assert verdict.level == level
    assert [line.text for line in verdict.lines] == lines
    assert all(line.kind == "ended" and line.type == "mail.send" for line in verdict.lines)


@pytest.mark.parametrize(
    "silent", [(SILENT,), (SILENT, replace(SILENT, host="search-3")), (replace(HOST, silent=1),)]
)
def test_a_line_about_hosts_counts_nothing_that_waits(silent: tuple[HostFacts, ...]) -> None:
    verdict = verdict_of(replace(WELL, hosts=(*silent, replace(HOST, host="cedar", seen=9))))
    assert verdict.about is not None
    assert (verdict.about.kind, verdict.about.count) == ("slow", None)


def test_a_few_an_hour_are_no_rate() -> None:
    """The page shows the number of a line as one a minute; that of the hour is in the text."""
    crm = of_type("crm", deaths=minutes(dict.fromkeys(range(2, 60, 5), 1)))
    verdict = verdict_of(replace(WELL, types=(crm,)))
    assert verdict.about is not None
    assert verdict.about.count is None


def test_what_is_bad_stands_over_what_is_held_grows_or_is_slow() -> None:
    """Each has a line under the sentence, with its number and what it is about."""
    facts = replace(
        WELL,
        types=(BLEEDS, of_type("mail", retried=since(10, 94), retry_error=replace(BANK, retrying=187))),
        holds=(pause(18), replace(pause(3), id="breaker:smtp", dependency="smtp", types=())),
        queues=(QueueFacts("celery", "search", 3651, None, 9.1, 4.2, keeps_up=False, workers=1),),
        hosts=(replace(HOST, seen=5), SILENT),
        marks=(MarkFacts(AT - 20 * MINUTE, "v42"), MarkFacts(AT - 50 * MINUTE, "v41")),
    )
    verdict = verdict_of(facts)
    assert verdict.since == datetime(2026, 11, 28, 3, 12, tzinfo=timezone.utc)
    assert verdict.why == (
        "It began 1 min after the mark v42. In the last minutes 262 of 400 runs died. 96 more jobs retry "
        "with this error."
    )
    assert verdict.about is not None
    assert (verdict.about.type, verdict.about.fingerprint) == ("billing.charge", "f" * 16)
    assert [(line.kind, line.count) for line in verdict.lines] == [
        ("contained", 3),
        ("contained", 18),
        ("on_its_way", 187),
        ("slow", 3651),
    ]
    assert verdict.lines[-1].text == (
        "The queue search falls behind by 4.9 jobs a second; silent: search-2 since 2026-11-28T03:10:30Z"
    )


def test_calm_says_why_it_is_well() -> None:
    facts = replace(
        WELL, queues=(QueueFacts("celery", "b", 7, AT - timedelta(seconds=2), 1, 1, True, False, 2),)
    )
    assert verdict_of(facts).why == (
        "Every queue keeps up. No job has waited longer than 2 s. All 2 workers answer. Nothing is held."
    )
    assert verdict_of(WELL).why == "No job waits in a queue. All 2 workers answer. Nothing is held."


def test_a_breaker_that_has_just_opened_and_one_that_leaks() -> None:
    """In the minute of its opening it is not known whether the deaths have ended; later deaths are bad."""
    early = replace(STANCHED, deaths=minutes({0: 30, 1: 70, 2: 70}))
    assert verdict_of(replace(WELL, types=(early,), holds=(breaker(9, 0),))).level == "bad"
    assert verdict_of(replace(WELL, types=(STANCHED,), holds=(breaker(9, 15),))).level == "slow"
    assert verdict_of(replace(WELL, types=(BLEEDS,), holds=(breaker(9, 15),))).level == "bad"


COUNTS = st.lists(st.integers(0, 5000), min_size=MINUTES, max_size=MINUTES).map(tuple)
USUAL = st.none() | st.floats(0, 1000)
PARTS = st.builds(
    Part, st.sampled_from(["ok", "unknown", "degraded", "away"]), st.text(), st.none() | st.just(AT)
)
TYPES = st.builds(
    TypeFacts, st.text(min_size=1), COUNTS, COUNTS, COUNTS, USUAL, USUAL, st.just(("bank",)) | st.just(()),
    st.none() | st.builds(ErrorFacts, st.text(), st.text(), st.text(), st.integers(0, 99)),
)  # fmt: skip
TIMES = st.integers(0, 100_000).map(lambda seconds: AT - timedelta(seconds=seconds))
QUEUES = st.builds(
    QueueFacts, st.just("celery"), st.text(min_size=1), st.none() | st.integers(0, 10**6), st.none() | TIMES,
    st.none() | st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.booleans(), st.booleans(),
    st.integers(0, 9),
)  # fmt: skip
HOSTS = st.integers(0, 3).flatmap(
    lambda silent: st.builds(
        HostFacts, st.sampled_from(["celery", "dramatiq"]), st.text(), st.integers(0, 9), st.just(silent),
        TIMES if silent else st.none(), st.just(("search",)),
    )
)  # fmt: skip
HOLDS = st.builds(
    HoldFacts, st.sampled_from(["breaker:bank", "pause:x"]), st.text(), TIMES, st.integers(0, 999),
    st.just(("a",)), st.none() | st.just("bank"), st.none(), st.text(), st.text(),
    st.sampled_from(["", "still on after 3 d"]),
)  # fmt: skip
FACTS = st.builds(
    Facts, st.just(AT), PARTS, PARTS, COUNTS, COUNTS, st.none() | st.just((1.5,) * MINUTES), USUAL,
    st.lists(TYPES, max_size=3).map(tuple), st.lists(HOLDS, max_size=3).map(tuple),
    st.lists(QUEUES, max_size=3).map(tuple), st.lists(HOSTS, max_size=3).map(tuple),
    st.lists(st.builds(MarkFacts, TIMES, st.text()), max_size=2).map(tuple), st.none() | TIMES,
)  # fmt: skip


@given(FACTS)
def test_whatever_is_known_there_is_a_verdict(facts: Facts) -> None:
    """It has one sentence that ends, JSON, and a level that fits what is away."""
    verdict = verdict_of(facts)
    assert verdict.sentence.endswith(".")
    assert verdict.to_ojs()["level"] == verdict.level
    is_away = "away" in (facts.store.status, facts.broker.status)
    is_unknown = facts.store.status == "degraded" and facts.last_seen_at is None and not any(facts.runs)
    assert is_unknown or (verdict.level == "away") == is_away
    assert all(not line.text.endswith(".") for line in verdict.lines)


@given(COUNTS, st.floats(0, 1000), st.integers(0, MINUTES - 1), st.integers(1, 5000))
def test_more_deaths_are_never_less_bad(deaths: Minutes, usual: float, place: int, more: int) -> None:
    """What was told is told on when more jobs die in any minute, and what is more usual is told less."""
    worse = (*deaths[:place], deaths[place] + more, *deaths[place + 1 :])
    if rise_of(AT, deaths, usual):
        assert rise_of(AT, worse, usual)
        assert rise_of(AT, deaths, 0.0)
    if not rise_of(AT, deaths, usual):
        assert not rise_of(AT, deaths, usual + 1)


#: Few die, many, or none.
FEW_OR_MANY = st.lists(
    st.just(0) | st.integers(0, 9) | st.integers(0, 5000), min_size=MINUTES, max_size=MINUTES
).map(tuple)


@given(
    FEW_OR_MANY, st.integers(0, 5), st.just(0.0) | st.floats(0, 1000), st.integers(0, 59),
    st.integers(0, 600), st.sampled_from([DEATHS, RETRIES]),
)  # fmt: skip
def test_no_rate_rises_while_nobody_dies(
    deaths: Minutes, quiet: int, usual: float, second: int, seconds: int, windows: Sequence[tuple[int, int]]
) -> None:
    """Nor does what is over, or what is no rise, become one."""
    before = (*deaths[quiet:], *(0,) * quiet)
    at = AT.replace(second=second)
    later = at + timedelta(seconds=seconds)
    passed = (minute_of(later) - minute_of(at)) // MINUTE
    first = rise_of(at, before, usual, windows)
    second_one = rise_of(later, (*before[passed:], *(0,) * passed), usual, windows)
    if second_one is not None:
        assert first is not None
        assert second_one.rate <= first.rate + 1e-9
        assert second_one.over or not first.over


@given(COUNTS, USUAL)
def test_a_rise_began_within_the_hour(deaths: Minutes, usual: float | None) -> None:
    if rise := rise_of(AT, deaths, usual):
        assert AT - MINUTES * MINUTE <= rise.since <= AT
        assert rise.rate >= 0
        assert rise.in_hour > 0


@given(st.text(max_size=500))
def test_an_error_is_cut_to_one_line(text: str) -> None:
    assert len(cut(text)) <= 120
    assert len(cut(text).splitlines()) <= 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.04, "0"), (1, "1"), (1.25, "1.2"), (9.96, "10"), (74.6, "75"), (1e4, "10,000")],
)
def test_numbers_for_people(number: float, text: str) -> None:
    assert number_of(number) == text
