"""The command line, `ojs-bridge`: plans, dead letters, what waits, policies, the page.

Exit codes: 0 done; 1 some of it could not be done, or what was checked is invalid; 2 wrong usage, or refused;
3 the store or the broker cannot be reached.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

MISSING = "ojs-bridge: the command line needs typer and rich: pip install 'ojs-bridge[cli]'"


def main() -> None:
    """Run the command line with the process's own arguments, and exit."""
    the_program().run()


def the_program() -> ModuleType:
    """Return the module `program`; without typer and rich, say so and exit."""
    try:
        return import_module(f"{__name__}.program")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "tomli"):
            raise
        sys.stderr.write(f"{MISSING}\n")
        sys.exit(2)
