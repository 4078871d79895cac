"""Asking before something is touched."""

from __future__ import annotations

import sys

import typer
from rich.console import RenderableType

from .failing import REFUSED, failed
from .printing import show_on_stderr


def ask(question: str, *shown: RenderableType, yes: bool) -> None:
    """Show what will be touched and ask, unless `yes`; ends the command when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise failed(f"{question} There is no terminal to ask on: say --yes", REFUSED)
    for renderable in shown:
        show_on_stderr(renderable)
    if not typer.confirm(question, err=True):
        raise failed("nothing was done", REFUSED)
