"""What a redaction hides is in no text of a job, in whatever form code wrote it there."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.engine.redaction import HIDDEN, Secrets
from ojs_bridge.rules.failures import cut

BODY = "MIIBVgIBADANBgkqhkiG9w0\nAQEFAASCAUAwggE8AgEA+/x=="
PEM = f"-----BEGIN PRIVATE KEY-----\n{BODY}\n-----END PRIVATE KEY-----\n"
SECRETS = {
    "word": "hunter2",
    "PEM": PEM,
    "quotes": """it's "quoted" `so`""",
    "backslashes": "C:\\vault\\new\\tok-77",
    "umlauts": "pässwörd-ü-77",
    "Cyrillic": "пароль-сорок-два",
    "Chinese": "密码是四十二",
    "emoji": "key-😀-👍🏽-42",
    "control": "tok\x00\x07\t\x1b[0m-77",
    "URL": "https://user:p%40ss@h/x?a=1&b=2#c",
    "markup": "<a href='x'>&amp;</a>",
    "JSON": json.dumps({"token": 'abc\n"def"'}),
    "spaces": "correct horse battery",
}
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "repr": repr,
    "ascii": ascii,
    "bytes": lambda secret: repr(secret.encode()),
    "json": json.dumps,
    "json without escapes": lambda secret: json.dumps(secret, ensure_ascii=False),
    "json of json": lambda secret: json.dumps(json.dumps({"key": secret})),
    "repr of json": lambda secret: repr(json.dumps({"key": secret})),
    "repr of repr": lambda secret: repr(repr([secret])),
    "a list": lambda secret: str([1, secret, {"a": secret}]),
    "quote": quote,
    "quote all": lambda secret: quote(secret, safe=""),
    "quote_plus": quote_plus,
    "urlencode": lambda secret: urlencode({"token": secret}),
    "lower case": lambda secret: quote(secret, safe="").replace("%C3", "%c3").replace("%0A", "%0a"),
    "html": html.escape,
    "one line": lambda secret: " ".join(secret.split()),
    "indented": lambda secret: secret.replace("\n", "\n    "),
}
WORDS = ("cannot load ", ": no such key")


def telling(secret: str) -> set[str]:
    """Return pieces of a secret by which it would be known."""
    return {piece for piece in secret.split() if piece.isalnum() and len(piece) > 3 and piece.isascii()} | {
        piece for word in secret.split("-") for piece in [word] if piece.isalpha() and len(piece) > 3
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_hidden_in_each_form(secret: str, form: str) -> None:
    written = FORMS[form](SECRETS[secret])
    shown = Secrets([SECRETS[secret]]).out_of(f"{WORDS[0]}{written}{WORDS[1]}")
    assert HIDDEN in shown
    assert shown.startswith(WORDS[0]), shown
    assert shown.endswith(WORDS[1]), shown
    left = shown.replace(HIDDEN, "")
    # Around it are brackets, quotes, the words of the text, and the other items of a list.
    assert len(left) <= len("".join(WORDS)) + 24, left
    assert not any(piece in left for piece in telling(SECRETS[secret])), left


@pytest.mark.parametrize("size", range(12, 60, 4))
@pytest.mark.parametrize("mark", ["…[cut]", "…", "..."])
@pytest.mark.parametrize("form", ["plain", "repr", "json", "quote all"])
def test_what_a_cut_has_left_is_hidden(form: str, mark: str, size: int) -> None:
    """At its end, and behind it, as pydantic shows a long value: its beginning and its end."""
    for secret in (PEM, SECRETS["umlauts"], "sk_live_4eC39HqLyjWDarjtT1zdp7dc"):
        written = FORMS[form](secret)
        if size >= len(written):
            continue
        for text in (
            f"bad: {written[:size]}{mark}",
            f"bad: {written[:size]}{mark}{written[-size:]} (type=x)",
        ):
            shown = Secrets([secret]).out_of(text)
            assert shown.startswith("bad: ")
            left = shown.replace(HIDDEN, "").replace(mark, "").removeprefix("bad: ").replace(" (type=x)", "")
            # What is left of an escape that was cut in two, and the quotes.
            assert len(left) <= 12, shown


def test_a_cut_of_ours_and_one_without_a_mark() -> None:
    secret = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"
    whole = f"{'x' * 3_970} rejected {secret}{'y' * 200}"
    assert "sk_live" not in Secrets([secret]).out_of(cut(whole, 4_000))
    assert Secrets([secret]).out_of(f"rejected {secret[:15]}") == f"rejected {HIDDEN}"
    assert Secrets([secret]).out_of(f"the middle {secret[5:28]} of it") == f"the middle {HIDDEN} of it"


def test_what_is_no_secret_stays() -> None:
    secrets = Secrets(["hunter2", PEM, "abc"])
    for text in (
        "hunters",
        "key abc",
        "----- END -----",
        "a" * 5_000,
        "C:\\new\\x",
        "50 % of \\u00fc",
        "...",
        "",
    ):
        assert secrets.out_of(text) == text
    entry = {
        "attempt": 1,
        "timestamp": "2026-11-26T10:00:00.000Z",
        "details": {"hunter2": ["x", "hunter2"], "n": 1.5},
    }
    hidden = {**entry, "details": {HIDDEN: ["x", HIDDEN], "n": 1.5}}
    assert secrets.out_of(entry) == hidden
    assert Secrets(["2026-11-26T10:00:00.000Z"]).out_of(entry)["timestamp"] == entry["timestamp"]
    assert Secrets([]).out_of(entry) == entry


@given(st.text(min_size=6), st.text(), st.text(), st.sampled_from(sorted(FORMS)))
def test_any_secret_in_any_text(secret: str, before: str, after: str, form: str) -> None:
    """The text around it is there, but for what looks like a part of it."""
    shown = Secrets([secret]).out_of(before + " " + FORMS["repr"](secret.strip()) + " " + after)
    assert isinstance(shown, str)
    try:
        written = FORMS[form](secret)
    except UnicodeEncodeError:
        return  # Bytes have no lone surrogates.
    plain = [char for char in secret if char.isalnum()]
    if len(plain) >= 12 and len(plain) == len(secret):
        assert secret not in Secrets([secret]).out_of(f"{before} {written} {after}")


UNITS = [
    "a",
    "\\",
    "\\n",
    "\\u00fc",
    "%41",
    "&amp;",
    "'",
    " ",
    "ab",
    "…",
    "...",
    "😀",
    "é",
    "&",
    "%",
    "\\x4",
    "a\\",
]


def test_the_time_is_linear() -> None:
    """With the length of the secret, of the text, and of the number of secrets."""

    def cost(secrets: Callable[[int], Iterator[str]], text: str, size: int) -> float:
        begun = time.thread_time()
        Secrets(secrets(size)).out_of([text * (size // len(text))] * 2)
        return time.thread_time() - begun

    def is_slow(secrets: Callable[[int], Iterator[str]], text: str) -> bool:
        return cost(secrets, text, 48_000) > 24 * max(cost(secrets, text, 6_000), 0.002)

    def one(size: int) -> Iterator[str]:
        yield unit * (size // len(unit))
        yield f"{unit * (size // len(unit))}x"

    def many(size: int) -> Iterator[str]:
        yield from (f"{unit * 9}{n}" for n in range(size // 20))

    slow = []
    for unit in UNITS:
        for secrets in (one, many):
            # A loaded machine may slow one try down.
            if is_slow(secrets, unit) and is_slow(secrets, unit):
                slow.append((unit, secrets.__name__))
    assert slow == []
