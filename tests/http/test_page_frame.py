"""Everybody can use Now, Rates, Audit and the keys: axe finds nothing wrong there."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.http.desks import Desk, browser, desk
from tests.http.test_page_now import have_an_incident

__all__ = ["browser", "desk"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_the_frame(desk: Desk, scheme: Any) -> None:
    """In a quiet hour and in an incident, in the light and in the dark, on a desk and on a phone."""
    axe, page = Axe(), desk.page
    page.emulate_media(color_scheme=scheme)

    def check() -> None:
        found = axe.run(page)
        assert found.violations_count == 0, found.generate_report()

    desk.open("#now")
    expect(page.locator(".verdict h1")).to_be_visible()
    check()
    have_an_incident(desk)
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 844})
        for view, seen in (
            ("now", ".groups [data-row]"),
            ("rates", "table.types tr"),
            ("audit", "#audit [data-row]"),
        ):
            desk.open(f"#{view}")
            expect(page.locator(seen).first).to_be_visible()
            check()
    desk.open("#lettres")
    expect(page.locator("#trouble")).to_be_visible()
    check()
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    check()
