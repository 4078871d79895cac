"""Now, in a real browser: the verdict, the hill, groups, queues, holds, workers and the pulse."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from ojs_bridge.store import BOUNDS, Rate
from tests.http.desks import Desk, browser, desk
from tests.lives import FRAMEWORK
from tests.operations.test_health import worker
from tests.store.test_rates import record

__all__ = ["browser", "desk"]

EMPTY = [0] * len(BOUNDS)


def have_an_incident(desk: Desk) -> None:
    """Let jobs die for some minutes, after a quiet hour, behind a mark; jobs wait, and others are held."""
    store, minute = desk.bridge.store, desk.now.replace(second=0, microsecond=0)
    assert store is not None
    dying = [
        Rate(minute - timedelta(minutes=n), "crm.sync", "crm", "dead_lettered", (30, *EMPTY))
        for n in range(6)
    ]
    calm = [
        Rate(minute - timedelta(minutes=n), "mail.send", "mail", "completed", (9, *EMPTY)) for n in range(59)
    ]
    record(store, [*dying, *calm])
    error = {"type": "KeyError", "message": "no field vat_id of 17", "backtrace": ["/srv/crm.py:7 in sync"]}
    for n in range(12):
        desk.bury(f"crm-{n}", ago=20 + 20 * n, error=error, type="crm.sync", queue="crm")
    desk.bridge.marks.add("v42", at=minute - timedelta(minutes=7))
    desk.bridge.pause("mail.*", reason="the relay is down")
    held = {"kind": "held", "attempt": 1, "fence": 0, "state": {"v": 1, "attempt": 1}, "type": "mail.send"}
    desk.park("held", reason="held", **held)
    desk.outbox.waiting, desk.outbox.oldest_at = {"slow": 1200}, minute - timedelta(minutes=5)
    worker(desk.bridge, "a:1", FRAMEWORK, "fast")


def local(page: Page, text: str) -> str:
    """Return a sentence of the server as the page says it."""
    clock = "(time) => new Date(time).toLocaleTimeString('sv').slice(0, 5)"
    return str(page.evaluate(f"(text) => text.replace(/\\d{{4}}-\\d\\d-\\d\\dT[0-9:.]+Z/g, {clock})", text))


def test_an_incident(desk: Desk) -> None:
    """The sentence is the server's; beneath it stand what dies, what waits, what is held, and by whom."""
    have_an_incident(desk)
    page = desk.open("")
    now = page.request.get(f"{desk.address}ojs/v1/admin/now").json()
    assert now["verdict"]["level"] == "bad"
    verdict = page.locator(".verdict.bad")
    expect(verdict.locator("h1")).to_have_text(local(page, now["verdict"]["sentence"]))
    expect(
        page.get_by_role("img", name=re.compile("^Deaths a minute: 180 in all, at most 30 a bar; v42 at"))
    ).to_be_visible()
    group = page.locator(".groups [data-row]")
    expect(group).to_have_count(1)
    for told in ("no field vat_id of #", "New", "crm.sync", "no field vat_id of 17", "12"):
        expect(group).to_contain_text(told)
    queue = page.locator("#queues tr", has_text="slow")
    for told in ("1,200", "[5-9] min"):
        expect(queue).to_contain_text(re.compile(told))
    hold = page.locator('.cards [data-id^="pause:"]')
    for told in ("mail.*", "paused", "1 held", "the relay is down"):
        expect(hold).to_contain_text(told)
    expect(page.locator(".ws")).to_contain_text("idle")
    pulse = page.locator(".pulse")
    for told in ("/min", "In queues 1,200", "Held 1", "Store ok", "Broker ok", "Workers 1"):
        expect(pulse).to_contain_text(re.compile(told.replace(" ", r"\s*")))
    expect(page.locator("nav a", has_text="Groups")).to_contain_text("1 bad")
    expect(page.locator("nav a", has_text="Letters")).to_contain_text("12")
    group.locator("a").first.click()
    expect(page).to_have_url(re.compile("#groups/[0-9a-f]{16}$"))
    page.keyboard.press("n")
    hold.get_by_role("button", name="Resume…").click()
    expect(page.locator("#question-title")).to_have_text("Resume the jobs?")
    desk.yes()
    expect(hold).to_have_count(0)
    expect(page.locator("section[aria-label=Holds]")).to_contain_text("Nothing is held.")


def test_a_quiet_hour_says_why_it_is_well(desk: Desk) -> None:
    page = desk.open("")
    expect(page.locator(".verdict h1")).to_be_visible()
    expect(page.locator(".verdict")).not_to_have_class(re.compile("bad"))
    expect(page.locator("main")).to_contain_text("Nothing is new, nothing came back, nothing grows.")
    expect(page.locator("section[aria-label=Operations]")).to_contain_text("None runs.")
    desk.bury("one")
    expect(page.locator("nav a", has_text="Letters")).to_contain_text("1")


def at(chart: Locator, share: float) -> tuple[float, float]:
    """Return a point on the bars of a chart, at a share of its width."""
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    return box["x"] + share * box["width"], box["y"] + box["height"] / 2


def test_a_bar_leads_to_its_letters_and_a_drag_to_its_rates(desk: Desk) -> None:
    """The time of the bar, or of the drag, stands in the address."""
    have_an_incident(desk)
    page = desk.open("")
    chart = page.locator(".chart")
    expect(chart.locator("canvas")).to_be_visible()
    page.mouse.click(*at(chart, 0.99))
    expect(page).to_have_url(re.compile(r"#letters\?since=[^&]*&until="))
    expect(page.locator("[data-range]")).to_be_visible()
    page.go_back()
    page.mouse.move(*at(chart, 0.5))
    page.mouse.down()
    page.mouse.move(*at(chart, 0.9), steps=5)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"#rates\?since=[^&]*&until="))
    page.get_by_role("button", name="Last hour").click()
    expect(page).to_have_url(re.compile("#rates$"))


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "light"), (1920, "dark")]
)
def test_nothing_is_wider_than_the_screen(desk: Desk, width: int, scheme: str) -> None:
    """Neither in a quiet hour nor in an incident with long words; a phone says the pulse in one line."""
    page = desk.page
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    for is_bad in (False, True):
        if is_bad:
            have_an_incident(desk)
            long = "w" * 250
            desk.bury(long[:180], type=long, queue=long, error={"type": long, "message": long})
            desk.bridge.pause(long, reason=long)
        desk.open("")
        expect(page.locator(".verdict h1")).to_be_visible()
        expect(page.locator(".groups [data-row]")).to_have_count(2 if is_bad else 0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect(page.locator(".line" if width < 900 else ".pulse")).to_be_visible()
    expect(page.locator(".pulse" if width < 900 else ".line")).to_be_hidden()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) < 200) is (scheme == "dark")
