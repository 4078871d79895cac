"""`ojs-bridge plan` on apps and brokers with and without a bridge: on a screen, for a review, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ojs_bridge.cli.plan import show_all, show_summary, write
from ojs_bridge.config.policies import load, read_file
from ojs_bridge.migration.plan import Hazard, NativeRetries, Open, Planned, WaitRange
from tests.cli.running import Ran, run, spawn, spawn_all

CELERY = """
from celery import Celery

print("an app may print")
app = Celery("shop", broker="redis://127.0.0.1:1/0")
number = 7

def setup():
    open("called", "w").close()

@app.task(name="billing.charge", autoretry_for=(OSError,), retry_backoff=4, max_retries=5, shared=False)
def charge(order):
    open("called", "w").close()

@app.task(name="mail.send", autoretry_for=(OSError,), max_retries=2, default_retry_delay=30, shared=False)
def send(order):
    open("called", "w").close()
"""
DRAMATIQ = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url="redis://127.0.0.1:1/0")
dramatiq.set_broker(broker)

def setup():
    open("called", "w").close()

@dramatiq.actor(max_retries=None, retry_when=None)
def sync(order):
    open("called", "w").close()

@dramatiq.actor(actor_name='we"ird|na\\nme\\x1b[31m*`x`\\u202e', max_retries=3, min_backoff=1000)
def weird(order):
    open("called", "w").close()
"""
HABITS = """
from celery import Celery

app = Celery("habits", broker="redis://127.0.0.1:1/0")

@app.task(name="doubles", bind=True, max_retries=4, shared=False)
def doubles(self):
    raise self.retry(exc=OSError(), countdown=2 ** self.request.retries)

@app.task(name="computes", bind=True, max_retries=4, shared=False)
def computes(self, wait):
    raise self.retry(exc=OSError(), countdown=wait)

@app.task(name="unknown", bind=True, shared=False)
def unknown(self, most):
    raise self.retry(exc=OSError(), max_retries=most)
"""
DELAYS = """
from celery import Celery

app = Celery("delays", broker="redis://127.0.0.1:1/0")

@app.task(name="remind", shared=False)
def remind(order):
    pass

def order(task, wait):
    from delays import remind as later
    later.apply_async((1,), countdown=2 * 3600)
    task.apply_async((1,), countdown=wait)
"""
BRIDGED = """
from ojs_bridge import Bridge
from ojs_bridge.{framework} import install
install({app}, Bridge(), policies={{"*": {{"max_attempts": 4}}}})
"""


#: Modules that cannot be imported, and what an app imports of them by a module between.
FAILING: dict[str, str | bytes] = {
    "bad/__init__.py": "",
    "bad/syntax.py": "a = 1\ndef broken(:\n    pass",
    "bad/indent.py": "if True:\n  a = 1\n b = 2",
    "bad/encoded.py": b"a = 1\nb = '\xe9'\n",
    "bad/empty.py": b"a = 1\nb = 2\0\n",
    "bad/called.py": "from bad.helper import fails\n\nfails()",
    "bad/helper.py": "import json\n\ndef fails():\n    json.loads('nonsense')",
    "bad/parsed.py": "\n\neval('1 +')",
    "bad/name.py": "\nfrom shop import nothing_like_it",
    "lib/site-packages/installed.py": "import installed_too",
    "lib/site-packages/installed_too.py": "\nraise OSError('down')",
    "bad/installed.py": "import sys\nsys.path.insert(0, 'lib/site-packages')\nimport installed",
    **{f"by_{name}.py": f"import bad.{name}" for name in
       ("syntax", "indent", "encoded", "empty", "called", "parsed", "name", "installed")},
    "configured.py": "import celery\napp = celery.Celery('c', broker='memory://', include=['bad.syntax'])",
}  # fmt: skip
PLACES = {
    "by_syntax": "SyntaxError: invalid syntax (module bad.syntax, bad/syntax.py:2)",
    "bad.syntax": "SyntaxError: invalid syntax (module bad.syntax, bad/syntax.py:2)",
    "by_indent": "(module bad.indent, bad/indent.py:3)",
    "by_encoded": "(module bad.encoded, bad/encoded.py:",
    "by_empty": "(module by_empty, by_empty.py:1)",  # Python does not say which file has the null byte
    "by_called": "(module bad.helper, bad/helper.py:4)",
    "by_parsed": "SyntaxError: invalid syntax (module bad.parsed, bad/parsed.py:3)",
    "by_name": "(module bad.name, bad/name.py:2)",
    "by_installed": "OSError: down (module bad.installed, bad/installed.py:3)",
    "configured:app": "(module bad.syntax, bad/syntax.py:2)",
}


