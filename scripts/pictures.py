"""Draws the Mermaid diagrams of the pages as SVG, so that the site needs no script of another host.

It needs npm, and Playwright with Chromium. `python scripts/pictures.py` draws what is new or has changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^ *accTitle: (.+)$", re.MULTILINE)
STYLE = """{startOnLoad: false, theme: "neutral", htmlLabels: false, flowchart: {htmlLabels: false},
    fontFamily: "sans-serif", deterministicIds: true}"""


def title_of(source: str) -> str:
    """Return the title that a diagram must have; it is the picture's name, and its text for the blind."""
    found = TITLE.search(source)
    if found is None:
        raise ValueError(f"a diagram has no accTitle: {source}")
    return found[1]


def picture_of(source: str) -> Path:
    """Return the path of a diagram's picture."""
    name = re.sub(r"[^a-z0-9]+", "-", title_of(source).lower())
    return DOCS / "pictures" / f"{name}.svg"


def mark_of(source: str) -> str:
    """Return the comment by which a picture says from which text it was drawn."""
    return f"<!-- {hashlib.sha256(source.encode()).hexdigest()[:16]} -->"


def is_drawn(source: str) -> bool:
    """Return whether a diagram's picture was drawn from just this text."""
    picture = picture_of(source)
    return picture.exists() and mark_of(source) in picture.read_text("utf-8")


def main() -> None:
    """Draw the pictures that are not drawn, or drawn from another text."""
    texts = (path.read_text("utf-8") for path in DOCS.rglob("*.md"))
    wanted = [source for text in texts for source in DIAGRAM.findall(text) if not is_drawn(source)]
    for source, svg in zip(wanted, drawn(wanted) if wanted else (), strict=True):
        picture_of(source).write_text(f"{svg}{mark_of(source)}\n", "utf-8")
        print(f"drew {picture_of(source).name}")


def drawn(sources: list[str]) -> list[str]:
    """Return the pictures of diagrams."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, "mermaid@11"], check=True)  # noqa: S603, S607
        chromium = shutil.which("chromium-headless-shell") or "/usr/bin/chromium"
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(path=f"{folder}/node_modules/mermaid/dist/mermaid.min.js")
        page.evaluate(f"mermaid.initialize({STYLE})")
        draw = """async source => {
            const {svg} = await mermaid.render("picture", source)
            const drawing = new DOMParser().parseFromString(svg, "text/html").querySelector("svg")
            const [, , width, height] = drawing.getAttribute("viewBox").split(" ")
            drawing.setAttribute("width", width)
            drawing.setAttribute("height", height)
            drawing.style.background = "white"
            return new XMLSerializer().serializeToString(drawing)
        }"""
        return [page.evaluate(draw, source) for source in sources]


if __name__ == "__main__":
    main()
