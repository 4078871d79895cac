"""The pages are in plain English: short sentences. Code, tables and headings do not count."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: The most words of a sentence, and the most that the sentences of a page have on average.
LONGEST, AVERAGE = 45, 30
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
#: A line that begins a block of its own: an entry of a list, a tab, a quotation.
BLOCK = re.compile(r"\s*(?:[-*+] |\d+\. |={3} |!{3} |\?{3}\+? |> |:::)")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`])")
#: An abbreviation ends no sentence.
SHORT = re.compile(r"\b(e\.g|i\.e|etc|vs|no)\.", re.IGNORECASE)
WORD = re.compile(r"[^\W_]")


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page; a piece of code counts as one word."""
    text = COMMENT.sub("", FENCE.sub("\n\n", markdown))
    text = TAG.sub("", CODE.sub("Code", LINK.sub(r"\1", text)))
    return [sentence for block in blocks(text) for sentence in END.split(SHORT.sub(r"\1", block))]


def blocks(text: str) -> list[str]:
    """Return the paragraphs and the entries of lists, each as one line."""
    found: list[list[str]] = [[]]
    for line in chain(text.splitlines(), [""]):
        if not line.strip() or line.lstrip().startswith(("|", "#")):
            found.append([])
        elif BLOCK.match(line):
            found.append([BLOCK.sub("", line, count=1)])
        else:
            found[-1].append(line.strip())
    return [" ".join(block) for block in found if block]


def length(sentence: str) -> int:
    """Return the number of words."""
    return sum(1 for word in sentence.split() if WORD.search(word))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_sentences_of_a_page_are_short(page: Path) -> None:
    lengths = {sentence: length(sentence) for sentence in sentences(page.read_text("utf-8"))}
    counted = [words for words in lengths.values() if words]
    assert [sentence for sentence, words in lengths.items() if words > LONGEST] == []
    assert sum(counted) <= AVERAGE * len(counted)


def test_what_a_sentence_is() -> None:
    text = "# A title\n\nOne two `a b c`. Three [four](x.md)!\n\n| no | no |\n\n- five e.g. six\n- seven\n"
    assert [length(sentence) for sentence in sentences(text)] == [3, 2, 3, 1]
