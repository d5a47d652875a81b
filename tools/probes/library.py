"""`seps.Library`, `seps find` and `seps duplicates`."""

from __future__ import annotations

import io
from typing import Any

import seps
from probes.bench import Bench
from probes.fixtures import QUERIES, photos, store, trained
from probes.registry import probe


def library(bench: Bench) -> Any:
    """A library of the photos by the trained model."""
    return bench.once(
        "library",
        lambda: seps.Library(photos(bench), model=str(trained(bench) / "model"), store=bench.scratch / "own store"),
    )


def plain(bench: Bench, hits: Any) -> list[dict[str, Any]]:
    """Hits as values."""
    rows = [hit.as_dict() for hit in hits]
    return [
        {key: bench.clean(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows
    ]


@probe("library")
def search(bench: Bench) -> dict[str, Any]:
    """By sentences, with every option."""
    found = {query: plain(bench, library(bench).search(query)) for query in QUERIES}
    for name, options in {
        "exact": {"exact": True},
        "folder": {"folder": photos(bench) / "sub"},
        "after": {"since": "2020-09-15"},
        "before": {"until": "2020-09-20"},
        "size": {"min_size": 40},
        "confidence": {"min_confidence": 0.3},
        "few": {"candidates": 3},
    }.items():
        found[name] = plain(bench, library(bench).search(QUERIES[0], 5, **options))
    return found


@probe("library")
def similar(bench: Bench) -> dict[str, Any]:
    """By a file, bytes, a Pillow image and a hit."""
    from PIL import Image

    path = photos(bench) / "p003.png"
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    given = {"file": path, "bytes": path.read_bytes(), "image": picture}
    given["hit"] = library(bench).search(QUERIES[0])[0]
    return {name: plain(bench, library(bench).similar(value)) for name, value in given.items()}


@probe("library")
def explain(bench: Bench) -> dict[str, Any]:
    """Two hits explained: shares of words, the sheet."""
    found: dict[str, Any] = {}
    for hit in library(bench).search(QUERIES[0], 2):
        explained, sheet = hit.explain(), io.BytesIO()
        explained.image().save(sheet, "PNG")
        values = {"score": explained.score, "words": dict(explained.words), "sheet": sheet.getvalue()}
        found[hit.path.name] = values
    return found


@probe("library")
def hits(bench: Bench) -> dict[str, Any]:
    """What a hit knows: size, terms, thumbnail, image; and how a list of them shows itself."""
    found = library(bench).search(QUERIES[1], 3)
    return {
        "shown": bench.clean(repr(found)),
        "first": {
            "size": list(found[0].size),
            "good": found[0].good,
            "terms": dict(found[0].terms),
            "thumbnail": found[0].thumbnail(),
            "image": found[0].image().tobytes(),
        },
        "pictures": len(library(bench)),
    }


@probe("library")
def duplicates(bench: Bench) -> Any:
    """Groups of every kind."""
    found: dict[str, Any] = {}
    for kind in ("file", "picture", "near"):
        found[kind] = [group.as_dict() for group in library(bench).duplicates(kind=kind)]
    found["threshold"] = [group.as_dict() for group in library(bench).duplicates(threshold=0.999)]
    return found


@probe("library")
def vectors(bench: Bench) -> dict[str, Any]:
    """The exported vectors."""
    import pyarrow.parquet

    folder = bench.scratch / "vectors"
    library(bench).export("parquet", folder)
    (file,) = folder.glob("*.parquet")
    rows = sorted(pyarrow.parquet.read_table(file).to_pylist(), key=lambda row: row["path"])
    return {name: [row[name] for row in rows] for name in ("vector", "width", "height")}


@probe("library")
def closed(bench: Bench) -> Any:
    """A library over a store alone, without a bank."""
    place = store(bench, "plain", "--no-bank")
    return plain(bench, seps.Library(store=place).search(QUERIES[0]))


FINDS: dict[str, tuple[str, ...]] = {
    "sentence": ("a red square on the left .",),
    "sum": ("circle + red - green",),
    "dates": ("a square", "--since", "2020-09-15", "--until", "2020-09-20"),
    "by date": ("a square", "--sort", "oldest", "-k", "20"),
    "newest": ("a square", "--sort", "newest"),
    "confidence": ("a square", "--min-confidence", "0.2"),
    "unfolded": ("a square", "--no-fold", "-k", "20"),
    "exact": ("a square", "--exact"),
}


@probe("library", each=FINDS)
def find(bench: Bench, name: str) -> Any:
    """`seps find --json` in a folder that it indexes itself."""
    query, *options = FINDS[name]
    words = (query, photos(bench), "--model", trained(bench) / "model", "--device", "cpu", *options)
    return bench.seps("find", *words, "--json").json()


@probe("library")
def find_by_pictures(bench: Bench) -> dict[str, Any]:
    """Sentences with pictures added and subtracted."""
    words = (photos(bench), "--model", trained(bench) / "model", "--device", "cpu", "--json")
    first, second = photos(bench) / "p003.png", photos(bench) / "p008.png"
    return {
        "added": bench.seps("find", "a red circle", *words, "--image", first).json(),
        "subtracted": bench.seps("find", "a red circle", *words, "--minus-image", second).json(),
    }


@probe("library")
def find_printed(bench: Bench) -> dict[str, Any]:
    """The other forms of output."""
    words = ("a red square", photos(bench), "--model", trained(bench) / "model", "--device", "cpu")
    page = bench.scratch / "found.html"
    return {
        "text": bench.seps("find", *words).text(),
        "paths": bench.seps("find", *words, "--paths").out,
        "null": bench.seps("find", *words, "--null").out,
        "csv": bench.seps("find", *words, "--csv").out,
        "page": [bench.seps("find", *words, "--html", page).status, bench.clean(page.read_text(encoding="utf-8"))],
        "copies": _copied(bench, words),
    }


def _copied(bench: Bench, words: tuple[object, ...]) -> list[str]:
    target = bench.scratch / "copies"
    bench.seps("find", *words, "--copy-to", target, "-k", "3")
    return sorted(path.name for path in target.iterdir())
