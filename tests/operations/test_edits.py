"""A replay of many changes arguments by their names; what it hides from readers stays hidden."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from ojs_bridge import Bridge, Unreachable
from ojs_bridge.engine.runs import Override
from ojs_bridge.rules.edits import Edits
from ojs_bridge.store import to_json
from tests.conftest import store_url
from tests.lives import Outbox, bridge_with_outbox
from tests.operations.test_bulk import left, published
from tests.operations.test_operating import bury, celery_message
from tests.store.test_store import entry

Lives = tuple[Bridge, Outbox]
#: The celery message names its parameters: user, password.
CHANGES = Edits(set={"country": "DE"}, rename={"mail": "email"}, remove=["spam"])


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def fleet(request: pytest.FixtureRequest) -> Lives:
    """A bridge that redacts passwords, and the publisher of its framework, on a store of each kind."""
    return bridge_with_outbox(store_url(request.param, request), redact=["password"])


def ago(bridge: Bridge, seconds: int) -> datetime:
    return bridge.engine.now() - timedelta(seconds=seconds)


def sent(outbox: Outbox) -> dict[str, tuple[Any, Any]]:
    """What the jobs were sent with; None is as it was."""
    pairs = zip(outbox.published, outbox.overrides, strict=True)
    return {letter.id: (override.args, override.kwargs) for (letter, _), override in pairs}


def test_a_probe_and_its_rest_send_the_edits_and_what_cannot_be_edited_stays(fleet: Lives) -> None:
    bridge, outbox = fleet
    messages = [
        celery_message("ann", mail="a@b", spam=1),
        celery_message("ben", country="CH"),
        celery_message("cem", mail="c@d", email="e@f"),
        {"encoded": "?", "encoding": "utf-8"},
        celery_message("eva", mail="e@v"),
    ]
    for n, message in enumerate(messages):
        bury(bridge, f"j-{n}", message=message, discarded_at=ago(bridge, 60 - n))
    probe = bridge.operations.begin("replay", limit=3, changes=CHANGES, override={"queue": "slow"})
    words = ["queue", "remove spam", "rename mail", "set country"]
    assert probe.to_ojs()["changes"] == words
    assert bridge.audit.list(limit=1).records[0].subject["changes"] == words
    done = bridge.operations.run(probe)
    stays = "rename: 'mail' to 'email': there is an argument 'email' already"
    assert (done.succeeded, list(map(list, done.errors)), done.rest) == (2, [["j-2", stays]], 3)
    rest = bridge.operations.run(bridge.operations.rest(probe.id))
    unread = "args: those of dead letter 'j-3' cannot be changed: 1 bytes of an encoder that is not JSON"
    assert [list(one) for one in rest.errors] == [["j-2", stays], ["j-3", unread]]
    assert (rest.succeeded, left(bridge)) == (1, 2)
    assert sent(outbox) == {
        "j-0": (["ann"], {"email": "a@b", "country": "DE"}),
        "j-1": (["ben"], {"country": "DE"}),
        "j-4": (["eva"], {"email": "e@v", "country": "DE"}),
    }
    assert {override.queue for override in outbox.overrides} == {"slow"}
    assert {override.edits for override in outbox.overrides} == {None}


def test_a_replay_that_breaks_off_goes_on_with_its_edits_and_sends_no_job_twice(fleet: Lives) -> None:
    bridge, outbox = fleet
    ids = [f"j-{n}" for n in range(12)]
    for n, letter_id in enumerate(ids):
        bury(bridge, letter_id, message=celery_message(letter_id), discarded_at=ago(bridge, 60 - n))
    outbox.refuses[ids[5]] = Unreachable("gone")
    broken = bridge.operations.run(bridge.operations.begin("replay", changes=Edits(remove=["user"])))
    assert (broken.state, broken.succeeded, left(bridge)) == ("failed", 5, 7)
    outbox.refuses.clear()
    done = bridge.operations.run(bridge.operations.resume(broken.id))
    assert (done.state, done.succeeded, left(bridge)) == ("done", 12, 0)
    assert sorted(published(outbox)) == sorted(ids)
    assert set(map(str, sent(outbox).values())) == {"([], {})"}


def test_a_letter_with_nothing_to_edit_is_sent_as_it_is(fleet: Lives) -> None:
    """Its message is not written anew; a single replay takes edits, too."""
    bridge, outbox = fleet
    bury(bridge, "j-1", message=celery_message("ann"))
    edits = Edits(rename={"mail": "email"}, remove=["spam"])
    [told] = bridge.dead_letters.preview(edits=edits)
    assert told.notes == ("rename: there is no 'mail'", "remove: there is no 'spam'")
    assert (told.before, told.error) == (told.after, None)
    bridge.dead_letters.replay("j-1", edits=edits)
    assert sent(outbox) == {"j-1": (None, None)}
    assert bridge.audit.list().records[0].subject["changes"] == ["remove spam", "rename mail"]


def test_ten_letters_before_and_after(fleet: Lives) -> None:
    """The oldest, or the newest, of a filter, or those of some ids; nothing is sent, and nothing shown."""
    bridge, outbox = fleet
    for n in range(12):
        message = celery_message(f"u-{n}", "hunter22" * (n % 2), mail=n)
        bury(
            bridge,
            f"j-{n:02}",
            type="a" if n else "b",
            message=message,
            discarded_at=ago(bridge, 60 - n),
        )

    def ids(**how: Any) -> Sequence[str]:
        return [told.id for told in bridge.dead_letters.preview(edits=CHANGES, **how)]

    assert ids() == [f"j-{n:02}" for n in range(10)]
    assert ids(newest=True, type="a") == [f"j-{n:02}" for n in range(11, 1, -1)]
    assert ids(ids=["j-03", "gone"]) == ["j-03"]
    [told] = bridge.dead_letters.preview(edits=CHANGES, ids=["j-03"])
    assert told.to_ojs() == {
        "id": "j-03",
        "type": "a",
        "parameters": ["user", "password"],
        "before": {"args": ["u-3", "[redacted]"], "kwargs": {"mail": 3}},
        "after": {"args": ["u-3", "[redacted]"], "kwargs": {"email": 3, "country": "DE"}},
        "notes": ["remove: there is no 'spam'"],
        "error": None,
    }
    assert (left(bridge), outbox.published, bridge.audit.list().records) == (12, [], ())


@pytest.mark.parametrize(
    "edits",
    [Edits(set={"password": "new-one"}), Edits(remove=["password"]), Edits(rename={"user": "name"})],
)
def test_an_edit_brings_no_redacted_value_into_the_open(fleet: Lives, edits: Edits) -> None:
    """The job's errors do not tell it when its message has it no more."""
    bridge, outbox = fleet
    error = entry(message="ann may not come in with hunter22")
    bury(bridge, "j-1", message=celery_message("ann", "hunter22"), errors=[error])
    bury(
        bridge, "j-2", message=celery_message("ben", "hunter22", url="https://ben:hunter22@b"), errors=[error]
    )
    told = bridge.dead_letters.preview(edits=edits)
    assert "hunter22" not in json.dumps([one.to_ojs() for one in told])
    done = bridge.operations.run(bridge.operations.begin("replay", changes=edits))
    keeps_it = bool(edits.rename)
    assert done.succeeded == 1 + keeps_it
    if not keeps_it:
        why = "a redacted value that it takes away stands in another argument, and would be shown"
        assert [list(one) for one in done.errors] == [["j-2", why]]
        assert told[1].error == why
    (letter, header), override = outbox.published[0], outbox.overrides[0]
    assert ("hunter22" in str(header.job.errors)) == keeps_it
    message = celery_message(*override.args or (), **override.kwargs or {})
    again = replace(letter, message=message, errors=header.job.errors)
    bury(bridge, "again", message=message, errors=[*header.job.errors])
    assert "hunter22" not in to_json(bridge.dead_letters.get("again"))
    assert again.message == message


