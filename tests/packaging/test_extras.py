"""The extras: what an import says without its extra, and the install lines of the documents."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.packaging.documents import EXTRAS, documented, documents, extras_of, install_lines
from tests.packaging.environments import Environment

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


#: A fleet's clients and libraries, newer than any that there is; and the oldest that are supported.
NEWEST = {
    **dict.fromkeys(("redis", "kombu", "billiard", "sqlalchemy", "starlette", "uvicorn"), "99.0"),
    **dict.fromkeys(("typer", "rich", "isodate", "prometheus-client", "sentry-sdk"), "99.0"),
}
OLDEST = {
    "celery": "5.4.0",
    "kombu": "5.3.4",
    "billiard": "4.2.0",
    "dramatiq": "2.0.0",
    "redis": "5.0.0",
    "sqlalchemy": "2.0.28",
    "psycopg": "3.1.8",
    "psycopg-binary": "3.1.8",
    "pydantic": "2.7.0",
}


def a_fleet(folder: Path, versions: Mapping[str, str]) -> str:
    """Return the Python of an environment in which pip finds what is here, some of it in other versions."""
    environment = Environment(folder, sys.executable)
    (site,) = folder.glob(".venv/lib/python*/site-packages")
    for found in distributions():
        name = found.name.lower().replace("_", "-")
        if name == "ojs-bridge":
            continue
        version = versions.get(name, found.version)
        # An older release of a library needs older releases of others.
        needs = [] if versions is OLDEST else found.requires or []
        extras = found.metadata.get_all("Provides-Extra") or []
        lines = ["Metadata-Version: 2.1", f"Name: {found.name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {each}" for each in needs]
        at = site / f"{name.replace('-', '_')}-{version}.dist-info"
        at.mkdir(exist_ok=True)
        (at / "METADATA").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return environment.python


@pytest.mark.parametrize("versions", [{}, NEWEST, OLDEST], ids=["as here", "newest", "oldest"])
def test_no_line_changes_what_a_fleet_has(versions: dict[str, str], dist: Path, tmp_path: Path) -> None:
    """Beside clients and libraries of any supported version, pip would add the bridge alone.

    The extra `all` has what each line needs. `make wheels` tries each line in real fleets.
    """
    wanted = f"ojs-bridge[all] @ {next(dist.glob('*.whl')).as_uri()}"
    command = [sys.executable, "-m", "pip", "--python", a_fleet(tmp_path, versions), "install", "--dry-run"]
    done = subprocess.run(
        [*command, "--no-index", "--quiet", "--report", "-", wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]] == ["ojs-bridge"]
