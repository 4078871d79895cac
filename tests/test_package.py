"""The package as it is shipped and imported, and its layers."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import metadata, resources
from pathlib import Path

import pytest

import ojs_bridge
import ojs_bridge.celery
import ojs_bridge.dramatiq
import ojs_bridge.testing
from ojs_bridge import errors
from ojs_bridge.celery import compat as celery_compat
from ojs_bridge.config.policies import tomllib
from ojs_bridge.dramatiq import compat as dramatiq_compat
from ojs_bridge.rules import failures, responses

PACKAGE = Path(ojs_bridge.__file__).parent
OPTIONAL = {"celery", "dramatiq", "kombu", "pika", "redis", "sqlalchemy"} | {
    *("anyio", "rich", "starlette", "typer", "uvicorn"),
    *("opentelemetry", "prometheus_client", "sentry_sdk"),
}
FRAMEWORKS = {"celery", "kombu", "billiard", "vine", "dramatiq", "pika", "redis"}
#: The modules for the world outside, which a pure module does not import.
IMPURE = {"asyncio", "io", "logging", "os", "pathlib", "random", "secrets", "socket", "subprocess",
          "tempfile", "threading", "time", "uuid"}  # fmt: skip
#: The exception: the generator that draws jitter for a caller without one.
NAMED = {"policy": {"random"}}
#: The floors of the house, lowest first: a file imports from its own room and from the floors below.
FLOORS = [
    {"errors", "messages"},
    {"rules"},
    {"store"},
    {"engine"},
    {"operations"},
    {"config"},
    {"bridge"},
    {"adapters"},
    {"celery", "dramatiq", "instrumentation"},
    {"migration", "testing"},
    {"http"},
    {"cli"},
]
#: The floors below the adapters.
BELOW = set().union(*FLOORS[: FLOORS.index({"adapters"})])


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules, and the package's rooms, that a fresh interpreter has after an import."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import ojs_bridge", OPTIONAL),
        ("from ojs_bridge import *", OPTIONAL),
        ("import ojs_bridge; ojs_bridge.Bridge()", OPTIONAL),
        ("import ojs_bridge.dramatiq", {"celery", "kombu", "sqlalchemy", "redis", "ojs_bridge.celery"}),
        ("import ojs_bridge.celery", {"dramatiq", "sqlalchemy", "pika", "ojs_bridge.dramatiq"}),
    ],
)
def test_what_an_import_does_not_bring(statement: str, absent: set[str]) -> None:
    """Each extra works without the others."""
    assert not modules_after(statement) & absent


#: a statement that a reader may guess -> the import that it is answered with
GUESSED = {
    "from ojs_bridge import ojs_task": "from ojs_bridge.celery import ojs_task",
    "from ojs_bridge import OJSTask": "from ojs_bridge.celery import OJSTask",
    "from ojs_bridge import OJSRetries": "from ojs_bridge.dramatiq import OJSRetries",
    "from ojs_bridge import OJSMiddleware": "from ojs_bridge.dramatiq import OJSRetries",
    "from ojs_bridge import install": "from ojs_bridge.celery import install",
    "from ojs_bridge import bridge_of": "from ojs_bridge.dramatiq import bridge_of",
    "from ojs_bridge import Policy": "from ojs_bridge import RetryPolicy",
    "from ojs_bridge.celery import shared_task": "from ojs_bridge.celery import ojs_task",
    "from ojs_bridge.celery import OJSRetries": "from ojs_bridge.dramatiq import OJSRetries",
    "from ojs_bridge.dramatiq import OJSMiddleware": "from ojs_bridge.dramatiq import OJSRetries",
    "from ojs_bridge.dramatiq import ojs_task": "from ojs_bridge.celery import ojs_task",
}


@pytest.mark.parametrize("statement", GUESSED)
def test_a_guessed_import_answers_with_the_import_that_works(statement: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert GUESSED[statement] in str(caught.value)
    exec(GUESSED[statement])


def test_other_names_are_missing_as_ever() -> None:
    assert not hasattr(ojs_bridge, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'ojs_bridge'"):
        exec("from ojs_bridge import nothing")


def test_all_is_sorted_and_complete() -> None:
    """`__all__` has every public name of the package, and no other."""
    assert sorted(ojs_bridge.__all__) == ojs_bridge.__all__
    rooms = {path.stem for path in PACKAGE.iterdir()}
    public = {name for name in vars(ojs_bridge) if not name.startswith("_")} - rooms
    assert public == set(ojs_bridge.__all__)


#: Exceptions that no user meets, and what becomes of each.
WITHIN = {
    "http.answers.Refusal": "an answer of the API",
    "engine.reservations.TakenOver": "ends a run that is not heard any more",
    "engine.carrying.NotCarried": "sends a message back to its broker",
    "engine.reservations.Unanswered": "lets a job wait for its store",
    "celery.ends.Keep": "keeps a message that waits",
    "celery.ends.SentOn": "becomes the framework's own Retry in another process",
    "celery.task.BrokenOff": "ends a run in the worker's own process",
    "dramatiq.delivery.Skipped": "ends a delivery without a run",
    "dramatiq.translate.NotRun": "the base of what is exported",
    "dramatiq.publishing.NotSent": "has the framework's own error in it",
    "dramatiq.keeping.GiveUp": "ends a thread with its worker",
    "operations.runner._Stopped": "ends a bulk operation",
    "testing.parts.WorkerDied": "ends a run under virtual time",
    "migration.plan.Injected": "is raised in a task that the plan tries out",
}
#: The rooms whose public names a user imports.
ROOMS = [ojs_bridge, ojs_bridge.celery, ojs_bridge.dramatiq, ojs_bridge.testing]


def exceptions() -> Iterator[type[BaseException]]:
    """Yield every exception class of the package."""
    for found in pkgutil.walk_packages(ojs_bridge.__path__, "ojs_bridge."):
        if not found.name.endswith("__main__"):
            for thing in vars(importlib.import_module(found.name)).values():
                is_own = getattr(thing, "__module__", "") == found.name and inspect.isclass(thing)
                if is_own and issubclass(thing, BaseException):
                    yield thing


def test_every_exception_stands_where_a_user_finds_it() -> None:
    """It is exported, or of a class that is, or no user meets it; the trees have each of their own."""
    found, public = [*exceptions()], {getattr(room, name) for room in ROOMS for name in room.__all__}
    within = [each for each in found if public.isdisjoint(each.__mro__)]
    assert {f"{each.__module__.removeprefix('ojs_bridge.')}.{each.__qualname__}" for each in within} == set(
        WITHIN
    )
    for home in (errors, failures, responses):
        names = re.findall(r"^[│ ]*[├└]── (\w+)|^(\w+)$", home.__doc__ or "", re.MULTILINE)
        own = {each.__name__ for each in found if each.__module__ == home.__name__}
        assert {name or root for name, root in names} - {"Exception"} == own


@pytest.mark.parametrize("name", ["celery", "dramatiq", "store"])
def test_all_of_the_rooms(name: str) -> None:
    """Constants come first, each kind is sorted, and every name is there."""
    room = __import__(f"ojs_bridge.{name}", fromlist=["__all__"])
    assert sorted(room.__all__, key=lambda public: (not public.isupper(), public)) == room.__all__
    assert all(hasattr(room, public) for public in room.__all__)


def test_the_facade_shows_what_a_user_may_call() -> None:
    """A bridge has at most twenty-six public names, and each argument of the constructor is documented."""
    bridge = ojs_bridge.Bridge()
    assert len([name for name in dir(bridge) if not name.startswith("_")]) <= 26
    text = inspect.getdoc(ojs_bridge.Bridge) or ""
    for argument in inspect.signature(ojs_bridge.Bridge).parameters:
        assert f"\n    {argument}: " in text, argument


def test_the_package_is_typed() -> None:
    """The package ships py.typed."""
    assert resources.files("ojs_bridge").joinpath("py.typed").is_file()


def test_each_framework_is_an_extra() -> None:
    """The package itself needs no framework; before Python 3.11 it needs a reader of TOML."""
    requires = metadata.requires("ojs-bridge") or []
    needed = [line for line in requires if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needed) == ["isodate", "pydantic", "tomli"]
    assert [line for line in needed if ";" in line] == ["tomli>=2; python_version < '3.11'"]
    extras = metadata.metadata("ojs-bridge").get_all("Provides-Extra") or []
    assert {"celery", "dramatiq", "sql", "postgresql"} <= set(extras)


def test_a_framework_has_an_upper_bound_and_nothing_else() -> None:
    """An untried release may have another name in the place of a private one.

    What a framework needs is its own matter: a bound of ours would change what a fleet has, and a worker that
    starts looks for each name.
    """
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {extra: lines for extra, lines in extras.items() if any("<" in line for line in lines)} == {
        "celery": ["celery>=5.4,<5.8"],
        "dramatiq": ["dramatiq>=2.0,<3"],
    }


def imports(path: Path) -> Iterator[str]:
    """Return the modules that a file imports, in full; for `from a import b` also `a.b`."""
    here = ("ojs_bridge", *path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: -node.level], *([node.module] if node.module else [])])
            module = base if node.level else str(node.module)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files(room: str) -> list[Path]:
    """Return the files of a room."""
    single = PACKAGE / f"{room}.py"
    return [single] if single.exists() else sorted((PACKAGE / room).glob("**/*.py"))


def rooms_used(path: Path) -> set[str]:
    """Return the other rooms of the package that a file imports from."""
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    used = {
        parts[1] for name in imports(path) if (parts := name.split("."))[0] == "ojs_bridge" and len(parts) > 1
    }
    return (used & set().union(*FLOORS)) - {own}


def top_level(path: Path) -> set[str]:
    """Return the top-level modules that a file imports."""
    return {name.split(".")[0] for name in imports(path)}


def test_every_room_has_a_floor() -> None:
    """A new room is put on a floor."""
    rooms = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("__")} - {"py"}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("floor", range(len(FLOORS)), ids=lambda floor: "+".join(sorted(FLOORS[floor])))
def test_arrows_run_downwards(floor: int) -> None:
    """No room imports from its own floor or from those above it."""
    below = set().union(*FLOORS[:floor])
    for room in FLOORS[floor]:
        for path in files(room):
            assert rooms_used(path) <= below, path


@pytest.mark.parametrize("path", files("rules"), ids=lambda path: path.stem)
def test_the_specification_is_pure(path: Path) -> None:
    """The specification imports only the errors, pydantic, isodate and pure modules of Python."""
    assert rooms_used(path) <= {"errors"}
    foreign = top_level(path) - sys.stdlib_module_names - {"ojs_bridge"}
    assert foreign <= {"pydantic", "pydantic_core", "isodate", "typing_extensions"}
    assert not top_level(path) & (IMPURE - NAMED.get(path.stem, set()))


def calls(tree: ast.AST) -> set[str]:
    """Return the attributes and names that are called."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in called
            if isinstance(f, (ast.Attribute, ast.Name))}  # fmt: skip


