"""The Python of the pages runs: all snippets of a page, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge
from tests.lives import bridge_with_outbox
from tests.test_operating import bury, celery_message

DOCS = Path(__file__).parents[1] / "docs"
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
#: The pages whose snippets other tests run, or which show parts of a project of `examples`.
ELSEWHERE = {
    *("tutorial.md", "how-to/install.md", "how-to/testing.md", "how-to/policies.md", "how-to/errors.md"),
    *("how-to/migrating.md", "how-to/coming-from.md", "how-to/monitoring.md", "how-to/django.md"),
}
PAGES = {str(path.relative_to(DOCS)): path.read_text("utf-8") for path in DOCS.rglob("*.md")}
RUN = sorted(name for name, text in PAGES.items() if "```python" in text and name not in ELSEWHERE)
LETTER = "5d4f0c1e"


@pytest.mark.parametrize("name", RUN)
def test_the_snippets_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = prepared()
    for _, code in SNIPPET.findall(PAGES[name]):
        exec(compile(textwrap.dedent(code), name, "exec"), names)


COMMANDS = re.compile(r"^\$ (ojs-bridge (?!serve).*)$", re.MULTILINE)
MESSAGE = {"properties": {}, "exchange": "", "routing_key": "celery", "queue": "celery"}
SHOP = """\
from celery import Celery
from ojs_bridge import Bridge
from ojs_bridge.celery import install
app = Celery("shop", broker="memory://")
@app.task(name="billing.charge")
def charge(order): ...
install(app, Bridge("sqlite:///shop.db"))
"""


def test_the_commands_of_a_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the page on replays: its shop has dead letters, and they are sent back."""
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(SHOP)
    bridge = prepared()["bridge"]
    bridge.dead_letters.purge(confirm=True)
    for n in (1, 2):
        bury(
            bridge,
            f"{LETTER}{n}",
            framework="celery",
            type="billing.charge",
            message=MESSAGE | celery_message(n),
        )
    commands = COMMANDS.findall(PAGES["how-to/operating.md"])
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command.replace("5d4f", f"{LETTER}1"))[1:]
        done = subprocess.run(
            [sys.executable, "-m", "ojs_bridge.cli", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def prepared() -> dict[str, Any]:
    """Return what an operator has at hand: a bridge with a dead letter, and a time."""
    bridge, _ = bridge_with_outbox("sqlite:///shop.db")
    for n, letter in enumerate((LETTER, "6e5f", "7f60")):
        bury(bridge, letter, type="billing.charge", message=celery_message(n))
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    return {"__name__": "snippet", "Bridge": Bridge, "bridge": bridge, "tomorrow": tomorrow}
