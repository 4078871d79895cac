"""The package's face on an index: the wheel, the sdist, their metadata and the long description."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.packaging.documents import PROJECT, ROOT

README = (ROOT / "README.md").read_text("utf-8")
VERSION = PROJECT["version"]
LINK = re.compile(r"\]\((?P<target>[^)]+)\)")


@pytest.fixture(scope="module")
def wheel(dist: Path) -> list[str]:
    """The names of the wheel's files."""
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(dist: Path) -> Message:
    """The metadata of the wheel, with the long description as its body."""
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        return message_from_bytes(archive.read(f"ojs_bridge-{VERSION}.dist-info/METADATA"))


def in_the_repository(*folders: str) -> set[str]:
    """Return the files of the repository in some folders, or at its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_has_the_package_and_nothing_else(wheel: list[str]) -> None:
    """Every file of the package is in it: the page, Lua's scripts, the mark of the types."""
    package = {name for name in wheel if ".dist-info/" not in name}
    assert package == in_the_repository("ojs_bridge", "ojs_bridge_pytest.py")
    assert {"ojs_bridge/py.typed", "ojs_bridge/http/page/index.html"} <= package
    about = {name.partition(".dist-info/")[2] for name in wheel} - {""}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_has_what_its_tests_need_and_no_machinery(dist: Path) -> None:
    """Someone who packages it for a distribution runs the tests from the sdist."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    machinery = {name for name in in_the_repository() if name.startswith(".") and name != ".gitignore"}
    assert names == in_the_repository() - machinery | {"PKG-INFO"}


def test_the_long_description_renders(dist: Path) -> None:
    """An index refuses one that does not."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_links_of_the_long_description_work_from_an_index(metadata: Message) -> None:
    """An index has no file of the repository: these links and pictures are left out, and their words stay."""
    described = str(metadata.get_payload())
    assert [link for link in LINK.findall(described) if not link.startswith("https://")] == []
    assert described.count("\n## ") == README.count("\n## ")
    for path in re.findall(r"\[((?:docs|examples)/?[^\]]*|\w+\.md)\]", README):
        assert path in described


@pytest.mark.parametrize("document", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_links_of_a_document_lead_to_a_file(document: str) -> None:
    """A link to a place in a file leads to a heading there."""
    for target in LINK.findall((ROOT / document).read_text("utf-8")):
        if not target.startswith("https://"):
            name, _, place = target.partition("#")
            assert (ROOT / name).exists(), target
            headings = (
                re.findall(r"^#+ (.*)$", (ROOT / name).read_text("utf-8"), re.MULTILINE) if place else []
            )
            assert not place or place in {
                re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings
            }


def test_the_classifiers_name_the_pythons_that_are_supported(metadata: Message) -> None:
    """`make wheels` runs a first job on each of them, and the oldest is the floor of the project."""
    found = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier", []) if ":: 3." in line]
    assert f">={found[0]}" == metadata["Requires-Python"] == PROJECT["requires-python"]
    minors = [int(version.partition(".")[2]) for version in found]
    assert minors == list(range(minors[0], minors[0] + len(minors)))
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_links_of_the_project_are_absolute() -> None:
    """No address of a repository is known yet, so that none is told."""
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())


def test_the_changelog_begins_with_this_version() -> None:
    """The newest entry is the version of pyproject.toml."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION
