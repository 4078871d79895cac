"""`ojs-bridge dead-letters groups`, `mute` and `unmute`, and the option `--group` of the other commands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ojs_bridge import Bridge
from ojs_bridge.cli.groups import sparkline
from ojs_bridge.rules.fingerprint import fingerprint
from tests.cli.running import Ran, run

ANSWER = fingerprint("billing.charge", "external.timeout", "no answer 0")
MAIL = fingerprint("mail.send", "external.timeout", "no answer 1")
EXPIRED = fingerprint("mail.send", "auth.expired", "no answer 3")


@pytest.fixture(autouse=True)
def filled(bridge: Bridge) -> None:
    """Four letters of three groups."""


def ran(*words: str, store: str, **env: str) -> Ran:
    """Run a command of dead letters."""
    return run("dead-letters", *words, store=store, **env)


def test_groups_in_json(store: str) -> None:
    """Each is a line; the filters are those of the other commands."""
    answer, mail, expired = ran("groups", "--json", store=store).json
    assert (answer["fingerprint"], answer["count"], answer["pattern"]) == (ANSWER, 2, "no answer #")
    assert (answer["types"], answer["queues"]) == (["billing.charge"], ["default"])
    assert sum(answer["deaths"]["counts"]) == 2
    assert (mail["fingerprint"], expired["fingerprint"]) == (MAIL, EXPIRED)
    assert [g["count"] for g in ran("groups", "--json", "--type", "mail.*", store=store).json] == [1, 1]
    largest = ran("groups", "--json", "--order", "count", "--limit", "1", store=store).json
    assert [g["count"] for g in largest] == [2]


def test_groups_in_a_table(store: str) -> None:
    """A narrow screen has a line for each group, too."""
    told = ran("groups", store=store).out
    assert "external.timeout: no answer #" in told
    assert "billing.charge" in told
    narrow = ran("groups", store=store, COLUMNS="80").out.splitlines()
    assert len(narrow) == 4
    assert all(len(line) <= 80 for line in narrow)
    assert "billing.charge" in narrow[1]
    assert ran("groups", store=store).err == ""
    assert ran("groups", "--limit", "2", store=store).err == "there may be more: --limit lists up to 200\n"
    assert ran("groups", "--queue", "none", store=store).out == "no groups\n"


def test_a_group_is_muted_for_some_time(store: str) -> None:
    """And shown again when it is asked for, or unmuted."""
    muted = ran("mute", ANSWER, "--for", "2h", "--reason", "known", store=store, SUDO_USER="ann")
    assert muted.out.startswith(f"{ANSWER}: muted until 20")
    assert muted.out.endswith(" UTC, or until more than 2 more letters have died\n")
    assert [g["fingerprint"] for g in ran("groups", "--json", store=store).json] == [MAIL, EXPIRED]
    first = ran("groups", "--json", "--muted", store=store).json[0]
    assert (first["fingerprint"], first["muted"]["by"]) == (ANSWER, "ann")
    assert "(muted by ann) external.timeout" in ran("groups", "--muted", store=store).out
    assert ran("unmute", ANSWER, store=store).out == f"{ANSWER}: unmuted\n"
    assert len(ran("groups", "--json", store=store).json) == 3
    mistyped = ran("mute", "a" * 16, store=store)
    assert (mistyped.code, mistyped.err) == (1, "ojs-bridge: there is no group 'aaaaaaaaaaaaaaaa'\n")
    actions = [(r["action"], r["reason"]) for r in run("audit", "--json", store=store).json]
    assert actions == [("group.unmute", ""), ("group.mute", "known")]


def test_a_group_is_resolved(store: str) -> None:
    """In a mark, if one is named; the list tells the states."""
    resolved = ran("resolve", ANSWER, "--mark", "v42", store=store)
    assert resolved.out == f"{ANSWER}: resolved in v42; the next death brings it back\n"
    assert [g["fingerprint"] for g in ran("groups", "--json", "--state", "resolved", store=store).json] == [
        ANSWER
    ]
    assert "resolved" in ran("groups", store=store).out.splitlines()[1]
    assert ran("unresolve", ANSWER, store=store).out == f"{ANSWER}: not resolved\n"
    assert ran("groups", "--state", "resolved", store=store).out == "no groups\n"


def test_the_beginning_of_a_fingerprint(bridge: Bridge, store: str) -> None:
    """Four digits are enough for a command and for --group, if they name one group; several are named."""
    assert ran("mute", ANSWER[:6], store=store).out.startswith(f"{ANSWER}: muted until ")
    assert ran("unmute", ANSWER[:6], store=store).out == f"{ANSWER}: unmuted\n"
    assert ran("resolve", MAIL[:4], store=store).out.startswith(f"{MAIL}: resolved")
    assert ran("unresolve", MAIL[:4], store=store).out == f"{MAIL}: not resolved\n"
    assert ran("stats", "--json", "--group", EXPIRED[:8], store=store).json[0]["total"] == 1
    assert bridge.store is not None
    found = bridge.dead_letters.list(group=EXPIRED).letters[0]
    twin = EXPIRED[:8] + ("0" if EXPIRED[8] != "0" else "1") + EXPIRED[9:]
    bridge.store.letters.bury(replace(found, id="twin", fault=twin))
    several = ran("purge", "--group", EXPIRED[:8], "--yes", store=store)
    first, second = sorted((EXPIRED, twin))
    told = f"ojs-bridge: group: {EXPIRED[:8]!r} begins several: {first}, {second}\n"
    assert (several.code, several.err) == (2, told)
    none = next(digits for digits in map("{:04x}".format, range(9)) if digits not in (ANSWER[:4], MAIL[:4]))
    for words in (("resolve", none), ("list", "--group", none)):
        missing = ran(*words, store=store)
        told = f"ojs-bridge: there is no group whose fingerprint begins with {none!r}\n"
        assert (missing.code, missing.err) == (1, told)


def test_whom_a_group_hurts(store: str) -> None:
    """In a table, and in JSON."""
    told = ran("arguments", "--group", ANSWER, store=store)
    assert told.out.startswith("2 dead letters counted\n")
    assert ran("arguments", "--limit", "1", store=store).out.startswith(
        "1 dead letter counted, the newest of 4\n"
    )
    [found] = ran("arguments", "--group", ANSWER, "--json", store=store).json
    assert (found["counted"], found["of"]) == (2, 2)


def test_what_cannot_be_done(store: str) -> None:
    """The error names the option, and the exit code is that of a wrong command."""
    wrong = [
        (("mute", "x"), "group: 'x' must be a fingerprint, 16 hexadecimal digits"),
        (("mute", ANSWER, "--for", "soon"), "for: 'soon' must be a duration, as P7D or 2h"),
        (("list", "--group", "x"), "group: 'x' must be a fingerprint, 16 hexadecimal digits"),
        (("groups", "--limit", "0"), "limit: 0 must be between 1 and 200"),
    ]
    for words, told in wrong:
        done = ran(*words, store=store)
        assert (done.code, done.err) == (2, f"ojs-bridge: {told}\n")


def test_the_commands_take_a_group(store: str) -> None:
    """A group is listed, counted, exported and deleted as any choice of letters."""
    assert [x["id"] for x in ran("list", "--json", "--group", ANSWER, store=store).json] == [
        "j-0",
        "j-2",
    ]
    assert ran("stats", "--json", "--group", EXPIRED, store=store).json[0]["total"] == 1
    assert len(ran("export", "--group", ANSWER, store=store).out.splitlines()) == 2
    counted = ran("purge", "--group", ANSWER, "--dry-run", "--json", store=store).json[0]
    assert counted["matched"] == 2
    assert ran("purge", "--group", ANSWER, "--yes", store=store).code == 0
    assert [g["fingerprint"] for g in ran("groups", "--json", store=store).json] == [MAIL, EXPIRED]


@pytest.mark.parametrize(
    ("counts", "bars"), [([], ""), ([0, 0], "  "), ([1, 2, 8], "▁▂█"), ([1, 1000], "▁█")]
)
def test_a_sparkline(counts: list[int], bars: str) -> None:
    """A count that is not zero has a bar."""
    assert sparkline(counts) == bars
