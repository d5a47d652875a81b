"""Training captions that name small things: of each photo the two sentences that name the most of them.

    python benchmarks/named_captions.py TRAIN.jsonl NAMED.jsonl

Sentences of `captions` and `dense` are ordered by how many words of small_things.txt they hold, then by their length;
the first two become the photo's captions, the others go. For `benchmarks/selection_rows.py --data NAMED.jsonl`: what a
row wins or loses must be read against the other rows on the same file, because fewer sentences teach less.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from seps.files import write_text
from seps.retrieval.data.batches import sentences

SMALL_THINGS = frozenset(Path(__file__).with_name("small_things.txt").read_text(encoding="utf-8").split())
KEPT = 2


def richness(sentence: str) -> tuple[int, int]:
    """How many small things a sentence names, and its length in words."""
    words = re.findall(r"[a-z]+", sentence.lower())
    return sum(word in SMALL_THINGS for word in words), len(words)


def named(record: dict[str, object]) -> dict[str, object]:
    """The record with its richest sentences alone, in the order in which they came."""
    captions, dense = record["captions"], record.get("dense") or ""
    assert isinstance(captions, list) and isinstance(dense, str)
    pool = list(dict.fromkeys([*captions, *sentences(dense)]))
    kept = sorted(pool, key=richness, reverse=True)[:KEPT]
    rest = {name: value for name, value in record.items() if name != "dense"}
    return {**rest, "captions": [sentence for sentence in pool if sentence in kept]}


def main() -> None:
    """Write the file, and say how many captions name a small thing before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="JSONL file to read")
    parser.add_argument("named", type=Path, help="JSONL file to write, beside the photos' shards")
    options = parser.parse_args()
    if options.named.exists():
        parser.error(f"{options.named} exists; name another file, it is not overwritten")
    records = [json.loads(line) for line in options.train.read_text(encoding="utf-8").splitlines()]
    made = [named(record) for record in records]
    write_text(options.named, "".join(json.dumps(record) + "\n" for record in made))
    for label, part in (("before", records), ("after", made)):
        captions = [caption for record in part for caption in record["captions"]]
        share = sum(richness(caption)[0] > 0 for caption in captions) / len(captions)
        print(f"{label}: {len(captions):,} captions, {share:.0%} of them name a small thing")


if __name__ == "__main__":
    main()
