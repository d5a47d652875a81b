"""Draw the bank of background queries that ships with the package: src/seps/assets/bank/sentences.txt.

    python tools/bank.py train.jsonl [--count 1564]

One caption each of photos of a training set, drawn with a fixed seed. They must not be captions of a set that is
measured: the bank would then know its queries.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "src" / "seps" / "assets" / "bank" / "sentences.txt"
WORDS = range(4, 19)
"""Lengths in words: longer captions cost more to encode, shorter ones say too little."""


def drawn(file: Path, count: int) -> list[str]:
    """`count` captions, each of another photo, without doubles. Raises ValueError where there are too few."""
    draw = random.Random(0)
    lines = [json.loads(line)["captions"] for line in file.read_text(encoding="utf-8").splitlines()]
    draw.shuffle(lines)
    found: dict[str, None] = {}
    for captions in lines:
        text = " ".join(draw.choice(captions).split())
        if len(text.split()) in WORDS and text.isascii() and len(found) < count:
            found[text] = None
    if len(found) < count:
        raise ValueError(f"{file} gives {len(found)} captions, not {count}.")
    return list(found)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, default=1564)
    options = parser.parse_args()
    lines = drawn(options.data, options.count)
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} sentences: {OUT}")


if __name__ == "__main__":
    main()