@pytest.mark.parametrize("path", files("rules"), ids=lambda path: path.stem)
def test_the_specification_has_no_clock(path: Path) -> None:
    """Time is an argument."""
    assert not calls(ast.parse(path.read_text(encoding="utf-8"))) & {
        "now",
        "utcnow",
        "today",
        "open",
        "print",
    }


DECISIONS = {"Complete", "RetryAt", "Discarded", "DeadLettered", "SnoozeUntil", "GiveBack"}


@pytest.mark.parametrize("room", sorted(set().union(*FLOORS) - {"rules"}))
def test_a_match_over_decisions_leaves_none_out(room: str) -> None:
    """The match ends in `assert_never`: a new decision is an error of types in each such place."""
    for path in files(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Match) and names_in(node) & DECISIONS:
                assert calls(node.cases[-1]) == {"assert_never"}, f"{path}:{node.lineno}"


def names_in(node: ast.Match) -> set[str]:
    """Return the classes that the patterns of a match name."""
    found = [n.cls for case in node.cases for n in ast.walk(case.pattern) if isinstance(n, ast.MatchClass)]
    return {cls.id for cls in found if isinstance(cls, ast.Name)}


@pytest.mark.parametrize(("room", "other"), [("celery", "dramatiq"), ("dramatiq", "celery")])
def test_adapters_know_nothing_of_each_other(room: str, other: str) -> None:
    """An adapter uses neither the other adapter nor its framework."""
    for path in files(room):
        assert other not in rooms_used(path), path
        assert other not in top_level(path), path


