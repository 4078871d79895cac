"""What goes wrong, as the command line tells it: one line on stderr and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import InvalidRetryPolicy, LetterNotFound, RetryNotFound, StoreError, Unpublishable, Unreachable
from .printing import say

INCOMPLETE = 1
REFUSED = 2
OUT_OF_REACH = 3

#: What is wrong with one letter or retry alone.
OF_ITS_OWN = (LetterNotFound, RetryNotFound, Unpublishable)


@contextmanager
def told() -> Iterator[None]:
    """Turn what the library raises into a line on stderr and an exit code."""
    try:
        yield
    except StoreError as error:
        raise failed(str(error), OUT_OF_REACH) from None
    except Unreachable as error:
        raise failed(
            f"the broker cannot be reached, and what was not sent stays: {error}", OUT_OF_REACH
        ) from None
    except InvalidRetryPolicy as error:
        raise failed("\n".join(error.problems), REFUSED) from None
    except OF_ITS_OWN as error:
        raise failed(str(error), INCOMPLETE) from None
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        raise failed(str(error), REFUSED) from None


def failed(lines: str, code: int) -> typer.Exit:
    """Say what is wrong, and return what ends the command."""
    for line in lines.splitlines():
        say(f"ojs-bridge: {line}")
    return typer.Exit(code)
