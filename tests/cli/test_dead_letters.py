"""`ojs-bridge dead-letters`, on a real store."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from collections.abc import Sequence
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from ojs_bridge import Bridge
from ojs_bridge.cli.letters import counts
from ojs_bridge.operations import dead_letters, letters
from ojs_bridge.store import Letter, Stats, to_json
from ojs_bridge.store.sql.letters import SQLLetters
from tests.cli.conftest import fill
from tests.cli.running import run
from tests.operations.test_operating import bury
from tests.store.test_store import entry, letter


def ids(store: str, *words: str) -> list[str]:
    """Return the ids of a list's answer."""
    ran = run("dead-letters", "list", "--json", *words, store=store)
    assert (ran.code, ran.err) == (0, "")
    return [letter["id"] for letter in ran.json]


def test_from_looking_to_purging(url: str) -> None:
    """Each store is listed, counted, shown, exported, emptied and filled by an import."""
    fill(url)
    assert ids(url) == ["j-0", "j-1", "j-2", "j-3"]
    assert "j-3" in run("dead-letters", "list", "--store", url).out
    [told] = run("dead-letters", "stats", "--json", store=url).json
    assert (told["total"], told["by_queue"]) == (4, {"default": 3, "slow": 1})
    [letter] = run("dead-letters", "show", "j-0", "--json", store=url).json
    assert (letter["args"], letter["kwargs"]) == ([0], {"to": "ann"})
    exported = run("dead-letters", "export", store=url).out
    deleted = run("dead-letters", "delete", "j-0", "--yes", "--json", store=url)
    assert (deleted.code, deleted.json) == (0, [{"id": "j-0", "deleted": True}])
    assert run("dead-letters", "purge", "--all", "--yes", store=url).out == "3 dead letters deleted\n"
    assert ids(url) == []
    taken = run("dead-letters", "import", "-", "--yes", "--json", store=url, stdin=exported)
    assert taken.json == [{"imported": 4}]
    assert ids(url, "--all") == ["j-0", "j-1", "j-2", "j-3"]


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--queue", "slow"], "3"),
        (["--type", "billing.*"], "02"),
        (["--error-type", "external.*"], "012"),
        (["--since", "PT90M"], "01"),
        (["--since", "90m"], "01"),
        (["--until", "2h"], "23"),
        (["--since", "150m", "--until", "30m"], "12"),
        (["--since", "2020-01-01"], "0123"),
        (["--until", "2020-01-01T00:00:00+02:00"], ""),
        (["--since", "2020-01-01T00:00:00z"], "0123"),
        (["--text", "NO ANSWER 2"], "2"),
    ],
)
def test_filters(store: str, words: list[str], found: str) -> None:
    """Filters count alone and together; a list, a dry run and an export take them in the same way."""
    expected = [f"j-{n}" for n in found]
    assert ids(store, *words) == expected
    [told] = run("dead-letters", "replay", "--all", "--dry-run", "--json", *words, store=store).json
    assert (told["matched"], told["confirmed"]) == (len(found), False)
    exported = run("dead-letters", "export", *words, store=store).json
    assert [letter["id"] for letter in exported] == expected[::-1]
    [told] = run("dead-letters", "stats", "--json", *words, store=store).json
    assert told["total"] == sum(told["by_type"].values()) == len(found)


@pytest.mark.usefixtures("bridge")
def test_pages(store: str) -> None:
    """The cursor of the next page goes to stderr, so that stdout has letters only."""
    first = run("dead-letters", "list", "--json", "--limit", "3", store=store)
    assert len(first.json) == 3
    cursor = first.err.removeprefix("there may be more: --cursor ").strip()
    assert ids(store, "--cursor", cursor) == ["j-3"]


@pytest.mark.usefixtures("bridge")
def test_all_there_is_of_a_letter(store: str) -> None:
    """The command shows arguments, reason, policy, and every error with its backtrace."""
    told = run("dead-letters", "show", "j-1", store=store).out
    for part in ('[1]', '{"to": "ann"}', "no attempt is left", "mail.send", '{"tenant": "acme"}', "3 of 3",
                 "attempt 1  2026-11-21T10:00:00.000Z  external.timeout", "  slow", "no answer 1",
                 "    File 'shop.py', line 7\n      charge()"):  # fmt: skip
        assert part in told


