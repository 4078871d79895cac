"""Draws the calls that a dependency counted, second by second: a panel for each fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from tests.storm.settings import PHASES
from tests.storm.trial import Verdict

#: In pixels: the picture's width, a panel's height, the room above it and left of it.
WIDTH, HIGH, ABOVE, LEFT = 860, 100, 40, 40
COLOURS = ("#c2410c", "#6d28d9", "#0f766e")
SHADES = {"outage": "#fecaca", "brown-out": "#fef3c7"}
TITLE = "Calls a second at a dependency that goes down, comes back and browns out"


def picture(verdicts: Mapping[str, Verdict]) -> str:
    """Return the picture as SVG; the fleets have the scales in common."""
    every = {name: verdict.a_second() for name, verdict in verdicts.items()}
    seconds, most = max(map(len, every.values())), max(map(max, every.values()))
    settings = next(iter(verdicts.values())).settings
    height, across = len(every) * (ABOVE + HIGH) + 30, (WIDTH - LEFT - 10) / seconds

    def panels() -> Iterator[str]:
        for n, (name, calls) in enumerate(every.items()):
            ground = (n + 1) * (ABOVE + HIGH)
            begins = 0.0
            for phase, ends in zip(PHASES, [*settings.ends, seconds], strict=True):
                x, wide = LEFT + begins * across, (ends - begins) * across
                if phase in SHADES:
                    yield f'<rect x="{x:.0f}" y="{ground - HIGH}" width="{wide:.0f}" height="{HIGH}" '
                    yield f'fill="{SHADES[phase]}"/>{_text(x + wide / 2, ground - HIGH + 13, phase)}'
                begins = ends
            capacity = ground - settings.capacity * HIGH / most
            yield f'<path d="M{LEFT} {capacity:.1f}H{WIDTH - 10}" stroke="#475569" stroke-dasharray="4 3"/>'
            steps = "".join(f"V{ground - count * HIGH / most:.1f}h{across:.2f}" for count in calls)
            yield f'<path d="M{LEFT} {ground}{steps}V{ground}z" fill="{COLOURS[n]}"/>'
            yield f'<path d="M{LEFT} {ground}H{WIDTH - 10}" stroke="#334155"/>'
            yield _text(LEFT, ground - HIGH - 8, f"{name}: {sum(calls):,} calls", 'font-weight="bold"')
            for count, y in ((most, ground - HIGH + 8), (settings.capacity, capacity + 4), (0, ground)):
                yield _text(LEFT - 6, y, str(count), 'text-anchor="end"')
        for at in range(0, seconds, 60):
            yield _text(LEFT + at * across, height - 12, f"{at} s", 'text-anchor="middle"')

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" fill="none" '
        f'font-family="sans-serif" font-size="12"><title>{TITLE}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(panels())}</svg>\n'
    )


def _text(x: float, y: float, words: str, more: str = "") -> str:
    middle = more or 'text-anchor="middle"'
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#0f172a" {middle}>{escape(words)}</text>'
