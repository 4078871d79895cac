"""The fingerprint of a fault: the job type, the error type, the place in the user's code, and the message.

Messages that differ in numbers, ids, addresses and long quoted parts have the same pattern.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

#: The characters of a message that are read, and the most characters of its pattern.
READ, MOST = 4000, 300
#: The frames of a backtrace that are read, the innermost ones, and the characters of each.
FRAMES, FRAME = 200, 1000
DIGITS = 16

#: After a code: no other part of a number, no things that are counted, no unit.
_ALONE = (
    r"(?![0-9A-Za-z]|[.,:-][0-9]|\s(?!this|does|status|class|access)[a-z]{3,}s\b"
    r"|\s?(?:ms|s|sec|min|h|kB|MB|GB|%|of|rows?)(?![A-Za-z]))"
)
#: Before a code: not a code of another kind, and not the name of an id.
_NO_PLACE = "".join(
    f"(?<!{word} )" for word in ("zip", "postal", "country", "area", "promo", "voucher", "coupon", "product")
)
_NO_ID = "".join(
    f"(?<!{word}: )"
    for word in (
        *("id", "ids", "user", "order", "job", "row", "line", "port", "number", "count", "total", "size"),
        *("customer", "account", "item", "Error"),
    )
)
_PHRASE = (
    r"(?:(?:Client|Server|Bad|Unauthori[sz]ed|Forbidden|Not|NOT|Method|Request|Conflict|Gone|Unprocessable"
    r"|Too Many|Internal|Service|Gateway|client|server|error|response|status)\b|message=)"
)
#: A status or an error code, of HTTP, SQL, SMTP, the system or a process.
_CODE = "|".join(
    [
        # Behind a word that says so.
        rf"{_NO_PLACE}(?<!bar)(?:(?i:status|code|errno|winerror|curl|sqlcode|signal|reason|level|msg"
        rf"|(?<![a-z])(?:state|errors?|err|exit|rc))[\s='\"(\[#-]{{1,3}}[0-9]{{1,5}}{_ALONE}"
        rf"|(?i:status|code|response|https?(?:/[0-9.]{{1,3}})?|(?<![a-z])(?:errors?|curl))[\s:='\"(\[]{{1,3}}"
        rf"(?:[1-5][0-9]{{2}}|[0-9]{{1,2}}(?=\))){_ALONE})",
        r"(?<![A-Za-z])(?i:returned|returns|answered|answers|answer|replied|responded|responds|got|received|gave"
        rf"|said|sent|with)[\s:='\"(\[]{{1,3}}[1-5][0-9]{{2}}{_ALONE}",
        rf"(?i:sqlstate)[\s:=\[('\"]{{1,3}}[0-9A-Z]{{5}}{_ALONE}",
        rf"(?<![0-9A-Za-z])(?:ORA|TNS|PLS|DPY|DPI|SQL|DB2|AADSTS|E|ERR|MY)-?[0-9]{{4,6}}{_ALONE}",
        r"[\[('](?:[0-9]{2}[A-Z][0-9A-Z]{2}|HY[0-9]{3}|IM[0-9]{3})(?=[\])'])",
        # Alone in brackets, as drivers and clients write it.
        r"(?:^|(?<=[:;,.)\]]\s)|(?<=error\s)|(?<=occurred\s)|(?<=failed\s))"
        r"(?:\([0-9]{1,5}(?=\)|,\s?[bu]?['\"])|\[[1-5][0-9]{2}(?=\]))",
        # At the beginning of a reply, also as an extended one of SMTP; at the end; before its phrase.
        rf"^[1-5][0-9]{{2}}(?:[ -][245]\.[0-9]{{1,3}}\.[0-9]{{1,3}})?(?=[-,:]?\s){_ALONE}",
        rf"{_NO_ID}(?<=[a-z]: )[1-5][0-9]{{2}}(?=[.;)]?\s*$)",
        rf"(?<![0-9A-Za-z.,:-])[345][0-9]{{2}}(?=,?\s{_PHRASE})",
    ]
)
_CODES, _AROUND = re.compile(_CODE), " :='\"()[]"

#: The parts of a message that differ from job to job. A pattern has the part's name in its place, such as
#: `<path>`, and `#` for a number, a UUID or an id, since one may look like another. A code and a quoted word
#: stay as they are. A part is searched for other parts once at most: the time is linear.
_PARTS = re.compile(
    rf"(?P<status>{_CODE})|"
    r"""(?x:
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
    )"""
)
_REPEATED = re.compile(r"(#|<\w+>)(?:[\s,;]+\1)+")
#: A quoted word that tells one fault from another: a key, a column, a relation, a class.
_WORD = re.compile(r"[^\W\d][\w.-]{0,31}")

#: A frame as a backtrace has it. Of an installed package, the path may begin with the package.
_FRAME = re.compile(r"(?:.*/(?:site|dist)-packages/)?(?P<path>.+):[0-9]+ in (?P<function>.+)")
_ROOTED = re.compile(r"/|[A-Za-z]:/")
#: Generated code, the standard library, and the bridge.
_FOREIGN = re.compile(
    r"<|.*(?:/lib(?:64)?/(?:python|pypy)[0-9.]+t?/|/[Pp]ython3[0-9]*/Lib/|/ojs_bridge/)", re.DOTALL
)


def pattern_of(message: str) -> str:
    """Return what similar messages have in common; `#` stands for a number or an id, `<path>` for a path."""
    plain = _PARTS.sub(_name_of, message[:READ])
    return _REPEATED.sub(r"\1", " ".join(plain.split()))[:MOST]


def _name_of(part: re.Match[str]) -> str:
    text = part.group()
    if part.lastgroup == "status":
        return text
    if part.lastgroup == "quoted" and _WORD.fullmatch(text, 1, len(text) - 1):
        return text[0] + _PARTS.sub(_name_of, text[1:-1]) + text[-1]
    if part.lastgroup == "quoted" and (code := _CODES.search(text, 1)):
        return f"<quoted {code[0].strip(_AROUND)}>"
    return "#" if part.lastgroup == "number" else f"<{part.lastgroup}>"


def frame_of(job_type: str, backtrace: Sequence[object], framework: str) -> str:
    """Return the innermost frame of the user's own code, as `orders/tasks.py in charge`, or an empty text.

    `backtrace` is that of an error entry. A frame in the user's own files counts before one in an installed
    package. Where all frames are in installed packages, the user's own package is that of the job type. If no
    frame is in it, it is the first package that the framework has called. `framework` is the name of the
    framework's package.
    """
    installed: list[tuple[str, str]] = []
    for frame in reversed(backtrace[-FRAMES:]):
        parts = _FRAME.fullmatch(frame[-FRAME:].replace("\\", "/")) if isinstance(frame, str) else None
        if parts is None or _FOREIGN.match(parts["path"]):
            continue
        if _ROOTED.match(parts["path"]):
            return _shown(parts["path"], parts["function"])
        if _package(parts["path"]) not in ("ojs_bridge", framework):
            installed.append((parts["path"], parts["function"]))
    packages, own = [_package(path) for path, _ in installed], job_type.partition(".")[0]
    if packages and own not in packages:
        own = packages[-1]
    return next((_shown(path, name) for path, name in installed if _package(path) == own), "")


def _package(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def _shown(path: str, function: str) -> str:
    """Return a frame without its line, and without folders that differ from release to release."""
    folders, _, file = path.rpartition("/")
    folder = _PARTS.sub(_name_of, folders.rpartition("/")[2])
    return f"{folder}/{file} in {function}" if folder else f"{file} in {function}"


def fingerprint(
    job_type: str, error_type: str, message: str, backtrace: Sequence[object] = (), framework: str = ""
) -> str:
    """Return 16 hexadecimal digits for the types of job and error, the place, and the message's pattern."""
    text = "\0".join((job_type, error_type, frame_of(job_type, backtrace, framework), pattern_of(message)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def is_fingerprint(text: object) -> bool:
    """Return whether a text has the form of a fingerprint."""
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{16}", text) is not None