def test_what_a_terminal_would_obey_is_escaped(bridge: Bridge, store: str) -> None:
    """A job's own texts change neither colours nor lines, and are no markup."""
    bury(bridge, "evil", type="a\x1b[2Jb\nc\ud800", errors=(entry(1, message="\x1b]0;x\x07 [red]y[/nope]"),))
    listed, shown = (
        run("dead-letters", "list", store=store).out,
        run("dead-letters", "show", "evil", store=store),
    )
    assert r"a\x1b[2Jb\nc\ud800" in listed
    assert r"\x1b]0;x\x07 [red]y[/nope]" in shown.out
    assert "\x1b" not in listed + shown.out


ODD = ("\x1b[2J", 5, None, ["\x1b]0;x\x07", 7, None], {"a": "\x1b"}, True, 1.5)
FIELDS = ("replay", "backtrace", "details", "message", "type", "code", "timestamp", "attempt")


def test_entries_of_any_shape_are_shown(bridge: Bridge, store: str) -> None:
    """An imported entry may lack a field, or hold any value of JSON in it."""
    odd = tuple({**entry(1), field: value} for field in FIELDS for value in ODD)
    lacking = tuple({k: v for k, v in entry(1).items() if k != field} for field in FIELDS)
    bury(bridge, "evil", errors=({**entry(1), "replay": 2}, {}, *odd, *lacking))
    shown = run("dead-letters", "show", "evil", store=store)
    assert shown.code == 0
    assert "\x1b" not in shown.out
    assert r"replay \x1b[2J" in shown.out


@pytest.mark.usefixtures("bridge")
def test_a_narrow_screen(store: str) -> None:
    """Each letter has one line; the last error's message is cut where the screen ends."""
    told = run("dead-letters", "list", store=store, COLUMNS="50").out.splitlines()
    assert [line.split()[0] for line in told if line.startswith("j-")] == ["j-0", "j-1", "j-2", "j-3"]
    assert re.search(r"^j-0 +\d\d-\d\d \d\d:\d\d +billing\.\S+ +external.+…$", told[1])
    assert max(map(len, told)) <= 50
    assert all(line == line.rstrip() for line in told)


def test_eighty_columns(bridge: Bridge, store: str) -> None:
    """A letter has one line there, whatever its texts; a pipe and JSON have the whole id and more."""
    first, second = "0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d000-469f-a165-70867728950e"
    long = "the gateway says no\n" * 30
    bury(bridge, first, type="shop.tasks.billing.invoices.charge", errors=(entry(1, message=long),))
    bury(bridge, second, errors=(entry(1, message={"odd": long}), {}))
    told = run("dead-letters", "list", store=store, COLUMNS="80").out
    lines = [line for line in told.splitlines() if line.startswith("0f8fad5b")]
    assert {line.split()[0] for line in lines} == {"0f8fad5b-d9", "0f8fad5b-d0"}
    assert "  …ing.invoices.charge  " in told
    assert "external.timeout: the g" in told
    assert max(map(len, told.splitlines())) <= 80
    wide = run("dead-letters", "list", store=store, COLUMNS="1000").out
    assert first in wide
    assert "external.timeout: the gateway says no\\nthe gateway" in wide
    assert max(map(len, wide.splitlines())) <= 1000


def test_a_cell_is_cut_where_a_wide_character_would_be_halved(bridge: Bridge, store: str) -> None:
    """No line is longer than the screen."""
    bury(bridge, "wide", errors=(entry(1, message="漢" * 100),))
    told = run("dead-letters", "list", store=store, COLUMNS="81").out
    assert all(cell_len(line) <= 81 for line in told.splitlines())
    assert re.search("漢 ?…", told)


@pytest.mark.requirement("DLQ-R002")
def test_where_a_replay_began(bridge: Bridge, store: str) -> None:
    """The history marks it."""
    errors = (entry(1), entry(2), {**entry(1), "replay": 1}, {**entry(1), "replay": 2})
    bury(bridge, "again", errors=errors, replay_count=2)
    told = run("dead-letters", "show", "again", store=store).out
    lines = [line.split("  ")[0] for line in told.splitlines() if line.startswith(("attempt ", "replay "))]
    assert lines == ["attempt 1", "attempt 2", "replay 1", "attempt 1", "replay 2", "attempt 1"]


@pytest.mark.usefixtures("bridge")
def test_dry_runs(store: str) -> None:
    """A dry run shows the letters that there are, names those that are not there, and changes none."""
    ran = run("dead-letters", "replay", "j-0", "nobody", "--dry-run", store=store)
    assert (ran.code, ran.err) == (1, "there is no dead letter 'nobody'\n")
    assert "j-0" in ran.out
    ran = run("dead-letters", "replay", "--all", "--dry-run", store=store)
    assert (ran.code, ran.out.splitlines()[0][:14]) == (0, "4 dead letters")
    assert ran.err == "only the app knows which of them it can publish: --app MODULE:APP\n"
    ran = run("dead-letters", "purge", "--queue", "slow", "--dry-run", "--json", store=store)
    assert (ran.code, ran.json[0]["matched"], ran.json[0]["confirmed"]) == (0, 1, False)
    assert len(ids(store)) == 4


