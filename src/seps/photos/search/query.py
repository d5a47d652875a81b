"""What a search looks for: sentences and pictures that are added and subtracted, and which pictures it may find.

    horse + stripes - grass

A `+` or `-` between spaces (or at the start, before a space) is a sign; "black-and-white" and "C++" stay words, and so
does what stands in double quotes: `"rock - paper" + scissors`. "beach without people" is read as `beach - people`.
`seps.photos.search.sums` has the score of a sum.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from seps.photos.store.filters import Filters

CANDIDATES = 200
"""Pictures that are scored exactly, unless the query says otherwise."""
Sort = Literal["score", "newest", "oldest"]
_SIGN = re.compile(r'"[^"]*"|(?:^|(?<=\s))[+-](?=\s|$)')
_WITHOUT = re.compile(r"\s+(?:without|with no)\s+(?:any\s+)?", re.IGNORECASE)
_BARE_SIGN = re.compile(r"(?:^|\s)[+-](?:\s|$)")
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True, order=True)
class Term:
    """One part of a query."""

    text: str
    """A sentence, or the path of a picture; of a picture that is no file, what names it among the encoded pictures."""
    is_image: bool = False
    sign: int = 1
    weight: float = 1.0
    """Beside other parts: its share of the sum."""

    def __str__(self) -> str:
        name = f"picture {self.text}" if self.is_image else self.text
        return name if self.sign > 0 else f"- {name}"


def parse(text: str) -> tuple[Term, ...]:
    """The sentences of a query with their signs, as they were written; "A without B" is A and minus B.

    Raises ValueError for a sign without anything to add or subtract, and for a blank query.
    """
    terms: list[Term] = []
    start, sign, signed = 0, 1, False
    for match in [*_SIGN.finditer(text), None]:
        if match is not None and match[0] not in ("+", "-"):
            continue
        end = len(text) if match is None else match.start()
        sentence = text[start:end].strip()
        if sentence:
            terms += _without(sentence, sign)
        elif signed or (match is None and not terms):
            raise ValueError(
                f"The query {text!r} has a sign with nothing to add or subtract. Write it like 'horse + stripes - "
                "grass'; a sign that is meant as a letter goes into double quotes."
                if signed
                else "The query is blank. Write what to look for, like 'a dog running on the beach'."
            )
        if match is not None:
            start, sign, signed = match.end(), 1 if match[0] == "+" else -1, True
    return tuple(terms)


def _without(sentence: str, sign: int) -> list[Term]:
    """A sentence as one part, or as two where its form says what pictures must not show."""
    parts = _WITHOUT.split(sentence)
    if len(parts) != 2 or not all(parts) or '"' in sentence:
        return [Term(_unquoted(sentence), sign=sign)]
    return [Term(parts[0], sign=sign), Term(parts[1], sign=-sign)]


def how_read(text: str) -> str:
    """A sentence where the form of a query, not a sign, makes parts of it; else an empty text."""
    if not _WITHOUT.search(text):
        return ""
    terms = parse(text)
    read = " ".join(f"{'+' if term.sign > 0 else '-'} {term.text}" for term in terms).removeprefix("+ ")
    written = sum(match[0] in ("+", "-") for match in _SIGN.finditer(text))
    return f'Read as "{read}"; double quotes keep it one sentence.' if len(terms) > written + 1 else ""


def _unquoted(sentence: str) -> str:
    """What stands between quotes that keep a sign or a form from being one; other quotes are part of the sentence."""
    whole = _QUOTED.fullmatch(sentence)
    return whole[1].strip() if whole and (_WITHOUT.search(whole[1]) or _BARE_SIGN.search(whole[1])) else sentence


def terms_of(
    text: str | None,
    images: Sequence[str | os.PathLike[str]] = (),
    minus_images: Sequence[str | os.PathLike[str]] = (),
) -> tuple[Term, ...]:
    """The parts of a query of a text and pictures. Raises ValueError for a text that cannot be read."""
    terms = parse(text) if text is not None else ()
    for sign, pictures in ((1, images), (-1, minus_images)):
        for picture in pictures:
            terms += (Term(os.fspath(picture), True, sign),)
    return terms


def explained_sentence(terms: Sequence[Term]) -> str | None:
    """The sentence by which a result is explained: of a sum the first that is looked for; None without a sentence."""
    sentences = sorted((term for term in terms if not term.is_image), key=lambda term: -term.sign)
    return sentences[0].text if sentences else None


@dataclass(frozen=True)
class Query:
    """One search, the same from the command line, the address of the page and Python. Equal queries have equal results.

    Raises ValueError where nothing is looked for, and for settings out of their range.
    """

    parts: tuple[Term, ...]
    filters: Filters = field(default_factory=Filters)
    k: int = 10
    """Results at most."""
    candidates: int = CANDIDATES
    """Pictures that are scored exactly, found by their vectors."""
    exact: bool = False
    """Score every picture."""
    sort: Sort = "score"
    fold: bool = False
    """Put near-duplicates among the results behind the best of them."""
    min_confidence: float | None = None
    """Hide results below this confidence, 0 to 1; of one sentence alone."""
    text: str = field(default="", compare=False)
    """As it was written, where it was."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("There is nothing to look for: give a sentence, or a picture.")
        if all(part.sign < 0 for part in self.parts):
            raise ValueError(
                f"The query only takes away ({', '.join(map(str, self.parts))}); say what to look for, like 'horse - "
                "grass'."
            )
        if self.k < 1 or self.candidates < 1:
            raise ValueError(f"k is {self.k} and candidates {self.candidates}; both must be at least 1.")
        if self.min_confidence is None:
            return
        if self.sentence is None:
            raise ValueError(
                "A confidence is known of one sentence alone: leave min_confidence (--min-confidence) out for sums and "
                "pictures."
            )
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence is {self.min_confidence}; it must lie between 0 and 1.")

    @property
    def depth(self) -> int:
        """Pictures that are ranked: near-duplicates are folded among the candidates."""
        return max(self.k, self.candidates) if self.fold else self.k

    @property
    def sentence(self) -> str | None:
        """The sentence, where the query is one and nothing else."""
        return self.parts[0].text if len(self.parts) == 1 and not self.parts[0].is_image else None

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences, added or subtracted."""
        return tuple(part.text for part in self.parts if not part.is_image)

    @property
    def explained(self) -> str | None:
        """The sentence by which its results are explained; None for pictures alone."""
        return explained_sentence(self.parts)

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts)).replace("+ - ", "- ")


def check_text(text: object) -> None:
    """Raise ValueError for what is no sentence to search by."""
    if not isinstance(text, str):
        raise ValueError(f"A query is a text, like 'a dog running on the beach', not {type(text).__name__}.")
    if not text.strip():
        raise ValueError("The query is blank. Write what to look for, like 'a dog running on the beach'.")