@pytest.mark.parametrize("name", PLACES)
def test_a_failed_import_names_module_file_and_line(folder: Path, name: str) -> None:
    """However deep the module is, and whatever is wrong with it."""
    ran = spawn("plan", name, cwd=folder)
    assert ran.code == 2
    assert PLACES[name] in ran.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with apps of each framework."""
    files = {
        "shop.py": CELERY,
        "habits.py": HABITS,
        "actors.py": DRAMATIQ,
        "delays.py": DELAYS,
        "more.py": "import dramatiq\n@dramatiq.actor\ndef later(order):\n    pass",
        "proj/__init__.py": "",
        "proj/celery.py": CELERY.replace("shop", "proj") + BRIDGED.format(framework="celery", app="app"),
        "moved.py": DRAMATIQ + BRIDGED.format(framework="dramatiq", app="broker"),
        "empty.py": "from dramatiq.brokers.stub import StubBroker\nbroker = StubBroker()",
        "broken.py": "1 / 0",
        **FAILING,
    }
    found = tmp_path_factory.mktemp("fleet")
    for name, text in files.items():
        (found / name).parent.mkdir(exist_ok=True, parents=True)
        (found / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return found


READ = {
    "a Celery app": "shop:app",
    "Celery in JSON": "shop:app --format json",
    "some tasks": "shop mail.* billing.charge --format json",
    "a package": "proj.celery --format json",
    "a broker": "actors:broker --format json",
    "all of a broker": "actors:broker --all",
    "a broker's first page": "actors:broker",
    "a bridged broker": "moved:broker --format json",
    "a file": "actors:broker --write policies.toml",
    "no actors": "empty:broker",
    "another module": "moved:broker later --import more --format json",
}
WRONG = {
    "actors:sync": "app: 'actors:sync' holds neither a Celery app nor a Dramatiq broker",
    "actors:setup": "app: 'actors:setup' holds neither a Celery app nor a Dramatiq broker",
    "shop:charge": "app: 'shop:charge' holds neither a Celery app nor a Dramatiq broker",
    "shop:number": "app: 'shop:number' holds neither a Celery app nor a Dramatiq broker",
    "shop:nope": "app: 'shop:nope' cannot be imported: ",
    "broken:app": "cannot be imported: ZeroDivisionError: division by zero (module broken, broken.py:1)",
    "shop:app --import nowhere": "app: 'nowhere' cannot be imported: ModuleNotFoundError",
    "shop:app mail.* nope": "names: 'nope' names no task",
    "actors:broker nope": "names: 'nope' names no actor",
    "shop:app --write policies.json": "write: 'policies.json' must end in .toml",
    "shop:app --write there.toml": "write: 'there.toml' is not TOML",
    "shop:app --diff there.toml": "diff: 'there.toml' is not TOML",
    "shop:app --diff nowhere.toml": "diff: 'nowhere.toml' cannot be read: No such file or directory",
    "shop:app --write no/where.toml": "file: 'no/where.toml': No such file or directory",
    "shop:app --format html": "'html' is not one of 'table', 'json'",
}
BRIDGE_OF = {name: ("dead-letters", "stats", "--app", name) for name in ("actors:sync", "shop:charge")}


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Ran]:
    """The results of all these commands, which ran one after the other in one process."""
    (folder / "there.toml").write_text("mine", encoding="utf-8")
    lines = {**{name: ("plan", *line.split()) for name, line in READ.items()},
             **{line: ("plan", *line.split()) for line in WRONG}}  # fmt: skip
    told = spawn_all(*lines.values(), *BRIDGE_OF.values(), cwd=folder, COLUMNS="80")
    return dict(zip([*lines, *(f"the bridge of {name}" for name in BRIDGE_OF)], told, strict=True))


def test_nothing_is_called(folder: Path, ran: dict[str, Ran]) -> None:
    """Neither an actor, nor a task, nor a function that might set a broker is called."""
    assert len(ran) == len(READ) + len(WRONG) + len(BRIDGE_OF)
    assert not (folder / "called").exists()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("Celery in JSON", ["billing.charge", "mail.send"]),
        ("some tasks", ["billing.charge", "mail.send"]),
        ("a package", ["billing.charge", "mail.send"]),
        ("a broker", ["sync", 'we"ird|na\nme\x1b[31m*`x`\u202e']),
        ("a bridged broker", ["sync", 'we"ird|na\nme\x1b[31m*`x`\u202e']),
        ("another module", ["later"]),
    ],
)
def test_apps_and_brokers(ran: dict[str, Ran], line: str, names: list[str]) -> None:
    """The names are those of the frameworks, with or without a bridge; an app's output is no answer."""
    assert (ran[line].code, [one["name"] for one in ran[line].json]) == (0, names)
    assert ran[line].err in ("", "an app may print\n")


