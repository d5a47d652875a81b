"""Queries whose form says something: "beach without people", "two dogs", "child on swing".

    seps index FOLDER --store STORE                 # the photos of --data, without their descriptions
    python -m benchmarks.quality.typed_forms --store STORE --data dev.jsonl

Nouns are those that the rules of `seps.retrieval.data.typed` find in the captions. Each form is searched in several
ways, and all ways of a row are counted against the same right photos, among the ten best:

- "A without B": right where a caption has A and none has B. Read as `A - B`, which is what the product does; as one
  sentence; and as A alone. The pairs are the `PAIRS` with most photos of both, at most `PER_NOUN` per A.
- counts, "two dogs": right where a caption says so. Beside it "dogs", which asks for no number.
- relations, "child on swing": right where a caption says so. Beside it "child swing" and "swing on child".
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.quality.typed import LEAST, name
from seps.photos import Searcher
from seps.photos.search.query import Query, parse
from seps.photos.search.ranking import rank
from seps.retrieval.data import RetrievalDataset, load_jsonl
from seps.retrieval.data.typed import sentences_of
from seps.retrieval.data.typed.captions import keys_of
from seps.retrieval.data.typed.words import plural, tokens, vocabulary

SHOWN = 10
LEAST_RELATION = 5
"""Photos that are right for a relation; for the others `LEAST`, and for A without B also so many of both."""
PAIRS, PER_NOUN = 60, 4
PEOPLE = frozenset(["man", "woman", "boy", "girl", "child", "kid", "person", "people", "group", "crowd"])
SAME = frozenset(("bike", "bicycle"))
"""Of these nouns no two make a pair: each may stand for another."""
NUMBERS = ("two", "three", "four", "five")
Row = tuple[tuple[str, ...], set[str]]
"""What is searched for, in several ways, and the names of the photos that are right."""


def without(words: dict[str, set[str]]) -> Iterator[tuple[Row, set[str]]]:
    """Rows of "A without B", and the photos of both, from the photos of each noun."""
    pairs = [(a, b, words[a] - words[b], words[a] & words[b]) for a in sorted(words) for b in sorted(words) if a != b]
    pairs = [
        pair
        for pair in pairs
        if min(len(pair[2]), len(pair[3])) >= LEAST and not any({*pair[:2]} <= same for same in (PEOPLE, SAME))
    ]
    taken = Counter[str]()
    for a, b, right, both in sorted(pairs, key=lambda pair: (-len(pair[3]), pair[:2])):
        if taken[a] < PER_NOUN and taken.total() < PAIRS:
            taken[a] += 1
            yield ((f"{a} without {b}", f'"{a} without {b}"', a), right), both


def counts(said: dict[str, list[str]], nouns: dict[str, str]) -> Iterator[Row]:
    """Rows of a number and a noun."""
    found = defaultdict[tuple[str, str], set[str]](set)
    for photo, every in said.items():
        for sentence in every:
            words = tokens(sentence)
            for place, word in enumerate(words):
                # "two dogs", "two brown dogs"
                after = [nouns[one] for one in words[place + 1 : place + 3] if one in nouns]
                if word in NUMBERS and after:
                    found[word, after[0]].add(photo)
    for (number, noun), photos in sorted(found.items()):
        if len(photos) >= LEAST:
            yield (f"{number} {plural(noun)}", plural(noun)), photos


def relations(pairs: dict[tuple[str, str, str], set[str]]) -> Iterator[Row]:
    """Rows of two nouns with a preposition."""
    for (first, between, second), photos in sorted(pairs.items()):
        if len(photos) >= LEAST_RELATION:
            yield (f"{first} {between} {second}", f"{first} {second}", f"{second} {between} {first}"), photos


def found(searcher: Searcher, text: str) -> list[str]:
    """The names of the best photos for what is typed."""
    return [name(hit) for hit in rank(searcher, Query(parse(text), k=SHOWN), {})]


def share(searcher: Searcher, text: str, photos: set[str]) -> float:
    """Per cent of the best that are among some photos."""
    return 100 * fmean(photo in photos for photo in found(searcher, text))


def print_rows(searcher: Searcher, title: str, rows: Sequence[Row]) -> None:
    """Print how many are right, way by way."""
    for texts in zip(*(row[0] for row in rows), strict=True):
        right = fmean(share(searcher, text, row[1]) for text, row in zip(texts, rows, strict=True))
        print(f"| {title}, like {texts[0]} | {len(rows)} | {right:.1f} % |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.typed_forms", description=__doc__)
    parser.add_argument("--store", required=True, help="store of the photos of --data")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with captions")
    options = parser.parse_args()
    dataset, searcher = load_jsonl(options.data), Searcher(options.store)
    said, known, keys = read(dataset)
    print(f"{searcher.store.settings.model} on {options.data.name}: {len(said)} photos\n")
    rows = list(without({key[1]: photos for key, photos in keys.items() if key[0] == "word" and key[1] in known}))
    print("| A without B | number | A and not B of ten | A and B of ten |\n|---|---|---|---|")
    for way, title in enumerate(("read as A - B", "as one sentence", "A alone")):
        right = fmean(share(searcher, texts[way], photos) for (texts, photos), _ in rows)
        wrong = fmean(share(searcher, texts[way], both) for (texts, _), both in rows)
        print(f"| {title} | {len(rows)} | {right:.1f} % | {wrong:.1f} % |", flush=True)
    print("\n| counts and relations | number | right of ten |\n|---|---|---|")
    print_rows(searcher, "counts", list(counts(said, known)))
    pairs = {(key[1], key[2], key[3]): photos for key, photos in keys.items() if key[0] == "pair"}
    print_rows(searcher, "relations", list(relations(pairs)))


def read(dataset: RetrievalDataset) -> tuple[dict[str, list[str]], dict[str, str], dict[tuple[str, ...], set[str]]]:
    """What is said of each photo; the nouns of that with their singular; the photos of each key of a query."""
    said = {record.id: sentences_of(record) for record in dataset.records}
    known = vocabulary(sentence for every in said.values() for sentence in every)
    keys = defaultdict[tuple[str, ...], set[str]](set)
    for photo, every in said.items():
        for key in {key for sentence in every for key in keys_of(sentence, known)}:
            keys[key].add(photo)
    return said, known.nouns, keys


if __name__ == "__main__":
    main()
