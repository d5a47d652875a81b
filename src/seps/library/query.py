"""What a query means: sentences and pictures that are added and subtracted.

    horse + stripes - grass

A `+` or `-` between spaces (or at the start, before a space) is a sign; "black-and-white" and "C++" stay words, and so
does what stands in double quotes: `"rock - paper" + scissors`. The score of a picture v is the sum of what a search for
each part alone gives it, with the part's sign:

    S(v) = sum over parts p of sign_p S_p(v)

S_p of a sentence is the score of `seps search`: the model's, plus what rare words of the description add, minus the
picture's level over the bank of background queries. In "a - b" that level cancels. S_p of a picture is the score of
`seps search --image`. One sentence alone is exactly the plain search, with its confidence; sums have none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from seps.retrieval.index.search import CANDIDATES, Filters, Hit, Searcher

_SIGN = re.compile(r'"[^"]*"|(?:^|(?<=\s))[+-](?=\s|$)')
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True, order=True)
class Term:
    """One part of a query."""

    text: str
    """A sentence, or the path of a picture."""
    is_image: bool = False
    sign: int = 1

    def __str__(self) -> str:
        name = f"picture {self.text}" if self.is_image else self.text
        return name if self.sign > 0 else f"- {name}"


def parse(text: str) -> tuple[Term, ...]:
    """The sentences of a query with their signs, as they were written.

    Raises ValueError for a sign without anything to add or subtract, and for a blank query.
    """
    terms: list[Term] = []
    start, sign, signed = 0, 1, False
    for found in [*_SIGN.finditer(text), None]:
        if found is not None and found[0] not in ("+", "-"):
            continue
        end = len(text) if found is None else found.start()
        sentence = text[start:end].strip()
        if sentence:
            terms.append(Term(_unquoted(sentence), sign=sign))
        elif signed or (found is None and not terms):
            raise ValueError(
                f"The query {text!r} has a sign with nothing to add or subtract. Write it like 'horse + stripes - "
                "grass'; a sign that is meant as a letter goes into double quotes."
                if signed
                else "The query is blank. Write what to look for, like 'a dog running on the beach'."
            )
        if found is not None:
            start, sign, signed = found.end(), 1 if found[0] == "+" else -1, True
    return tuple(terms)


def _unquoted(sentence: str) -> str:
    """What stands between quotes that keep a sign from being one; other quotes are part of the sentence."""
    whole = _QUOTED.fullmatch(sentence)
    return whole[1].strip() if whole and re.search(r"(?:^|\s)[+-](?:\s|$)", whole[1]) else sentence


def terms_of(
    text: str | None,
    images: Sequence[str | os.PathLike[str]] = (),
    minus_images: Sequence[str | os.PathLike[str]] = (),
) -> tuple[Term, ...]:
    """The parts of a query of a text and pictures. Raises ValueError where nothing is looked for."""
    terms = parse(text) if text is not None else ()
    terms += tuple(Term(os.fspath(image), True) for image in images)
    terms += tuple(Term(os.fspath(image), True, -1) for image in minus_images)
    if not terms:
        raise ValueError("There is nothing to look for: give a sentence, or a picture.")
    if all(term.sign < 0 for term in terms):
        raise ValueError(
            f"The query only takes away ({', '.join(map(str, terms))}); say what to look for, like 'horse - grass'."
        )
    return terms


def search_terms(
    searcher: Searcher,
    terms: Sequence[Term],
    k: int = 10,
    *,
    candidates: int = CANDIDATES,
    exact: bool = False,
    filters: Filters | None = None,
    min_confidence: float | None = None,
) -> list[Hit]:
    """The `k` images with the highest sum; `Hit.parts` are in the order of `terms`, whose order changes nothing else.

    Raises ValueError for a `min_confidence` with anything but one sentence.
    """
    among: dict[str, Any] = {"candidates": candidates, "exact": exact, "filters": filters}
    if len(terms) == 1 and not terms[0].is_image:
        return searcher.search(terms[0].text, k, min_confidence=min_confidence, **among)
    if min_confidence is not None:
        raise ValueError("A confidence is known of one sentence alone; leave it out for sums and pictures.")
    order = sorted(range(len(terms)), key=lambda number: terms[number])  # sums of floats depend on it
    parts = [
        (searcher.part_of_image if terms[number].is_image else searcher.part_of_text)(
            terms[number].text, terms[number].sign
        )
        for number in order
    ]
    hits = searcher.search_parts(parts, k, **among)
    places = [order.index(number) for number in range(len(terms))]
    return [replace(hit, parts=tuple(hit.parts[place] for place in places) if hit.parts else ()) for hit in hits]
