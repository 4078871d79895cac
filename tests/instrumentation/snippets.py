"""The snippets of monitoring.md: each names its file in its first line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "monitoring.md").read_text("utf-8")
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def snippet(name: str) -> dict[str, Any]:
    """Run a snippet, and return its names."""
    names: dict[str, Any] = {}
    exec(SNIPPETS[name], names)
    return names
