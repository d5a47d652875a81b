"""The shipped models on pictures that ship with the package: the numbers that a user sees first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from probes.bench import Bench, columns, keep_times
from probes.registry import Gone, probe

MODELS = ("base", "mini")
QUERIES = ("a cup of coffee", "two dogs playing in a field", "the sea")


def gallery(bench: Bench) -> Path:
    """The first twelve of the shipped pictures, with their captions and descriptions."""

    def make() -> Path:
        found = sorted((bench.tree / "src/seps").rglob("gallery.jsonl"))
        if not found:
            raise Gone("The package ships no gallery.jsonl.")
        folder = bench.folder("gallery")
        lines = found[0].read_text(encoding="utf-8").splitlines()[:12]
        (folder / "gallery.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for picture in sorted(found[0].parent.glob("*.jpg")):
            if any(f'"{picture.name}"' in line for line in lines):
                shutil.copy(picture, folder / picture.name)
        list(keep_times(folder))
        return folder

    return bench.once("gallery", make)


def indexed(bench: Bench, model: str) -> Path:
    """The store of these pictures."""

    def make() -> Path:
        place = bench.scratch / f"store {model}"
        bench.seps("index", gallery(bench), "--store", place, "--model", model, "--device", "cpu")
        return place

    return bench.once(f"store {model}", make)


@probe("pictures", each=MODELS)
def search(bench: Bench, model: str) -> dict[str, Any]:
    """The store and what is found in it."""
    place = indexed(bench, model)
    found: dict[str, Any] = {"columns": columns(place)}
    for query in QUERIES:
        found[query] = bench.seps("search", query, "--store", place, "--json").json()
    found["another language"] = bench.seps("search", "ein Hund im Gras", "--store", place).text()
    return found


@probe("pictures", each=MODELS)
def explanation(bench: Bench, model: str) -> dict[str, Any]:
    """Of a file and of a stored picture, with the drawing."""
    picture, drawing = sorted(gallery(bench).glob("*.jpg"))[0], bench.scratch / "why.png"
    words = ("a smiling astronaut", "--json", "-o", drawing)
    file = bench.seps("explain", picture, *words, "--model", model).json()
    found = {"file": file, "drawing": drawing.read_bytes()}
    found["stored"] = bench.seps("explain", picture.name, *words, "--store", indexed(bench, model)).json()
    described = bench.seps("explain", picture, *words, "--model", model, "--dense", "A woman in an orange suit.")
    return {**found, "described": described.json()}


@probe("pictures", each=MODELS)
def figures(bench: Bench, model: str) -> dict[str, Any]:
    """`seps eval` with its options."""
    words = ("--model", model, "--data", gallery(bench) / "gallery.jsonl", "--device", "cpu", "--json", "-")
    found = {protocol: bench.seps("eval", *words, "--protocol", protocol).json() for protocol in ("none", "image")}
    found["words"] = bench.seps("eval", *words, "--words", "8").json()
    found["lexical"] = bench.seps("eval", *words, "--lexical").json()
    found["weight"] = bench.seps("eval", *words, "--description-weight", "0.5").json()
    found["bank"] = bench.seps("eval", *words, "--bank").json()
    return found


@probe("pictures")
def printed(bench: Bench) -> dict[str, Any]:
    """The table of `seps eval` and of `seps search`."""
    return {
        "eval": bench.seps("eval", "--data", gallery(bench) / "gallery.jsonl", "--device", "cpu").text(),
        "search": bench.seps("search", "a cat", "--store", indexed(bench, "base"), "-k", "3").text(),
    }