def test_numbers_are_told_alike_in_words_and_in_tables() -> None:
    """Thousands have a comma, in a sentence and in a cell."""
    console = Console(width=80, record=True, file=StringIO())
    console.print(*counts(Stats(1234, {"mail": 1234})))
    told = console.export_text()
    assert told.count("1,234") == 2
    assert "1234" not in told


def test_stats_know_the_retention_of_apps_alone(bridge: Bridge, store: str) -> None:
    """A bridge that the command makes itself has no retention that counts."""
    assert run("dead-letters", "stats", "--json", store=store).json[0]["retention"] == {}
    told = run("dead-letters", "stats", store=store).out
    assert "4 dead letters, from " in told
    assert "billing.charge" in told
    assert "max age" not in told


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["show", "nobody"], 1, "there is no dead letter 'nobody'"),
        (["delete", "nobody", "--yes"], 1, "there is no dead letter 'nobody'"),
        (["list", "--since", "yesterday"], 2, "since: 'yesterday' must be a time such as 2026-"),
        (["list", "--until", "P1"], 2, "until: 'P1' must be a time such as"),
        (
            ["list", "--since", "2h", "--until", "2026-11-20"],
            2,
            "until: '2026-11-20' must be later than since, '2h'",
        ),
        (["export", "/nowhere/x"], 2, "file: '/nowhere/x': No such file or directory"),
        (["import", "/nowhere/x"], 2, "file: '/nowhere/x': No such file or directory"),
        (["list", "--since", "9" * 30 + "d"], 2, "since: '999"),
        (["list", "--limit", "0"], 2, "limit: 0 must be between 1 and 1000"),
        (["list", "--cursor", "x"], 2, "cursor: 'x' was not given out"),
        (["list", "--namespace", "a\nb"], 2, "namespace: "),
        (["list", "--store", "nonsense"], 2, "store: 'nonsense' is not a URL"),
        (["list", "--store", "sqlite:///typo.db"], 3, "store: 'sqlite:///typo.db': there is no such file"),
        (["list", "--store", "redis://:pw@127.0.0.1:1/0"], 3, "the store 'redis://***@127.0.0.1:1/0' failed"),
        (["purge", "--all"], 2, "Delete 4 dead letters from sqlite:"),
        (["purge", "--yes"], 2, "purge: say which: options such as --queue and --type, or --all"),
        (["delete", "j-0"], 2, "There is no terminal to ask on: say --yes"),
        (["prune"], 2, "prune: only the app knows how long letters are kept"),
        (["prune", "--max-age", "x", "--max-count", "1"], 2, "retention: max_age: 'x' is not an ISO 8601"),
        (["replay", "j-0"], 2, "app: none is given, and a message is published by the app"),
        (["replay"], 2, "replay: say which: ids, or --all"),
        (["replay", "j-0", "--all"], 2, "replay: say which: ids, or --all"),
        (["replay", "j-0", "--queue", "q"], 2, "replay: --rate and the options that say which go with --all"),
        (["replay", "--all", "--args", "[]"], 2, "replay: changes go with ids"),
        (["replay", "--all", "--rate", "0"], 2, "rate: 0.0 must be a number of jobs a second above zero"),
        (["import", "nowhere.jsonl", "--yes"], 2, "file: 'nowhere.jsonl': No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_done(store: str, words: list[str], code: int, told: str) -> None:
    """One line on stderr names the trouble, stdout is empty, and no letter is touched."""
    ran = run("dead-letters", *words, store=store)
    assert (ran.code, ran.out) == (code, "")
    assert told in ran.err
    assert ran.err.count("\n") == 1
    assert len(ids(store)) == 4


def test_no_store_at_all() -> None:
    """The error says how to name a store."""
    ran = run("dead-letters", "list")
    assert ran.code == 2
    assert ran.err == (
        "ojs-bridge: store: which one? Dead letters and waiting jobs are in the database that your "
        "Bridge(store=...) names. Name your app: --app MODULE:APP, or OJS_BRIDGE_APP. Or name the store: "
        "--store postgresql://user@db/shop, or OJS_BRIDGE_STORE. Without a store dead letters are in the "
        "dead queues of the broker\n"
    )


@pytest.mark.usefixtures("bridge")
def test_a_namespace_of_its_own(store: str) -> None:
    """An option or a variable names the namespace."""
    assert ids(store, "--namespace", "elsewhere") == []
    ran = run("dead-letters", "list", store=store, OJS_BRIDGE_NAMESPACE="elsewhere")
    assert ran.out == "no dead letters in the namespace 'elsewhere'\n"


def test_the_beginning_of_an_id(bridge: Bridge, store: str) -> None:
    """Four characters are enough if they name one letter; a whole id comes first, and several are refused."""
    for name in ("order-1", "order-12", "order-13", "other-7"):
        bury(bridge, name)
    assert run("dead-letters", "show", "othe", "--json", store=store).json[0]["id"] == "other-7"
    assert run("dead-letters", "show", "order-1", "--json", store=store).json[0]["id"] == "order-1"
    assert (
        run("dead-letters", "show", "oth", store=store).err == "ojs-bridge: there is no dead letter 'oth'\n"
    )
    ran = run("dead-letters", "delete", "othe", "order", "--yes", store=store)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("ojs-bridge: id: 'order' begins several: order-1")
    assert "other-7" in run("dead-letters", "replay", "othe", "--dry-run", store=store).out
    ran = run("dead-letters", "delete", "othe", "other-7", "order-13", "--yes", "--json", store=store)
    assert ran.json == [{"id": "other-7", "deleted": True}, {"id": "order-13", "deleted": True}]
    assert {"order-1", "order-12"} < {found.id for found in bridge.dead_letters.list().letters}


@pytest.mark.usefixtures("bridge")
def test_a_search_goes_on_until_it_has_found_enough(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that has looked through a part of the store without a match is no answer."""
    monkeypatch.setattr(dead_letters, "READ", 1)
    monkeypatch.setattr(dead_letters, "LOOK_THROUGH", 2)
    assert ids(store, "--text", "no answer 3") == ["j-3"]
    assert ids(store, "--text", "nowhere") == []
    ran = run("dead-letters", "list", "--json", "--limit", "2", "--text", "no answer", store=store)
    assert [letter["id"] for letter in ran.json] == ["j-0", "j-1"]
    assert ran.err.startswith("there may be more: --cursor ")


@pytest.mark.usefixtures("bridge")
def test_some_of_many_ids(store: str) -> None:
    """The command does the others, names each, and its exit code says that one was not done."""
    ran = run("dead-letters", "delete", "j-0", "nobody", "j-1", "--yes", "--json", store=store)
    assert ran.code == 1
    assert ran.json == [
        {"id": "j-0", "deleted": True},
        {"id": "nobody", "error": "there is no dead letter 'nobody'"},
        {"id": "j-1", "deleted": True},
    ]


def test_one_that_is_being_replayed_stays(bridge: Bridge, store: str) -> None:
    """A purge leaves the letter, and says so."""
    assert bridge.store is not None
    bridge.store.letters.claim(["j-2"], now=bridge.engine.now(), seconds=60)
    ran = run("dead-letters", "purge", "--all", "--yes", store=store)
    assert (ran.code, ran.out) == (1, "3 dead letters deleted, 1 stayed\n")
    assert ids(store) == ["j-2"]


@pytest.mark.usefixtures("bridge")
def test_pruning_with_limits_of_ones_own(store: str) -> None:
    """The limits are an age, then a number."""
    words = ("prune", "--max-age", "PT150M", "--max-count", "2")
    refused = run("dead-letters", *words, store=store)
    assert refused.code == 2
    assert "Delete 2 dead letters, the oldest, from sqlite:" in refused.err
    assert run("dead-letters", *words, "--yes", "--json", store=store).json == [{"pruned": 2}]
    assert ids(store) == ["j-0", "j-1"]
    assert run("dead-letters", *words, store=store).out == "0 dead letters pruned\n"


@pytest.mark.usefixtures("bridge")
def test_a_file_and_back(store: str, tmp_path: Path) -> None:
    """A new store takes the export; each letter is the same."""
    file, other = tmp_path / "letters.jsonl", f"sqlite:///{tmp_path}/other.db"
    assert run("dead-letters", "export", str(file), "--type", "mail.*", store=store).out == ""
    taken = run("dead-letters", "import", str(file), "--yes", "--store", other)
    assert (taken.code, taken.out) == (0, "2 dead letters imported\n")
    shown = [run("dead-letters", "show", "j-1", "--json", store=kept).json for kept in (store, other)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_leaves_no_half_file(tmp_path: Path, there: bool) -> None:
    """The store fails after many lines: a file that was there is as it was, and no other one is left."""
    store, folder = f"sqlite:///{tmp_path}/ojs.db", tmp_path / "exports"
    bridge, file = Bridge(store), folder / "letters.jsonl"
    folder.mkdir()
    if there:
        file.write_text("of yesterday")
        file.chmod(0o644)
    now = bridge.engine.now()
    for n in range(600):
        queue = "slow" if n < 10 else "default"
        bury(bridge, f"j-{n}", queue=queue, discarded_at=now - timedelta(seconds=1000 - n))
    with sqlite3.connect(tmp_path / "ojs.db") as connection:
        connection.execute("UPDATE ojs_dead_letters SET record = '{' WHERE id = 'j-599'")
    assert run("dead-letters", "export", str(file), store=store).code != 0
    assert [path.name for path in folder.iterdir()] == ["letters.jsonl"] * there
    assert not there or file.read_text() == "of yesterday"
    assert run("dead-letters", "export", str(file), "--queue", "slow", store=store).code == 0
    assert len(file.read_text().splitlines()) == 10
    assert file.stat().st_mode & 0o777 == 0o600  # It has the arguments of jobs.


@pytest.mark.usefixtures("bridge")
def test_an_export_into_a_pipe_or_through_a_link(store: str, tmp_path: Path) -> None:
    """A device stays a device, and a link stays a link."""
    assert run("dead-letters", "export", "/dev/null", store=store).code == 0
    assert not Path("/dev/null").is_file()
    (tmp_path / "link").symlink_to(tmp_path / "letters.jsonl")
    assert run("dead-letters", "export", str(tmp_path / "link"), store=store).code == 0
    assert (tmp_path / "link").is_symlink()
    assert len((tmp_path / "letters.jsonl").read_text().splitlines()) == 4


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize("damage", ["{", "[" * 100_000, "[]", json.dumps({"id": "x"}), "null", "\x85"])
def test_a_damaged_file(store: str, tmp_path: Path, damage: str) -> None:
    """The error names the line, and no letter is imported."""
    good = run("dead-letters", "export", "--queue", "slow", store=store).out
    (tmp_path / "damaged.jsonl").write_text(f"{good}\n{damage}\n", encoding="utf-8")
    other = f"sqlite:///{tmp_path}/other.db"
    ran = run("dead-letters", "import", str(tmp_path / "damaged.jsonl"), "--yes", store=other)
    assert ran.code == (0 if damage == "\x85" else 2)
    assert ran.err.startswith("ojs-bridge: line 3: it is no dead letter: ") or damage == "\x85"
    assert len(ids(other) if Path(tmp_path / "other.db").exists() else []) == (damage == "\x85")


def test_an_import_that_is_stopped_says_how_far_it_came(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C waits for the letters that are being written."""
    monkeypatch.setattr(letters, "LOT", 2)
    lines = "\n".join(to_json(letter(f"j-{n}")) for n in range(7))
    bury_all, written = SQLLetters.bury_all, []

    def interrupted(store: SQLLetters, some: Sequence[Letter]) -> None:
        bury_all(store, some)
        written.extend(some)
        if len(written) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SQLLetters, "bury_all", interrupted)
    ran = run("dead-letters", "import", "-", "--yes", store=store, stdin=lines)
    assert ran.code != 0
    assert ran.out == ""
    assert "the import was stopped: 4 of 7 letters were loaded, up to line 4\n" in ran.err
    assert len(ids(store)) == 4


def test_nobody_is_asked_about_a_damaged_file(store: str, tmp_path: Path) -> None:
    """The command reads the file before it asks."""
    (tmp_path / "damaged.jsonl").write_text("{", encoding="utf-8")
    ran = run("dead-letters", "import", str(tmp_path / "damaged.jsonl"), store=store)
    assert ran.code == 2
    told = "ojs-bridge: line 1: it is no dead letter: "
    assert ran.err.startswith(f"{told}it is not JSON: Expecting property name")
    (tmp_path / "damaged.jsonl").write_text('{"id": "x"}', encoding="utf-8")
    ran = run("dead-letters", "import", str(tmp_path / "damaged.jsonl"), store=store)
    assert ran.err == f"{told}discarded_at is missing\n"


def test_a_file_that_is_no_text(store: str, tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    ran = run("dead-letters", "import", str(tmp_path / "x"), "--yes", store=store)
    assert (ran.code, ran.err) == (2, f"ojs-bridge: file: '{tmp_path}/x' is not UTF-8\n")


def test_nothing_to_do(store: str, tmp_path: Path) -> None:
    """The command asks no question when there are no letters."""
    fill(store)
    ran = run("dead-letters", "purge", "--type", "none", store=store)
    assert (ran.code, ran.out) == (0, "0 dead letters deleted\n")
