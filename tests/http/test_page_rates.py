"""Rates, in a real browser: charts by outcome and type, marks, the table of types, and the time."""

from __future__ import annotations

import re
from datetime import timedelta

from playwright.sync_api import Locator, expect

from ojs_bridge.store import BOUNDS, Rate
from tests.http.desks import Desk, browser, desk
from tests.http.test_page_now import at
from tests.store.test_rates import record

__all__ = ["browser", "desk"]

EMPTY = [0] * len(BOUNDS)


def chart(desk: Desk, title: str) -> Locator:
    """Return a chart of the rates."""
    return desk.page.get_by_role("img", name=re.compile(f"^{title}"))


def test_rates(desk: Desk) -> None:
    """Charts tell runs by outcome and type, beside the marks; a type is chosen in the table, and let go."""
    store = desk.bridge.store
    assert store is not None
    hour = desk.now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    counts = {
        ("a.b", "completed"): 30,
        ("a.b", "retried"): 10,
        ("c", "dead_lettered"): 4,
        ("c", "recovered"): 1,
    }
    told = [
        Rate(hour + timedelta(minutes=7), type_, "q", outcome, (count, *EMPTY))
        for (type_, outcome), count in counts.items()
    ]
    record(store, told)
    desk.bridge.marks.add("v42", at=hour + timedelta(minutes=30))
    page = desk.open("#rates?within=86400")
    expect(chart(desk, "Succeeded")).to_have_attribute(
        "aria-label", re.compile("30 in all, at most 30 a bar; v42 at")
    )
    expect(chart(desk, "Deaths")).to_have_attribute("aria-label", re.compile("4 in all"))
    expect(chart(desk, "Share of retries")).to_have_attribute("aria-label", re.compile("at most 23 %"))
    expect(chart(desk, "Time to success")).to_have_attribute("aria-label", re.compile("at most 10 ms"))
    expect(chart(desk, "Lost")).to_have_count(0)
    rows = page.locator("table.types tbody tr")
    expect(rows).to_have_text(["a.b30100025 %5 ms10 ms", "c00400 %\N{EN DASH}\N{EN DASH}"])
    colour = rows.first.locator("i").evaluate("dot => getComputedStyle(dot).backgroundColor")
    page.get_by_role("button", name="c", exact=True).click()
    expect(page).to_have_url(re.compile("type=c"))
    expect(rows).to_have_count(1)
    expect(chart(desk, "Deaths")).to_have_attribute("aria-label", re.compile("4 in all"))
    page.get_by_role("button", name="c", exact=True).click()
    expect(rows).to_have_count(2)
    assert rows.first.locator("i").evaluate("dot => getComputedStyle(dot).backgroundColor") == colour
    record(store, [Rate(desk.now, "a.b", "q", "completed", (5, *EMPTY))])
    expect(chart(desk, "Succeeded")).to_have_attribute("aria-label", re.compile("35 in all"))


def test_a_bar_is_read_and_opened(desk: Desk) -> None:
    """A pointer reads a bar; a click on deaths leads to their letters; a drag zooms, and a link keeps it."""
    store = desk.bridge.store
    assert store is not None
    minutes = [desk.now.replace(second=0, microsecond=0) - timedelta(minutes=n) for n in range(1, 59)]
    record(store, [Rate(one, "a.b", "q", "dead_lettered", (2, *EMPTY)) for one in minutes])
    page = desk.open("#rates?type=a.*")
    deaths = chart(desk, "Deaths")
    expect(deaths).to_have_attribute("aria-label", re.compile("116 in all, at most 2 a bar"))
    deaths.scroll_into_view_if_needed()
    page.mouse.move(*at(deaths, 0.5))
    expect(page.locator("figure", has=deaths).locator("figcaption")).to_contain_text(
        re.compile(r"\d\d:\d\d: a.b 2")
    )
    page.mouse.click(*at(deaths, 0.5))
    expect(page).to_have_url(re.compile(r"#letters\?type=a\.\*&since=[^&]+&until=[^&]+$"))
    page.go_back()
    expect(deaths).to_be_visible()
    page.mouse.move(*at(deaths, 0.25))
    page.mouse.down()
    page.mouse.move(*at(deaths, 0.75), steps=5)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"#rates\?type=a\.\*&since=[^&]+&until="))
    expect(deaths).not_to_have_attribute("aria-label", re.compile("116 in all"))
    page.reload()
    expect(page.locator("[data-range]")).to_contain_text(" to ")
    expect(deaths).not_to_have_attribute("aria-label", re.compile("116 in all"))
