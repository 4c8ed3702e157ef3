"""Find words in text: Unicode normalised, case folded, on word boundaries, mapped back to characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

Span = tuple[int, int]
Word = tuple[str, int, int]

_ASCII_WORDS = re.compile(r"\w+|[^\w\s]", re.ASCII)
# Scripts that are written without spaces: each character (with its marks) is a word of its own.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)


def fold(text: str, *, case_sensitive: bool = False) -> str:
    """Return `text` in the form in which terms are compared: NFC, and case folded unless told not to.

    This is the canonical caseless match of the Unicode Standard, chapter 3.13 (D145), in NFC.
    """
    decomposed = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", decomposed if case_sensitive else decomposed.casefold())


@lru_cache(maxsize=256)
def split_words(text: str, *, case_sensitive: bool = False) -> tuple[Word, ...]:
    r"""Return the words of `text` in comparable form, each with its span of characters in `text`.

    A word is a run of letters, digits, underscores and marks; any other visible character is a word
    of its own, and so is each character of a script that is written without spaces.

    Examples
    --------
    >>> split_words("Zo\u0308e's")
    (('zöe', 0, 4), ("'", 4, 5), ('s', 5, 6))
    """
    if text.isascii():
        compared = text if case_sensitive else text.lower()
        return tuple((match[0], *match.span()) for match in _ASCII_WORDS.finditer(compared))
    return tuple((fold(text[a:b], case_sensitive=case_sensitive), a, b) for a, b in _word_spans(text))


def _word_spans(text: str) -> Iterator[Span]:
    start = None  # of the run of letters that is open
    for index, end, base in _characters(text):
        if (base.isalnum() or base == "_") and not _UNSPACED.match(base):
            start = index if start is None else start
            continue
        if start is not None:
            yield start, index
            start = None
        if not base.isspace():
            yield index, end
    if start is not None:
        yield start, len(text)


def _characters(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, base) of each base character together with the marks that follow it."""
    start = 0
    for index in range(1, len(text) + 1):
        if index == len(text) or not unicodedata.category(text[index]).startswith("M"):
            yield start, index, text[start]
            start = index


def index_terms(terms: Sequence[str], *, case_sensitive: bool = False) -> Mapping[str, list[tuple[str, ...]]]:
    """Return the terms as sequences of words, longest first, by their first word."""
    index: dict[str, list[tuple[str, ...]]] = {}
    for term in terms:
        words = tuple(word for word, _, _ in split_words(term, case_sensitive=case_sensitive))
        index.setdefault(words[0], []).append(words)
    for sequences in index.values():
        sequences.sort(key=len, reverse=True)
    return index


def find_terms(
    text: str, index: Mapping[str, list[tuple[str, ...]]], *, case_sensitive: bool = False
) -> list[Span]:
    r"""Return the spans of every term in `text`; white space between words may be of any kind.

    Examples
    --------
    >>> find_terms("In New\n York, new", index_terms(["new york"]))
    [(3, 12)]
    """
    words = split_words(text, case_sensitive=case_sensitive)
    spans = []
    for position, (word, start, _) in enumerate(words):
        for sequence in index.get(word, ()):
            window = words[position : position + len(sequence)]
            if tuple(part[0] for part in window) == sequence:
                spans.append((start, window[-1][2]))
                break
    return spans


def find_pattern(text: str, pattern: re.Pattern[str]) -> list[Span]:
    """Return the spans of every non-empty match of a regular expression in `text` as it is stored."""
    return [match.span() for match in pattern.finditer(text) if match.end() > match.start()]