def test_what_is_redacted_has_no_other_name(fleet: Lives) -> None:
    """It is refused at once; another argument may get a redacted name."""
    bridge, _ = fleet
    bury(bridge, "j-1", message=celery_message("ann", "hunter22"))
    rule = "rename: 'Password' is redacted, and its value would be shown under another name"
    edits = Edits(rename={"Password": "note"})
    for refused in (
        lambda: bridge.operations.begin("replay", changes=edits),
        lambda: bridge.dead_letters.replay_all(confirm=True, override={"edits": edits.to_json()}),
        lambda: bridge.dead_letters.preview(edits=edits),
        lambda: bridge.dead_letters.replay("j-1", edits=edits),
    ):
        with pytest.raises(ValueError, match=f"^{rule}$"):
            refused()
    assert bridge.operations.list() == ()
    onto = Edits(rename={"user": "Password"})
    [told] = bridge.dead_letters.preview(edits=onto)
    assert told.after is not None and told.after.kwargs is not None
    assert told.after.kwargs["Password"] == "[redacted]"


def test_what_a_callable_hides_has_no_other_name() -> None:
    """It is known for each letter alone: that letter stays."""
    bridge, outbox = bridge_with_outbox(
        "memory://", redact=lambda name, value: "*" if name == "pin" else value
    )
    bury(bridge, "j-1", message=celery_message("ann", pin="x1"))
    bury(bridge, "j-2", message=celery_message("ben"))
    done = bridge.operations.run(bridge.operations.begin("replay", changes=Edits(rename={"pin": "note"})))
    assert (done.succeeded, published(outbox)) == (1, ["j-2"])
    why = "rename: 'pin' is redacted, and its value would be shown under another name"
    assert [list(one) for one in done.errors] == [["j-1", why]]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"changes": Edits(remove=["a"]), "action": "purge"},
            "action: a purge has no override, .* no changes",
        ),
        ({"changes": Edits(remove=["a"]), "override": {"args": []}}, "changes: args and kwargs are replaced"),
        ({"changes": {"drop": 1}}, "changes: 'drop' is unknown"),
        ({"override": {"edits": 7}}, "changes: 7 must be an object"),
    ],
)
def test_edits_that_cannot_be(asked: dict[str, Any], told: str) -> None:
    bridge, _ = bridge_with_outbox("memory://")
    with pytest.raises(ValueError, match=f"^{told}"):
        bridge.operations.begin(**{"action": "replay", **asked})


def test_edits_are_kept_as_json() -> None:
    """An older worker refuses an operation with them: to send it without them would be another replay."""
    kept = json.loads(json.dumps(Override(edits=CHANGES).to_ojs()))
    assert kept == {"edits": {"set": {"country": "DE"}, "rename": {"mail": "email"}, "remove": ["spam"]}}
    assert Override.of(kept).edits == replace(CHANGES, remove=["spam"])
    assert Override(edits=Edits()) == Override()
