"""What an index can hold of ids and texts, which may be anything; the record has them whole."""

from __future__ import annotations

import hashlib

MAX_ID = 191
MAX_TEXT = 255


def index_id(text: str) -> str:
    """Return an id as every index can hold it: a long or awkward one is hashed."""
    if len(text) <= MAX_ID and ((text.isascii() and "\0" not in text) or text == index_text(text)):
        return text
    return f"sha256-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def index_text(text: str) -> str:
    """Return text as every index can hold it: valid Unicode, no NUL, 255 characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")[:MAX_TEXT]


def matches(text: str, pattern: str | None) -> bool:
    """Return whether an indexed text is what a filter asks for: anything, exactly this, or `prefix.*`."""
    if pattern is None:
        return True
    wanted = index_text(pattern)
    return text.startswith(wanted[:-1]) if wanted.endswith(".*") else text == wanted
