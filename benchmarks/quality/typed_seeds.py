"""Right of ten of nouns and phrases, for several text sides over one store: seeds of a training, and their mean.

    seps index FOLDER --store STORE                 # the photos of --data, without their descriptions
    python -m benchmarks.quality.typed_seeds --store STORE --data dev.jsonl base runs/typed-0 runs/typed-1 runs/typed-2

The queries and what is right for them are those of `benchmarks.quality.typed`; every picture is scored, so no search
vector chooses candidates. Mean and standard deviation are those of the models after the first, which stands for what
is shipped, or for what the training began with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from benchmarks.quality.typed import LEAST, noun_forms, phrase_forms
from seps.photos import Searcher
from seps.photos.search.results import SHOWN
from seps.retrieval.data import RetrievalDataset, load_jsonl

GROUPS = ('"dog"', '"a dog"', '"red car"', '"a red car"')
Asked = tuple[str, set[str]]
"""A query, and the names of the photos that are right for it."""


def queries(dataset: RetrievalDataset) -> dict[str, list[Asked]]:
    """The queries of each group: nouns and phrases, without and with articles."""
    nouns = [(texts, right) for texts, right in noun_forms(dataset) if len(right) >= LEAST]
    phrases = [(texts, right) for texts, right in phrase_forms(dataset) if len(texts[0].split()) == 2]
    some = [nouns, nouns, phrases, phrases]
    return {
        group: [(texts[place % 2], right) for texts, right in both if len(texts) > place % 2]
        for place, (group, both) in enumerate(zip(GROUPS, some, strict=True))
    }


@torch.no_grad()
def precision(searcher: Searcher, groups: dict[str, list[Asked]]) -> list[float]:
    """Per cent right of the ten best, by group."""
    texts = list(dict.fromkeys(text for some in groups.values() for text, _ in some))
    encoded = searcher.engine.encode_texts(texts)
    (strength,) = {searcher.part_of_text(text).strength for text in texts}
    found, names = [], []
    for images in searcher.store.scan([*SHOWN, *searcher.columns], searcher.store.allowed(None)):
        found.append(searcher.query_scores(images, encoded, strength))
        places = zip(images.values("member"), images.values("path"), strict=True)
        names += [member or Path(path).name for member, path in places]
    best = torch.cat(found).topk(min(10, len(names)), dim=0).indices.T.tolist()
    ten = {text: [names[place] for place in row] for text, row in zip(texts, best, strict=True)}
    return [
        100 * fmean(fmean(photo in right for photo in ten[text]) for text, right in some) for some in groups.values()
    ]


def row(name: str, values: Sequence[float]) -> str:
    """A line of the table."""
    return f"| {name} | " + " | ".join(f"{value:.1f} %" for value in values) + " |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.typed_seeds", description=__doc__)
    parser.add_argument("--store", required=True, help="store of the photos of --data")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with captions")
    parser.add_argument("models", nargs="+", help="text sides of one picture side: names, folders or runs")
    options = parser.parse_args()
    groups = queries(load_jsonl(options.data))
    print("| model | " + " | ".join(f"{group}, {len(some)}" for group, some in groups.items()) + " |")
    print("|---" * (1 + len(groups)) + "|")
    rows = []
    for name in options.models:
        rows.append(precision(Searcher(options.store, name), groups))
        print(row(name, rows[-1]), flush=True)
    if len(seeds := list(zip(*rows[1:], strict=True))) and len(rows) > 2:
        print(row(f"mean of {len(rows) - 1}", [fmean(values) for values in seeds]))
        print(row("standard deviation", [stdev(values) for values in seeds]))


if __name__ == "__main__":
    main()
