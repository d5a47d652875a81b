"""Stores of every size and precision, of several folders, without a bank: columns, searches, explanations."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from probes.bench import DAY, Bench, columns
from probes.fixtures import QUERIES, photos, store, trained
from probes.registry import probe

OPTIONS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "full": ("--size", "full"),
    "small": ("--size", "small"),
    "tiny": ("--size", "tiny"),
    "without a bank": ("--no-bank",),
}


def made(bench: Bench, name: str) -> Path:
    """The store of these options."""
    return store(bench, name, *OPTIONS[name])


@probe("stores", each=OPTIONS)
def columns_of(bench: Bench, name: str) -> dict[str, Any]:
    """What is written: every column."""
    return columns(made(bench, name))


@probe("stores", each=OPTIONS)
def searches(bench: Bench, name: str) -> dict[str, Any]:
    """What is found by sentences and by a picture, with scores and confidence."""
    place, found = made(bench, name), dict[str, Any]()
    for query in QUERIES:
        found[query] = bench.seps("search", query, "--store", place, "--json", "-k", "14", "--no-fold").json()
    found["exact"] = bench.seps("search", QUERIES[0], "--store", place, "--json", "--exact").json()
    found["folded"] = bench.seps("search", QUERIES[1], "--store", place, "--json").json()
    picture = photos(bench) / "p003.png"
    found["picture"] = bench.seps("search", "--image", picture, "--store", place, "--json").json()
    return found


@probe("stores", each=OPTIONS)
def explanations(bench: Bench, name: str) -> dict[str, Any]:
    """What words and patches of two stored pictures add to the score, and the drawing."""
    place, found = made(bench, name), dict[str, Any]()
    for path in ("p004.png", "sub/same.png"):
        drawing = bench.scratch / "why.png"
        answer = bench.seps("explain", path, QUERIES[0], "--store", place, "--json", "-o", drawing)
        found[path] = {**answer.json(), "drawing": drawing.read_bytes()}
    return found


@probe("stores", each=("as it is", "tiny", "without a bank"))
def duplicates(bench: Bench, name: str) -> Any:
    """Groups of copies."""
    return bench.seps("duplicates", "--store", made(bench, name), "--json").json()


@probe("stores")
def filters(bench: Bench) -> dict[str, Any]:
    """Every filter of a search."""
    place, found = made(bench, "as it is"), dict[str, Any]()
    for words in (
        ("--folder", "sub"),
        ("--since", "2020-09-15"),
        ("--until", "2020-09-20"),
        ("--min-size", "40"),
        ("--min-confidence", "0.3"),
        ("--candidates", "3"),
    ):
        found[words[0]] = bench.seps("search", QUERIES[0], "--store", place, "--json", *words).json()
    return found


@probe("stores")
def several_folders(bench: Bench) -> dict[str, Any]:
    """A store of two folders, one of which joins it later, and one of which leaves it."""
    second = bench.folder("more")
    for number, name in enumerate(("p005.png", "p006.png")):
        shutil.copy(photos(bench) / name, second / f"more-{name}")
        os.utime(second / f"more-{name}", (DAY + number,) * 2)
    model = trained(bench) / "model"
    place = store(bench, "several", folder=photos(bench))
    words = ("--store", place, "--model", model, "--device", "cpu")
    bench.seps("index", second, *words, "--add")
    found = {"columns": columns(place), "status": bench.seps("index", "--store", place, "--status", "--json").json()}
    found["search"] = bench.seps("search", QUERIES[0], "--store", place, "--json").json()
    found["below"] = bench.seps("search", QUERIES[0], "--store", place, "--json", "--folder", second).json()
    bench.seps("index", "--store", place, "--remove-root", second)
    found["removed"] = bench.seps("search", QUERIES[0], "--store", place, "--json").json()
    bench.seps("index", second, *words, "--add")
    found["again"] = bench.seps("search", QUERIES[0], "--store", place, "--json").json()
    return found


@probe("stores")
def changes(bench: Bench) -> dict[str, Any]:
    """Pictures that are new, changed, moved and deleted; excluded ones; a forgotten description."""
    folder = bench.scratch / "changing"
    shutil.copytree(photos(bench), folder)
    place = store(bench, "changing", folder=folder)
    words = ("--store", place, "--model", trained(bench) / "model", "--device", "cpu", "--json")
    (folder / "p000.png").rename(folder / "moved.png")
    (folder / "p001.png").unlink()
    shutil.copy(folder / "p002.png", folder / "p003.png")
    shutil.copy(photos(bench) / "p007.png", folder / "new.png")
    for path in ("p003.png", "new.png"):
        os.utime(folder / path, (DAY + 5, DAY + 5))
    found = {"report": bench.seps("index", folder, *words, "--prune").json(), "columns": columns(place)}
    found["unchanged"] = bench.seps("index", folder, *words).json()
    found["excluded"] = bench.seps("index", folder, *words, "--exclude", "sub/", "--prune").json()
    bench.seps("index", "--store", place, "--forget-descriptions", "p005.png")
    found["forgotten"] = columns(place)
    found["verify"] = bench.seps("index", "--store", place, "--verify", "--json").json()
    bench.seps("index", "--store", place, "--compact")
    found["compact"] = bench.seps("search", QUERIES[0], "--store", place, "--json").json()
    return found


@probe("stores")
def shards(bench: Bench) -> dict[str, Any]:
    """Pictures in a tar shard."""
    import tarfile

    folder = bench.folder("shards")
    with tarfile.open(folder / "some.tar", "w") as shard:
        for number in range(4):
            shard.add(photos(bench) / f"p00{number}.png", arcname=f"{number}.png")
    os.utime(folder / "some.tar", (DAY, DAY))
    place = store(bench, "shards", folder=folder)
    return {
        "columns": columns(place),
        "search": bench.seps("search", QUERIES[0], "--store", place, "--json").json(),
    }


@probe("stores")
def printed(bench: Bench) -> dict[str, Any]:
    """What the commands print for people."""
    place = made(bench, "as it is")
    found = {
        "search": bench.seps("search", QUERIES[0], "--store", place).text(),
        "status": bench.seps("index", "--store", place, "--status").text(),
        "verify": bench.seps("index", "--store", place, "--verify").text(),
        "duplicates": bench.seps("duplicates", "--store", place).text(),
        "explain": bench.seps(
            "explain", "p004.png", QUERIES[0], "--store", place, "-o", bench.scratch / "x.png"
        ).text(),
    }
    page = bench.scratch / "duplicates.html"
    bench.seps("duplicates", "--store", place, "--html", page)
    found["page"] = hashlib.sha256(bench.clean(page.read_text(encoding="utf-8")).encode()).hexdigest()
    return found
