"""The exporters are extras: without its library, an exporter says which extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.instrumentation.snippets import SNIPPETS

LIBRARIES = {"otel": "opentelemetry", "prometheus": "prometheus_client", "sentry": "sentry_sdk"}


@pytest.mark.parametrize(("extra", "library"), LIBRARIES.items())
def test_a_missing_library_is_named_by_its_extra(extra: str, library: str) -> None:
    """The import of the exporter fails; that of the package does not."""
    name = {"otel": "opentelemetry"}.get(extra, extra)
    code = f"import sys; sys.modules[{library!r}] = None; import ojs_bridge.instrumentation.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'ojs-bridge[{extra}]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_of_the_docs_runs(name: str) -> None:
    """In a process of its own, because exporters change the libraries that they instrument."""
    subprocess.run([sys.executable, "-c", SNIPPETS[name]], check=True, capture_output=True)
