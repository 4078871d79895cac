"""Runs the frameworks' own tests twice, alone and with a bridge on each app and broker, and writes the page.

It fetches the tests of the versions that are installed: Celery's from its source distribution, and Dramatiq's
from its public repository, since its source distribution has only a part of them. git's own setting
`url.<copy>.insteadOf` names a copy where the repository is out of reach. Valkey and RabbitMQ run on their
default ports meanwhile, which must be free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from scripts.native.reasons import REASONS
from tests.servers import RabbitMQ, Valkey

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "frameworks-tests.md"
REPOSITORY = "https://github.com/Bogdanp/dramatiq"
#: Plugins of pytest that are installed here, and that the frameworks' tests do not want.
WITHOUT = ("cacheprovider", "xdist", "hypothesispytest", "schemathesis", "ojs_bridge_pytest")
#: What Celery's tests import beside Celery.
EXTRAS = ("freezegun", "pytest-click")
#: A stand-in for the client of memcached, whose own tests are left out.
PYLIBMC = """\
from unittest.mock import MagicMock


class NotFound(Exception): ...


class SomeErrors(Exception): ...


def Client(*args, **options):
    return MagicMock()


ClientPool = Client
"""
NOT_EXPLAINED = "**not explained**"
INTRODUCTION = """\
# The frameworks' own tests

`make native` runs the frameworks' own tests twice, and writes this page: once alone, and once with a plain
`install` on each app and each broker that they make. A test is listed if it ends otherwise under the bridge.
It runs again by itself then, with the bridge and without, and counts as passed if it passes once: some tests
are too quick for a loaded machine.
"""


@dataclass(frozen=True)
class Suite:
    """The tests of one framework."""

    name: str
    chosen: tuple[str, ...]
    left_out: str
    arguments: tuple[str, ...]

    @property
    def version(self) -> str:
        """The version that is installed here, and whose tests run."""
        return version(self.name.lower())


CELERY = Suite(
    "Celery",
    ("t/unit/app", "t/unit/tasks", "t/unit/worker"),
    "The unit tests of apps, tasks and workers.",
    ("-o", "python_classes=test_*"),
)
DRAMATIQ = Suite(
    "Dramatiq",
    ("tests",),
    "All tests but those of its program, whose processes the plugin does not reach, those of memcached and "
    "of the rate limits by time, and one that sends 16,000 messages.",
    (
        *(
            f"--ignore=tests/{name}"
            for name in ("benchmarks", "test_cli.py", "test_pidfile.py", "test_watch.py")
        ),
        "-k",
        "not memcached and not window_rate_limiter and not dead_lettered_messages_are_cleaned_up",
    ),
)


def fetch(suite: Suite, folder: Path) -> Path:
    """Bring the tests of a framework into a folder, and return it; the installed framework runs them."""
    place = folder / suite.name
    if suite is DRAMATIQ:
        tag = f"v{suite.version}"
        command = [
            "git",
            "-c",
            "advice.detachedHead=false",
            "clone",
            "--quiet",
            "--depth=1",
            f"--branch={tag}",
            REPOSITORY,
            str(folder / "clone"),
        ]
        subprocess.run(command, check=True)  # noqa: S603
        place.mkdir()
        (folder / "clone" / "tests").rename(place / "tests")
        return place
    pip("download", "--no-deps", "--no-binary=celery", f"--dest={folder}", f"celery=={suite.version}")
    (archive,) = folder.glob("celery-*.tar.gz")
    with tarfile.open(archive) as packed:
        inside = f"celery-{suite.version}/"
        tests = [member for member in packed.getmembers() if member.name.startswith(f"{inside}t/")]
        packed.extractall(folder, tests, filter="data")
    return (folder / inside).rename(place)


def pip(*arguments: str) -> None:
    """Call pip without its messages."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)  # noqa: S603


