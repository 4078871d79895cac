"""Prints what a dependency sees of a fleet while it is down, by how the fleet retries.

`python -m tests.storm --help`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path

from tests.delays.tables import rows_into, table
from tests.storm import trial
from tests.storm.picture import picture
from tests.storm.settings import SIDES, Settings

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "explanation" / "storm.md", DOCS / "pictures" / "storm.svg"
NAMES = {"native": "native retries", "policies": "policies alone", "holds": "with holds"}


def main() -> None:
    """Run the sides that are asked for, and print the table; fail when the bridge lost or doubled a job."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--frameworks", nargs="+", choices=trial.COMMANDS, default=[*trial.COMMANDS])
    parser.add_argument("--folder", type=Path, help="keep ledgers, logs and what was counted here")
    parser.add_argument("--write", action="store_true", help="put the rows and the picture into the docs")
    options = [one for one in fields(Settings) if one.default is not MISSING and one.name != "begun"]
    for one in options:
        kind = type(one.default)
        parser.add_argument(
            f"--{one.name.replace('_', '-')}", type=kind, default=one.default, help="%(default)s"
        )
    asked = parser.parse_args()
    rows, is_kept = [], True
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        for side in asked.sides:
            chosen = {one.name: getattr(asked, one.name) for one in options}
            settings = Settings(side, "", None, "", 0, **chosen)
            verdict = trial.run(settings, folder / side, asked.frameworks)
            rows.append([NAMES[side], *verdict.cells()])
            print(rows[-1], file=sys.stderr, flush=True)
            is_kept = is_kept and (side == "native" or not verdict.lost)
        if asked.write:
            rows_into(PAGE, trial.HEAD, rows)
            known = [side for side in SIDES if (folder / side).exists()]
            PICTURE.write_text(picture({NAMES[side]: trial.verdict(folder / side) for side in known}))
    print(table(trial.HEAD, rows), flush=True)
    sys.exit(not is_kept)


if __name__ == "__main__":
    main()
