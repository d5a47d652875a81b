"""What a query means: sentences and pictures that are added and subtracted.

    horse + stripes - grass

A `+` or `-` between spaces (or at the start, before a space) is a sign; "black-and-white" and "C++" stay words, and
so does what stands in double quotes: `"rock - paper" + scissors`. "beach without people" is read as `beach - people`.
One part alone is exactly the plain search for it, with the confidence of a sentence. Scores of different parts have
different scales, those of pictures above all, so beside other parts each is counted in standard deviations, and the
score of a picture v is their weighted mean:

    S(v) = sum over parts p of w_p sign_p z_p(v) / sum of all w_p,        z_p(v) = (s_p(v) - mean_p) / deviation_p

s_p is what a search for the part alone gives: of a sentence the model's score, plus what rare words of the description
add, minus the picture's level over the bank of background queries. The weights are 1, unless the page's slider says
otherwise. Mean and deviation are those of the `SAMPLE` pictures of the store that are nearest to each part, also to
what is subtracted, so that filters and the number of candidates change no score.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from seps.photos.search.searcher import CANDIDATES, Filters, Hit, Part, Searcher
from seps.photos.store.rows import Columns
from seps.photos.store.store import AT_ONCE

SAMPLE = 100
"""Pictures per part over which scores are standardised: those nearest to it."""

_SIGN = re.compile(r'"[^"]*"|(?:^|(?<=\s))[+-](?=\s|$)')
_WITHOUT = re.compile(r"\s+(?:without|with no)\s+(?:any\s+)?", re.IGNORECASE)
_BARE_SIGN = re.compile(r"(?:^|\s)[+-](?:\s|$)")
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
    """The sentences of a query with their signs, as they were written; "A without B" is A and minus B.

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
            terms += _without(sentence, sign)
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
    written = sum(found[0] in ("+", "-") for found in _SIGN.finditer(text))
    return f'Read as "{read}"; double quotes keep it one sentence.' if len(terms) > written + 1 else ""


def has_signs(text: str) -> bool:
    """Whether a text has a sign by which `parse` would add or subtract."""
    return any(found[0] in ("+", "-") for found in _SIGN.finditer(text))


def _unquoted(sentence: str) -> str:
    """What stands between quotes that keep a sign or a form from being one; other quotes are part of the sentence."""
    whole = _QUOTED.fullmatch(sentence)
    return whole[1].strip() if whole and (_WITHOUT.search(whole[1]) or _BARE_SIGN.search(whole[1])) else sentence


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
    """The `k` images with the highest S; `Hit.parts` are in the order of `terms`, whose order changes nothing else.

    Raises ValueError for a `min_confidence` with anything but one sentence.
    """
    if len(terms) == 1 and not terms[0].is_image:
        return searcher.search(
            terms[0].text, k, candidates=candidates, exact=exact, filters=filters, min_confidence=min_confidence
        )
    if min_confidence is not None:
        raise ValueError("A confidence is known of one sentence alone; leave it out for sums and pictures.")
    parts = [
        (searcher.part_of_image if term.is_image else searcher.part_of_text)(term.text, term.sign) for term in terms
    ]
    return search_combined(searcher, parts, k, candidates=candidates, exact=exact, filters=filters)


def search_combined(
    searcher: Searcher, parts: Sequence[Part], k: int = 10, weights: Sequence[float] | None = None, **among: Any
) -> list[Hit]:
    """As `search_terms`, for encoded parts with their weights w_p (default: 1 each); `among` as of `search_parts`.

    Raises ValueError for weights that are negative, or all zero.
    """
    if len(parts) == 1:
        return searcher.search_parts(parts, k, **among)
    scaled = standardised(searcher, parts, [1.0] * len(parts) if weights is None else weights)
    # Sums of floats depend on their order, and the order of the parts must change nothing.
    order = sorted(range(len(parts)), key=lambda number: _sorting_key(scaled[number]))
    hits = searcher.search_parts([scaled[number] for number in order], k, **among)
    places = [order.index(number) for number in range(len(parts))]
    return [replace(hit, parts=tuple(hit.parts[place] for place in places)) for hit in hits]


def standardised(searcher: Searcher, parts: Sequence[Part], weights: Sequence[float]) -> list[Part]:
    """The parts with `scale` and `middle`, which make of a part's score what it adds to S.

    A part that gives all pictures one score adds nothing. Raises ValueError for weights that are negative, or all zero.
    """
    total = math.fsum(weights)
    if min(weights) < 0 or not total > 0:
        raise ValueError(f"The weights of a query's parts are {list(weights)}; none may be negative, nor all zero.")
    scores: list[list[float]] = [[] for _ in parts]
    for images in _sample(searcher, parts):
        for own, part in zip(scores, parts, strict=True):
            terms = searcher.terms(images, part.found, part.described)
            model = searcher.scores(images, part.query, part.described)
            own += [score + sum(added.values()) for score, added in zip(model, terms, strict=True)]
    scaled = []
    for part, own, weight in zip(parts, scores, weights, strict=True):
        deviation = pstdev(own) if len(own) > 1 else 0.0
        scale = weight / total / deviation if deviation else 0.0
        scaled.append(replace(part, scale=scale, middle=fmean(own) if own else 0.0))
    return scaled


def _sample(searcher: Searcher, parts: Sequence[Part]) -> Iterator[Columns]:
    """The pictures nearest to each part, and those whose descriptions have most of its rare words; each once."""
    store, every = searcher.store, searcher.store.allowed(None)
    ids: set[str] = set()
    for part in parts:
        prior = searcher.prior() if part.described else None
        ids.update(store.nearest(part.vector.cpu().numpy(), SAMPLE, ["id"], every, prior).values("id"))
        ids.update(store.among(part.found.best(SAMPLE), every))
    ordered = sorted(ids)
    for start in range(0, len(ordered), AT_ONCE):
        yield store.select(ordered[start : start + AT_ONCE], ["id", *searcher.columns])


def _sorting_key(part: Part) -> tuple[Any, ...]:
    """Puts parts in one order, however they came; parts with one key add the same."""
    return part.described, part.sign, part.scale, part.middle
