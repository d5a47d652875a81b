"""How often `seps index --ocr` reports text in photos, raw and after its cut-off.

    python -m benchmarks.quality.ocr --gallery --out gallery.jsonl
    python -m benchmarks.quality.ocr --data dev.jsonl --photos 200 --out dev.jsonl --json docs/results/ocr-dev.json

`--out` keeps the lines of each photo as they come, so that a run continues. Look at the photos that are left: the
figures do not say whether the text is there.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from importlib.resources import files
from pathlib import Path

import torch

from benchmarks.common.machine import describe
from seps.images.ocr import LEAST_CONFIDENCE, SHORTEST, TextReader, is_text
from seps.images.shards import read_source
from seps.images.sources import ImageSource
from seps.retrieval.data import load_jsonl


def main() -> None:
    """Print what is left per photo, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gallery", action="store_true", help="the shipped photos")
    where.add_argument("--data", help="JSONL of photos")
    parser.add_argument("--photos", type=int, default=200, help="drawn from the data (default: 200)")
    parser.add_argument("--out", type=Path, required=True, help="file for the lines of each photo")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args()
    if options.gallery:
        sources = [ImageSource(path) for path in sorted(Path(str(files("seps"))).glob("assets/gallery/*.jpg"))]
    else:
        sources = [record.source for record in load_jsonl(options.data).records]
        sources = random.Random(0).sample(sources, min(options.photos, len(sources)))
    found = read(sources, options.out)
    kept = {name: [line for line, sure in lines if is_text(line, sure)] for name, (lines, _) in found.items()}
    for name, lines in kept.items():
        if lines:
            print(name, *lines, sep=" | ")
    facts = {
        "photos": len(found),
        "raw": sum(bool(lines) for lines, _ in found.values()),
        "kept": sum(map(bool, kept.values())),
        "least_confidence": LEAST_CONFIDENCE,
        "shortest": SHORTEST,
        "seconds": round(sum(seconds for _, seconds in found.values()) / max(1, len(found)), 2),
        "machine": describe(torch.device("cpu")),
    }
    print(json.dumps(facts))
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read(sources: list[ImageSource], out: Path) -> dict[str, tuple[list[tuple[str, float]], float]]:
    """Lines and seconds of each photo by its name; those that `out` has are not read again."""
    found = {}
    if out.exists():
        for row in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
            found[row["name"]] = ([(line, sure) for line, sure in row["lines"]], row["seconds"])
    reader = TextReader()
    names = {source.member or source.path.name: source for source in sources}
    with out.open("a", encoding="utf-8") as page:
        for name, source in names.items():
            if name in found:
                continue
            data, start = read_source(source), time.perf_counter()
            found[name] = (reader.lines(data, source), time.perf_counter() - start)
            page.write(json.dumps({"name": name, "lines": found[name][0], "seconds": found[name][1]}) + "\n")
            page.flush()
    return {name: found[name] for name in names}


if __name__ == "__main__":
    main()
