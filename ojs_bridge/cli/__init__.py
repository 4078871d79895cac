"""The command line, `ojs-bridge`: plans, dead letters, parked retries, policies, the board.

Exit codes: 0 done; 1 some of it could not be done, or what was checked is invalid; 2 wrong usage, or refused;
3 the store or the broker cannot be reached.
"""

from __future__ import annotations

import sys

MISSING = "ojs-bridge: the command line needs typer and rich: pip install 'ojs-bridge[cli]'"


def main() -> None:
    """Run the command line with the process's own arguments, and exit."""
    try:
        from .program import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "tomli"):
            raise
        sys.exit(_refused())
    run()


def _refused() -> int:
    sys.stderr.write(f"{MISSING}\n")
    return 2
