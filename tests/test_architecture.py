"""The page that shows a newcomer around names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
MOST_STOPS = 10


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`(ojs_bridge/[\w/]+\.py)`", PAGE)
    assert len(named) > MOST_STOPS
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_a_journey_has_ten_stops_at_most() -> None:
    journeys = PAGE.split("\n## ")[1:]
    assert len(journeys) == 4
    assert all(0 < len(re.findall(r"^\d+\. ", journey, re.MULTILINE)) <= MOST_STOPS for journey in journeys)