#: The names by which an adapter tells the kind of a broker, and the files that have them.
KINDS = {
    "celery": ({"driver_type"}, {"brokers", "installation"}),
    "dramatiq": ({"RedisBroker", "RabbitmqBroker", "StubBroker"}, {"brokers"}),
}


@pytest.mark.parametrize("room", KINDS)
def test_one_room_of_an_adapter_asks_for_the_kind_of_a_broker(room: str) -> None:
    """All others call a method of the broker's object."""
    names, where = KINDS[room]
    words = {path.stem: {*words_of(ast.parse(path.read_text(encoding="utf-8")))} for path in files(room)}
    assert {stem for stem, found in words.items() if names & found} == where


def own_names(tree: ast.AST) -> Iterator[str]:
    """Return the names that a file gives: to functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def attributes(tree: ast.AST) -> set[str]:
    """Return the attributes that a file reads or sets, but for those that it takes from `compat`."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {
        node.attr for node in found if not (isinstance(node.value, ast.Name) and node.value.id == "compat")
    }


def texts(tree: ast.AST) -> set[str]:
    """Return the names that a file imports, or has as a text, for `getattr` and the like."""
    imported = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return imported | {value for value in constants if isinstance(value, str) and value.isidentifier()}


#: The rooms whose framework's private names stand in their `compat`, and those names.
FENCED = {
    "celery": {name.name for name in celery_compat.names()},
    "dramatiq": {name.name for name in dramatiq_compat.names()},
}
FENCED["migration"] = FENCED["testing"] = FENCED["celery"] | FENCED["dramatiq"]
#: The files of the package whose names with an underscore a room may use: a test's bridge is made of ours.
OPEN = {"testing": [PACKAGE / "bridge.py", *files("engine")]}
#: Python's own names with an underscore, and names of a framework's that other objects have, too, or that are
#: options of a task.
OF_PYTHON = {"_current_frames", "_exit", "_getframe", "_replace"}
COMMON = {"autoretry_for", "channel", "confirm_delivery", "connection", "consumer", "max_retries", "queue"}


