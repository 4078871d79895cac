"""The extras: what an import says without its extra, and the install lines of the documents."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.packaging.documents import EXTRAS, documented, documents, extras_of, install_lines

#: A module of the package, the extra that it needs, and a library of this extra.
MODULES = [
    ("celery", "celery", "celery"),
    ("dramatiq", "dramatiq", "dramatiq"),
    ("http", "http", "starlette"),
    ("http", "http", "uvicorn"),
    ("instrumentation.opentelemetry", "otel", "opentelemetry"),
    ("instrumentation.prometheus", "prometheus", "prometheus_client"),
    ("instrumentation.sentry", "sentry", "sentry_sdk"),
]


@pytest.mark.parametrize(("module", "extra", "library"), MODULES)
def test_a_module_without_its_extra_names_it(module: str, extra: str, library: str) -> None:
    """The last line of the error has the command that installs what is missing."""
    code = f"import sys; sys.modules[{library!r}] = None; import ojs_bridge.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(f": pip install 'ojs-bridge[{extra}]'")


def test_all_has_every_extra() -> None:
    """A new extra belongs into `all`."""
    assert extras_of(("ojs-bridge[all]",)) == set(EXTRAS)


def test_every_install_line_is_found() -> None:
    """`make wheels` runs the lines that this finds."""
    for path in documents():
        text = path.read_text("utf-8")
        assert len(install_lines(text)) == text.count("pip install"), path
    assert {"celery", "dramatiq"} <= {extra for line in documented() for extra in extras_of(line)}