@dataclass(frozen=True)
class Runner:
    """Runs tests of a suite in its folder."""

    suite: Suite
    place: Path
    extras: Path

    def run(self, *tests: str, bridged: bool) -> dict[str, str]:
        """Return how each test ended: passed, skipped or failed."""
        side = "bridged" if bridged else "alone"
        results = self.place / f"{side}.json"
        plugins = ["recorded", "bridged"] if bridged else ["recorded"]
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "--timeout=45"]
        command += [f"-pno:{name}" for name in WITHOUT] + [f"-p{name}" for name in plugins]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, self.extras))),
            "RESULTS": str(results),
        }
        with (self.place / f"{side}.log").open("ab") as log:
            subprocess.run(  # noqa: S603
                [*command, *self.suite.arguments, *(tests or self.suite.chosen)],
                cwd=self.place,
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            )
        ends: dict[str, str] = json.loads(results.read_text("utf-8"))
        results.unlink()
        print(f"{self.suite.name}, {side}: {dict(Counter(ends.values()))}", flush=True)
        return ends

    def compare(self) -> list[str]:
        """Run the tests on both sides, and return the lines of the page."""
        alone, bridged = self.run(bridged=False), self.run(bridged=True)
        differing = [test for test, end in alone.items() if bridged.get(test) != end]
        for ends, side in ((alone, False), (bridged, True)) if differing else ():
            again = self.run(*differing, bridged=side)
            ends.update({test: end for test, end in again.items() if end == "passed"})
        return [*self.summary(alone, bridged), *self.rows(alone, bridged)]

    def summary(self, alone: dict[str, str], bridged: dict[str, str]) -> Iterator[str]:
        """Yield the heading of a suite, and how many of its tests passed."""
        ends = [Counter(alone.values()), Counter(bridged.values())]
        yield f"\n## {self.suite.name} {self.suite.version}\n\n{self.suite.left_out}\n"
        yield "| | passed | skipped | failed |\n|---|---:|---:|---:|"
        for side, counted in zip(("alone", "bridged"), ends, strict=True):
            yield f"| {side} | {counted['passed']:,} | {counted['skipped']:,} | {counted['failed']:,} |"

    def rows(self, alone: dict[str, str], bridged: dict[str, str]) -> Iterator[str]:
        """Yield a row for each test that differs; the cases of a test with parameters are counted."""
        found = Counter(
            (test.partition("[")[0], f"{end}, {bridged.get(test, 'not run')}")
            for test, end in alone.items()
            if bridged.get(test) != end
        )
        yield "\n| test | cases | alone, bridged | why |\n|---|---:|---|---|" if found else "\nNone differs."
        for (test, ends), cases in sorted(found.items()):
            file, _, name = test.partition("::")
            yield f"| `{Path(file).name}` `{name}` | {cases} | {ends} | {reason_of(test)} |"


def reason_of(test: str) -> str:
    """Return why a test differs."""
    return next((why for tests, why in REASONS.items() if fnmatchcase(test, tests)), NOT_EXPLAINED)


def main() -> None:
    """Run both suites side by side, and write the page."""
    valkey, rabbitmq = Valkey(appendonly="no"), RabbitMQ()
    valkey.port, rabbitmq.port = 6379, 5672
    with tempfile.TemporaryDirectory(prefix="ojs-native-") as name, valkey, rabbitmq:
        folder = Path(name)
        extras = folder / "extras"
        pip("install", "--no-deps", f"--target={extras}", *EXTRAS)
        (extras / "pylibmc.py").write_text(PYLIBMC, "utf-8")
        runners = [Runner(suite, fetch(suite, folder), extras) for suite in (CELERY, DRAMATIQ)]
        with ThreadPoolExecutor() as threads:
            lines = [line for part in threads.map(Runner.compare, runners) for line in part]
    PAGE.write_text("\n".join([INTRODUCTION.rstrip(), *lines]) + "\n", "utf-8")
    if NOT_EXPLAINED in PAGE.read_text("utf-8"):
        sys.exit(f"{PAGE.name} names tests that are not explained")


if __name__ == "__main__":
    main()
