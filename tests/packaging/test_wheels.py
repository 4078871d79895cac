"""`make wheels`: every install line of the documents in a fresh environment, and a first job with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.documents import BRIDGE, EXTRAS, PROJECT, ROOT, documented, extras_of
from tests.packaging.environments import ALONE, APPS, Environment
from tests.packaging.walking import FRAMEWORKS, Newcomer, text_for

pytestmark = [pytest.mark.wheels, pytest.mark.timeout(600)]

LINES = [line for line in documented() if BRIDGE.search(" ".join(line))]
EACH = [(f"ojs-bridge[{extra}]",) for extra in EXTRAS]
TESTED = [
    words.rpartition(" ")[2]
    for words in PROJECT["classifiers"]
    if words.startswith("Programming Language :: Python :: 3.")
]
#: What a build of the checkout itself needs.
BUILD = ["hatchling", "hatch-fancy-pypi-readme"]
ASKING = 'import os; from ojs_bridge import Bridge; Bridge(os.environ["STORE_URL"]).dead_letters.stats()'
Making = Callable[[set[str], str], Environment]


@pytest.fixture(scope="module")
def house(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of everything that any line installs, in the versions of today."""
    folder = tmp_path_factory.mktemp("house")
    wheel = next(dist.glob("*.whl"))
    others = {word for line in LINES for word in line if not BRIDGE.search(word) and not word.startswith("-")}
    wanted = [f"ojs-bridge[all] @ {wheel.as_uri()}", *sorted(others), *BUILD]
    _pip("wheel", "--wheel-dir", str(folder), *wanted)
    return folder


@pytest.fixture
def making(tmp_path: Path, request: pytest.FixtureRequest) -> Making:
    """Return a maker of environments, with the broker, and with the store that the extras are for."""

    def make(extras: set[str], python: str) -> Environment:
        broker = request.getfixturevalue("valkey_url")
        stores = {
            "postgresql": lambda: request.getfixturevalue("postgres_url"),
            "sql": lambda: "sqlite:///ojs.db",
            "redis": lambda: broker,
        }
        store = next((url() for extra, url in stores.items() if extra in extras), None)
        return Environment(tmp_path, python, BROKER_URL=broker, **({"STORE_URL": store} if store else {}))

    return make


@pytest.mark.parametrize("line", list(dict.fromkeys([*LINES, *EACH])), ids=" ".join)
def test_an_install_line_is_enough_for_a_first_job(
    line: tuple[str, ...], house: Path, making: Making
) -> None:
    """Each extra does its work, alone and in each documented combination."""
    extras = extras_of(line)
    environment = making(extras, sys.executable)
    _pip(
        "--python",
        environment.python,
        "install",
        "--no-compile",
        "--no-index",
        "--find-links",
        str(house),
        *line,
        *(["redis"] if extras & set(APPS) else []),  # the fleet's own client of its broker
    )
    _use(environment, extras)


FLEETS = {
    "celery": [
        ["celery==5.4.0", "kombu==5.3.7", "redis==5.0.8", "sqlalchemy==2.0.36"],
        ["celery", "redis", "sqlalchemy"],
        ["celery==5.5.3", "redis==8.0.0"],
    ],
    "dramatiq": [["dramatiq==2.0.0", "redis==5.0.0"], ["dramatiq", "redis", "pika"]],
}


@pytest.mark.parametrize("framework", FLEETS)
def test_a_fleet_keeps_what_it_has(framework: str, dist: Path, tmp_path: Path) -> None:
    """`pip freeze` before a line and after it: the line adds, and changes nothing."""
    others = set(FLEETS) - {framework}
    lines = [line for line in LINES if not extras_of(line) & {*others, "all"}]
    wheel = next(dist.glob("*.whl")).as_uri()
    for number, fleet in enumerate(FLEETS[framework]):
        environment = Environment(tmp_path / str(number), sys.executable)
        _pip("--python", environment.python, "install", "--no-compile", *fleet)
        before = _freeze(environment)
        for line in lines:
            words = [f"ojs-bridge[{match['extras']}] @ {wheel}" if (match := BRIDGE.fullmatch(word)) else word
                     for word in line]  # fmt: skip
            _pip("--python", environment.python, "install", "--no-compile", *words)
            assert before <= _freeze(environment), (fleet, line)


def _freeze(environment: Environment) -> set[str]:
    command = [sys.executable, "-m", "pip", "--python", environment.python, "freeze"]
    return {*subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")}


@pytest.mark.parametrize("version", TESTED)
def test_each_python_of_the_classifiers(version: str, dist: Path, making: Making) -> None:
    """The wheel with all extras, on each Python that this machine has."""
    found = subprocess.run(
        [ROOT / "scripts" / "python", version], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"there is no Python {version} on this machine")
    extras = extras_of(("ojs-bridge[all]",))
    environment = making(extras, found.stdout.strip())
    wheel = next(dist.glob("*.whl"))
    _pip("--python", environment.python, "install", "--no-compile", f"ojs-bridge[all] @ {wheel.as_uri()}")
    _use(environment, extras)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_tutorial_in_an_empty_folder(framework: str, house: Path, tmp_path: Path) -> None:
    """A newcomer types every line of it, and is at its end in less than ten minutes."""
    path = f"{Path(sys.base_prefix) / 'bin'}:{os.defpath}"
    variables = {"PATH": path, "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house)}
    began = time.monotonic()
    Newcomer(tmp_path, variables, is_installed=False).follow(text_for(framework))
    assert time.monotonic() - began < 300  # the other half is for reading


def test_the_sdist_installs(dist: Path, house: Path, making: Making) -> None:
    """An index may have only the sdist for someone: pip builds the same wheel from it."""
    environment = making(set(), sys.executable)
    sdist = next(dist.glob("*.tar.gz"))
    _pip(
        "--python",
        environment.python,
        "install",
        "--no-compile",
        "--no-index",
        "--find-links",
        str(house),
        str(sdist),
    )
    environment.run("python -c 'import ojs_bridge; ojs_bridge.RetryPolicy()'")


def _pip(*words: str) -> None:
    # From the checkout, which some lines install.
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, cwd=ROOT, check=True)


def _use(environment: Environment, extras: set[str]) -> None:
    for extra in sorted(extras & set(ALONE)):
        environment.run(f"python {ALONE[extra]}")
    frameworks = sorted(extras & set(APPS))
    for framework in frameworks:
        environment.first_jobs(framework)
        for ran in environment.folder.glob("*.ran"):
            ran.unlink()
        if {"cli", "http"} <= extras and "STORE_URL" in environment.variables:
            environment.shows_the_page(framework)
    if "STORE_URL" in environment.variables and not frameworks:
        environment.run(f"python -c '{ASKING}'")
    shutil.rmtree(environment.folder / ".venv")
