"""Explanations of a store's images: found by path or id, with the score that the store's search gives them."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from seps.images.decoding import resized_jpeg
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import row_id
from seps.photos.search.results import sources_of
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from seps.retrieval.engine.engine import Photo
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.languages import words_of

FACTS = ("id", "path", "member", "size", "mtime", "sha256", "width", "height", "dense", "sources", "ocr")
ROUNDING = 1e-5
"""The score of an image depends on the others of its batch by a few 1e-7; more is another score."""
_ID = re.compile(r"([0-9a-f]{20})(?:-[0-9a-f]{12})?")


class StoredExplainer:
    """Explains images of one store. Raises ValueError for an engine whose scores cannot be split among patches."""

    def __init__(self, searcher: Searcher) -> None:
        if reason := searcher.engine.traits.explains:
            raise ValueError(reason)
        self.searcher = searcher

    def explain(
        self, identity: str, text: str, shown: float | None = None
    ) -> tuple[Explanation, dict[str, Any]] | None:
        """The explanation of one image, and its row (`FACTS`); None where the store has no such id.

        The score is the exact score of the search. Where a search has `shown` a score that differs from it only by
        rounding, the explanation has that score, digit by digit.
        """
        searcher = self.searcher
        facts = (*FACTS, "thumbnail")
        images = searcher.store.select([identity], [*facts, *searcher.columns])
        if not len(images):
            return None
        (row,) = images.rows(facts)
        explanation = searcher.engine.explain(
            text, row["dense"], lambda: indexed_photo(searcher, row), stored=searcher.pictures(images)
        )
        part = searcher.part_of_text(text)
        ((score, terms),) = searcher.scored(images, part)
        words, added = part.matches, sum(terms.values())
        score += added
        if shown is not None and abs(shown - score) <= ROUNDING:
            score = shown
        each = {word: searcher.engine.traits.score_unit * words.words[word] for word in words.found.get(row["id"], ())}
        level, every = terms.get("background", 0.0), {**explanation.terms, **terms}
        sources, text = sources_of(row["sources"], row["ocr"]), row["ocr"] or ""
        in_picture = sorted(set(each) & set(words_of(text)))
        explanation = replace(explanation, score=score, terms=every, added=added, background=level, found_words=each)
        return replace(explanation, described_by=sources, text_in_picture=text, words_in_picture=in_picture), row


def kept_patches(searcher: Searcher, identity: str, text: str) -> dict[str, Any] | None:
    """Which patches a sentence keeps, or its words choose: `grid`, `kept` per cell of it, row by row, and a `note`.

    A kept cell is "1", another "0". None where the store has no such image.
    Raises ValueError for a model that selects no patches.
    """
    if not searcher.engine.traits.selects_patches:
        raise ValueError("The model of this store selects no patches.")
    facts = (*FACTS, "thumbnail")
    images = searcher.store.select([identity], [*facts, *searcher.columns])
    if not len(images):
        return None
    (row,) = images.rows(facts)
    files: list[Photo] = []

    def photo() -> Photo:
        files.append(indexed_photo(searcher, row))
        return files[0]

    explanation = searcher.engine.explain(text, row["dense"], photo, stored=searcher.pictures(images))
    kept = "".join("1" if cell else "0" for cell in explanation.kept)
    return {"grid": explanation.grid, "kept": kept, "note": "".join(file.note for file in files)}


def indexed_photo(searcher: Searcher, row: Mapping[str, Any]) -> Photo:
    """The file of an image while it is what was indexed, else the store's thumbnail."""
    source = searcher.image_source(row)
    try:
        data = read_source(source)
        if hashlib.sha256(data).hexdigest() == row["sha256"]:
            return Photo(data, source)
        why = "it was written again after it was indexed"
    except UnreadableImage as error:
        why = error.why.rstrip(".")
    note = f"The file cannot be used ({why}): what patches add is that of the store's thumbnail."
    return Photo(bytes(row["thumbnail"]), source, note)


def photo_to_draw(searcher: Searcher, row: dict[str, Any], longest: int) -> tuple[bytes, str]:
    """A JPEG to draw an explanation on, and a note: the file's while it is what was indexed, else the thumbnail.

    `row` holds path, member, sha256 and thumbnail.
    """
    source = searcher.image_source(row)
    try:
        data = read_source(source)
        if hashlib.sha256(data).hexdigest() == row["sha256"]:
            return resized_jpeg(data, source, longest), ""
        why = "The file was changed after it was indexed"
    except UnreadableImage as error:
        why = f"The file cannot be read ({error.why.rstrip('.')})"
    return bytes(row["thumbnail"]), f"{why}; the store's thumbnail is drawn instead."


def find_image(store: Store, name: str) -> str:
    """The id of the image that `name` means: an id, a path in the indexed folder or to a file of it, `shard:member`
    or `video @ time`.

    Raises StoreError where the store has no such image.
    """
    known = _ID.fullmatch(name)
    candidates = [known[1]] if known else []
    candidates += [row_id(path, member) for path, member in _places(store.settings.root, name)]
    for identity in dict.fromkeys(candidates):
        if store.get(identity, ["id"]) is not None:
            return identity
    raise StoreError(
        f"The store {store.location} has no image {name!r}. Give its path as seps search shows it, or its id; pictures "
        "that are new require seps index first."
    )


def _places(root: str, name: str) -> Iterator[tuple[str, str | None]]:
    """What `name` can mean: (path below `root`, member)."""
    for text in dict.fromkeys([name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)]):
        for path, member in [(text, None), *_members(text)]:
            yield os.path.normpath(path).replace(os.sep, "/"), member
            real = Path(os.path.realpath(path))
            if real.is_relative_to(root):
                yield real.relative_to(root).as_posix(), member
            else:  # of another folder of the store
                yield real.as_posix(), member


def _members(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"\.tar:", text, re.IGNORECASE):
        yield text[: match.end() - 1], text[match.end() :]
    path, at, code = text.rpartition(" @ ")
    if at:
        yield path, code
