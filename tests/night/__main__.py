"""Lives a night of eight faults: which alerts fire, and how many clicks lead to the cause and to the mend.

`python -m tests.night --help`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.night.faults import FAULTS
from tests.night.night import live


def main() -> None:
    """Live it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m tests.night", description=__doc__)
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=[*FAULTS], metavar="N", help=str([*FAULTS])
    )
    parser.add_argument("--quiet", type=float, default=30, help="seconds before the first fault")
    parser.add_argument("--folder", type=Path, help="keep logs and pictures here")
    parser.add_argument("--write", action="store_true", help="put the rows and the pictures into the docs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ojs-night-") as temporary:
        is_well = live(
            [FAULTS[name] for name in asked.faults],
            folder=(asked.folder or Path(temporary)).resolve(),
            quiet=asked.quiet,
            write=asked.write,
        )
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
