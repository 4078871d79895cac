"""The fingerprint of an error: errors that differ in numbers, ids, quoted parts and paths have the same."""

from __future__ import annotations

import hashlib
import re

#: The characters of a message that are read, and the most characters of its pattern.
READ, MOST = 4000, 300
DIGITS = 16

#: Each name is what a pattern has in place of the text. A number, a UUID and an id of letters and digits look
#: alike now and then, and have one name. The time is linear: no part is searched for within another.
_PARTS = re.compile(
    r"""
    (?P<quoted> (?<!\w)'[^'\n]*'(?!\w) | "[^"\n]*" | `[^`\n]*`
              | \u201c[^\u201c\u201d\n]*\u201d | \u2018[^\u2018\u2019\n]*\u2019 )
    | (?P<url> (?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s"'<>]+ )
    | (?P<email> (?<![\w.+%-])[\w.+%-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8} )
    | (?P<path> (?<![\w/\\.~<])(?:~|\.{1,2})?/[^\s"'<>,;:()]*[^\s"'<>,;:().]
              | (?<!\w)[A-Za-z]:\\[^\s"'<>,;:()]+ )
    | (?P<number> (?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z])
              | 0[xX][0-9A-Fa-f]+
              | (?<![0-9A-Za-z])[0-9]+(?:[.,:T+-][0-9]+){0,15}Z?(?![0-9A-Za-z])
              | (?<![0-9A-Za-z])(?=[A-Fa-f]{0,63}[0-9])[0-9A-Fa-f]{8,}(?![0-9A-Za-z])
              | (?<![0-9A-Za-z])(?=[A-Za-z]{0,63}[0-9]{1,63}[A-Za-z])[0-9A-Za-z]{6,}(?![0-9A-Za-z])
              | [0-9]+ )
    """,
    re.VERBOSE,
)
_REPEATED = re.compile(r"(#|<\w+>)(?:[\s,;]+\1)+")


def pattern_of(message: str) -> str:
    """Return what similar messages have in common; `#` stands for a number or an id, `<path>` for a path."""
    plain = _PARTS.sub(_name_of, message[:READ])
    return _REPEATED.sub(r"\1", " ".join(plain.split()))[:MOST]


def _name_of(part: re.Match[str]) -> str:
    return "#" if part.lastgroup == "number" else f"<{part.lastgroup}>"


def fingerprint(error_type: str, message: str) -> str:
    """Return 16 hexadecimal digits for the error's type and the pattern of its message."""
    told = f"{error_type}\0{pattern_of(message)}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(told).hexdigest()[:DIGITS]


def is_fingerprint(text: object) -> bool:
    """Return whether a text has the form of a fingerprint."""
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{16}", text) is not None