@pytest.mark.parametrize(
    ("room", "path"),
    [(room, path) for room in FENCED for path in files(room) if path.stem != "compat"],
    ids=lambda value: getattr(value, "stem", value),
)
def test_private_names_of_a_framework_stand_in_compat(room: str, path: Path) -> None:
    """No other file has a name with an underscore that is not its own, or a name that `compat` has.

    A public method of a framework's class may be overridden, and called, where the class is. The files of one
    folder of `migration` share classes.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    siblings = path.parent.glob("*.py") if room == "migration" else [path]
    own = {name for each in siblings for name in own_names(ast.parse(each.read_text(encoding="utf-8")))}
    used = attributes(tree) | texts(tree)
    opened = {name for each in OPEN.get(room, []) for name in own_names(ast.parse(each.read_text("utf-8")))}
    foreign = used - own - opened - OF_PYTHON
    call = "write `compat.it(owner)`, with `it = minor(...)` or `vital(...)` in compat.py"
    assert not {name for name in foreign if re.match("_(?!ojs)[a-z]", name)}, call
    private = {name for name in FENCED[room] if name.startswith("_")}
    assert not private & (used | own), call
    assert not (FENCED[room] - COMMON) & (attributes(tree) - own), call


@pytest.mark.parametrize("room", sorted(BELOW | {"adapters"}))
def test_only_an_adapter_imports_its_framework(room: str) -> None:
    """The room of both adapters does not. redis-py is the Redis store's own library, and no exception."""
    own = {"redis"} if room == "store" else set()
    for path in files(room):
        assert not top_level(path) & (FRAMEWORKS - own), path


#: The frameworks, and what they are made of.
FRAMEWORK_NAMES = re.compile("celery|dramatiq|kombu|billiard|vine|pika", re.IGNORECASE)
#: The texts in the code below the adapters that name one all the same.
SAID_BELOW = {
    # The refusal of `acks_late`, a public setting that only one framework has.
    "stands beside a policy, in an entry of `policies`, or is an option of a Celery task",
    # A name among those of other libraries' errors: it is never imported.
    "dramatiq.errors.RateLimitExceeded",
}


def words_of(tree: ast.AST) -> Iterator[str]:
    """Yield the identifiers and the texts of a file's code, but for its docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            yield from (value for _, value in ast.iter_fields(node) if isinstance(value, str))


def test_code_below_the_adapters_names_no_framework() -> None:
    """What differs between the frameworks is a value, which an adapter hands down."""
    paths = [path for room in BELOW for path in files(room)]
    words = {word for path in paths for word in words_of(ast.parse(path.read_text("utf-8")))}
    assert {word for word in words if FRAMEWORK_NAMES.search(word)} == SAID_BELOW


def test_no_file_imports_itself_by_way_of_others() -> None:
    """A reader can read each file after the files that it imports."""
    modules = {".".join(("ojs_bridge", *path.relative_to(PACKAGE).with_suffix("").parts)): path
               for path in PACKAGE.rglob("*.py")}  # fmt: skip
    named = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {
        path: {named[name] for name in imports(path) if name in named} - {path, path.with_name("__init__.py")}
        for path in named.values()
    }
    TopologicalSorter(graph).prepare()


def test_a_constant_has_one_value() -> None:
    """A second value further down in a file would be that of the first place, too."""
    for path in PACKAGE.rglob("*.py"):
        assigned = [
            node
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
        ]
        names = [
            name.id
            for node in assigned
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and name.id.isupper()
        ]
        assert len(names) == len({*names}), path


def test_the_store_is_reached_by_its_door() -> None:
    """A room imports from `store`, and not from the files in it."""
    outside = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "store")]
    inner = {f"ojs_bridge.store.{path.stem}" for path in files("store")}
    assert {path: inner & {*imports(path)} for path in outside if inner & {*imports(path)}} == {}
