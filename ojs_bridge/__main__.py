"""Runs the command line: `python -m ojs_bridge`."""

from .cli import main

main()