def test_json_has_everything(ran: dict[str, Ran]) -> None:
    """Each task is an object."""
    charge, send = ran["Celery in JSON"].json
    assert (charge["native"]["runs"], send["native"]["runs"]) == (6, 3)
    assert charge["native"]["waits"][0] == {"least": 0.0, "mean": 2.0, "most": 4.0}
    assert (send["exact"], send["differences"], send["native"]["span"]["mean"]) == (True, [], 60.0)
    assert send["policy"]["initial_interval"] == "PT30S"
    endless, weird = ran["a broker"].json
    assert (endless["native"]["runs"], endless["native"]["span"]) == ("endless", "endless")
    assert ([one["verdict"] for one in (charge, endless)], endless["exact"]) == (["read", "read"], False)
    assert "max_attempts" not in endless["policy"]
    assert weird["policy"]["max_attempts"] == 4
    names = [[h["name"] for h in ran[line].json[0]["hazards"]] for line in ("a broker", "a bridged broker")]
    assert names[1] == ["already-moved", *names[0]]


def test_no_tasks(ran: dict[str, Ran]) -> None:
    """The output says that the tasks may be elsewhere."""
    told = "no tasks: perhaps the modules that declare them are not imported (--import MODULE)"
    assert (ran["no actors"].code, " ".join(ran["no actors"].out.split())) == (0, told)


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_planned(folder: Path, ran: dict[str, Ran], line: str) -> None:
    """The exit code is 2, the error names the trouble, and a file that is there stays as it is."""
    assert ran[line].code == 2
    assert WRONG[line] in " ".join(ran[line].err.replace("│", " ").split())
    assert (folder / "there.toml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", BRIDGE_OF)
def test_an_app_is_found_for_its_bridge_in_the_same_way(ran: dict[str, Ran], name: str) -> None:
    """No command calls the object that `--app` names, if it is an actor or a task."""
    one = ran[f"the bridge of {name}"]
    assert (one.code, one.out) == (2, "")
    assert f"app: '{name}' holds neither a Celery app nor a Dramatiq broker" in one.err


def test_no_page_is_wider_than_a_screen(ran: dict[str, Ran]) -> None:
    """A page has 80 columns on any screen, and a name reaches the terminal as plain text only."""
    for line in ("a Celery app", "all of a broker", "a broker's first page"):
        assert ran[line].code == 0
        assert max(map(len, ran[line].out.splitlines())) <= 80
        assert "\x1b" not in ran[line].out
        assert "\u202e" not in ran[line].out
    assert 'we"ird|na\\nme\\x1b[31m*`x`\\u202e' in ran["all of a broker"].out


