"""Runs the command line: `python -m ojs_bridge.cli`."""

from . import main

main()