@pytest.mark.parametrize("columns", ["50", "120", "", "no number"])
def test_a_page_in_a_pipe_has_the_columns_of_its_variable(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or 80 without it. A place stays whole, so that it can be copied, or clicked."""
    monkeypatch.setenv("COLUMNS", columns)
    width = int(columns) if columns.isdigit() else 80
    place = f"{'deeply/' * 20}tasks_of-the-shop.py:12"
    why = " ".join(["max_retries=limit is computed when it runs, as the code of a helper may do"] * 3)
    show_all("shop:app", [planned("shop.tasks.charge", open=(Open(place, why),))])
    show_summary("shop:app", [planned("shop.tasks.charge", open=(Open(place, why),))])
    lines = capsys.readouterr().out.splitlines()
    assert sum(place in line for line in lines) == 2
    rest = [len(line) for line in lines if place not in line]
    assert width - 20 < max(rest) <= width


def test_the_summary_has_what_matters(ran: dict[str, Ran]) -> None:
    """The worst comes first, with its tasks beneath; `--all` has the lesser hazards and the numbers."""
    first, every = (" ".join(ran[x].out.split()) for x in ("a broker's first page", "all of a broker"))
    assert first.startswith(
        "actors:broker: 2 tasks; under the policies 2 change infinite-retries: max_retries=None"
    )
    assert (
        "changes: retry 3 waits 3 s to 9 s, not 4 s to 8 s" in first
    )  # the largest difference, not the first
    assert "counts-retries" not in first
    assert "counts-retries: max_retries=3" in every
    assert "verdict read runs endless waits 15 s to 30 s" in every
    celery = " ".join(ran["a Celery app"].out.split())
    lost = "running jobs of 2 are lost when a worker is killed (acks_late is off): see --protect"
    assert f"2 tasks; {lost}; under the policies 1 do exactly what they do today, 1 change" in celery
    assert celery.count("mail.send") == 1  # it is the other task that loses them


def test_a_large_fleet_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of tasks, and of remarks, does not matter."""
    monkeypatch.delenv("COLUMNS", raising=False)
    open_ = [Open(f"shop/tasks.py:{n}", "max_retries=limit is computed when it runs") for n in range(101)]
    unknown = [planned(f"shop.tasks.unknown_{n}", open=(open_[n],)) for n in range(101)]
    change = [
        planned(f"shop.tasks.change_{n}", differences=("retry 1 waits 1 s, not 2 s",)) for n in range(101)
    ]
    show_summary("shop:app", [*unknown, *change])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert "    shop.tasks.change_0, shop.tasks.change_1, shop.tasks.change_10," in lines
    assert any("and 97 more" in line for line in lines)
    assert "90 more statements" in " ".join(lines)


@pytest.mark.parametrize("line", READ)
def test_no_endless_number(ran: dict[str, Ran], line: str) -> None:
    """A plan has a word for an endless number."""
    assert "9223372036854775807" not in ran[line].out


def test_the_traceback_of_an_import(folder: Path) -> None:
    """An option shows it; otherwise the output names the module at fault and its line."""
    (folder / "inner.py").write_text("import broken", encoding="utf-8")
    bare, debug = spawn_all(("plan", "inner:app"), ("plan", "inner:app", "--debug"), cwd=folder)
    assert (bare.code, debug.code) == (2, 2)
    assert bare.err.endswith("division by zero (module broken, broken.py:1)\n")
    assert "Traceback (most recent call last):" not in bare.err
    assert 'inner.py", line 1, in <module>' in debug.err
    assert debug.err.endswith(bare.err)


def test_a_file_that_is_there(folder: Path) -> None:
    """The file keeps its texts, comments included; the tasks that it does not name are added."""
    file = folder / "kept.toml"
    mine = (
        '# mine\n[default]\non_exhaustion = "dead_letter"\n\n[policies."mail.*"]  # my own\nmax_attempts = 9'
    )
    file.write_text(mine, encoding="utf-8")
    lines = [("plan", "shop:app", *words.split()) for words in
             ("--diff kept.toml", "--write kept.toml", "--write kept.toml", "--diff kept.toml")]  # fmt: skip
    before, first, second, after = spawn_all(*lines, cwd=folder)
    text = file.read_text(encoding="utf-8")
    assert text.startswith(mine + "\n")
    assert text.count("[policies.") == 2
    assert "1 task added to kept.toml" in first.err
    assert "0 tasks added to kept.toml" in second.err
    assert (before.code, after.code) == (1, 1)
    assert before.out.startswith(
        "billing.charge: the file does not name it\nmail.send: max_attempts is 9 in the file"
    )
    assert "billing" not in after.out
    new, same = spawn_all(
        ("plan", "shop:app", "--write", "new.toml"), ("plan", "shop:app", "--diff", "new.toml"), cwd=folder
    )
    (folder / "stale.toml").write_text('[policies."gone.*"]\nmax_attempts = 2\n', encoding="utf-8")
    stale = spawn_all(("plan", "shop:app", "--diff", "stale.toml"), cwd=folder)[0]
    assert (stale.code, "policies['gone.*'] names no task" in stale.out) == (1, True)
    assert (new.code, same.code, same.out) == (0, 0, "new.toml says what the plan says\n")


def test_the_file_is_what_install_reads(folder: Path, ran: dict[str, Ran]) -> None:
    """`policy check` says OK of it; each table is for its own task alone, whatever its name has."""
    file = folder / "policies.toml"
    assert (ran["a file"].code, ran["a file"].err) == (0, "written to policies.toml\n")
    checked = run("policy", "check", str(file))
    assert (checked.code, len(checked.out.splitlines())) == (0, 2)
    text = file.read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "# infinite-retries: max_retries=None" in text
    policies = load(file)
    for one in ran["a broker"].json:
        assert policies.of(one["name"]).policies == [one["policy"]]
        assert policies.of(one["name"].replace("*", "anything") + "x") is None


def test_numbers_of_the_code_itself(folder: Path) -> None:
    """A task whose code says its waits keeps its own numbers; an unknown one is not in the file."""
    line = ("plan", "habits:app")
    summary, every, same = spawn_all(
        line,
        (*line, "--all", "--write", "habits.toml"),
        (*line, "--diff", "habits.toml"),
        cwd=folder,
    )
    told = [" ".join(one.out.split()) for one in (summary, every)]
    assert "under the policies 2 do exactly what they do today, 1 are not known" in told[0]
    for text in told:
        assert "install without a file moves it, too, with its native numbers" in text
    assert "runs 5 waits as its code says together as its code says" in told[1]
    assert "policy its native numbers differs in nothing" in told[1]
    assert "runs 5 waits 1 s; at last 8 s together 15 s" in told[1]
    assert (same.code, same.out) == (0, "habits.toml says what the plan says\n")
    policies = load(folder / "habits.toml")
    assert [policies.of(name).policies for name in ("doubles", "computes")] == [[{}], [{}]]
    assert policies.of("unknown") is None
    assert run("policy", "check", str(folder / "habits.toml")).code == 0
    file = folder / "habits.toml"
    file.write_text(file.read_text(encoding="utf-8").replace('"doubles"]', '"doubles"]\nmax_attempts = 2'))
    (other,) = spawn_all((*line, "--diff", "habits.toml"), cwd=folder)
    assert (other.code, other.out) == (
        1,
        "doubles: max_attempts is set in the file, and the plan leaves it to the task\n",
    )


AWKWARD = [
    "a",
    "a.b",
    'quo"te',
    "new\nline",
    "back\\slash",
    "st*r",
    "wh[at]?",
    "tab\t|pipe",
    "\x7f",
    "é✓",
    "]",
    "#",
]


def planned(name: str, policy: dict[str, Any] | None = None, **fields: Any) -> Planned:
    """Return a planned task."""
    native = NativeRetries(2, (WaitRange.of(1),), "every error", "nothing", "it is gone", WaitRange.of(1))
    known = {"differences": (), "hazards": (), **fields}
    return Planned(name, native, {"max_attempts": 2} if policy is None else policy, **known)


def test_awkward_names_and_texts_in_a_file(tmp_path: Path) -> None:
    """Names are quoted as TOML asks; the words of the user's code stay comments."""
    file = str(tmp_path / "policies.toml")
    policy = {"max_attempts": 3, "jitter": False, "backoff_coefficient": 1e16,
              "non_retryable_errors": ['a"b\\', "c.*"]}  # fmt: skip
    evil = "x\n[policies.evil]\r\nmax_attempts = 99"
    plan = [planned(name, policy, differences=(evil,), hazards=(Hazard("odd", evil),)) for name in AWKWARD]
    write(file, evil, [*plan, Planned(evil, None, None, (), (), unreadable=evil)])
    assert all(named.policy for named in read_file(file))
    assert len(read_file(file)) == len(AWKWARD)
    policies = load(file)
    for name in AWKWARD:
        assert policies.of(name).policies == [policy], name
    assert policies.of("evil") is None
    text = Path(file).read_text(encoding="utf-8")
    assert write(file, "shop", plan).startswith("0 tasks added")
    assert Path(file).read_text(encoding="utf-8") == text
    inline = tmp_path / "inline.toml"
    inline.write_text("policies = {b = {max_attempts = 2}}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"inline\.toml' cannot take tables at its end"):
        write(str(inline), "shop", plan)


def test_long_delays(folder: Path) -> None:
    """The summary names the task, what becomes of it and what helps. The rest is told on stderr."""
    every, some = spawn_all(("plan", "delays:app"), ("plan", "delays:app", "remind"), cwd=folder)
    words = " ".join(every.out.split())
    assert "delayed-sends: delays.py:12 delays it by 2 h: a worker holds it in memory" in words
    assert "the job is delivered again and runs more than once; with a store and park_delays=True" in words
    told = "delays.py:13 delays a job by a time that is not known; the plan cannot tell of which task"
    assert (every.code, every.err) == (0, f"{told} (see park_delays)\n")
    assert (some.code, some.err) == (0, "")
