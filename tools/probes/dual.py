"""Dual encoders of every family: evaluated, indexed, searched, explained."""

from __future__ import annotations

from typing import Any

from probes.bench import Bench, columns
from probes.fixtures import QUERIES, dual, photos, scenes, store
from probes.registry import probe

FAMILIES = ("clip", "siglip", "siglip2", "siglip2-free", "chinese_clip", "altclip")


@probe("dual", each=FAMILIES)
def search(bench: Bench, family: str) -> dict[str, Any]:
    """The store, and what is found by sentences and a picture."""
    place = store(bench, family, model=dual(family))
    found: dict[str, Any] = {"columns": columns(place)}
    for query in QUERIES:
        found[query] = bench.seps("search", query, "--store", place, "--json").json()
    found["picture"] = bench.seps("search", "--image", photos(bench) / "p003.png", "--store", place, "--json").json()
    found["copies"] = bench.seps("duplicates", "--store", place, "--json").json()
    return found


@probe("dual", each=FAMILIES)
def figures(bench: Bench, family: str) -> Any:
    """`seps eval`, with and without the correction by background queries."""
    words = ("eval", "--model", dual(family), "--data", scenes(bench)[1], "--device", "cpu", "--protocol", "none")
    found = {
        name: bench.seps(*words, *more, "--json", "-").json() for name, more in (("plain", ()), ("bank", ("--bank",)))
    }
    for one in found.values():
        del one["model"]  # a folder with another name in every run
    return found


@probe("dual", each=("clip", "siglip2"))
def explanation(bench: Bench, family: str) -> dict[str, Any]:
    """Of a picture, and of one in a store."""
    place = store(bench, family, model=dual(family))
    stored = bench.seps("explain", "p004.png", QUERIES[0], "--store", place, "--json").json()
    picture = photos(bench) / "p004.png"
    return {
        "stored": stored,
        "file": bench.seps("explain", picture, QUERIES[0], "--model", dual(family), "--json").json(),
    }


@probe("dual")
def without_a_bank(bench: Bench) -> dict[str, Any]:
    """Plain cosines."""
    place = store(bench, "clip plain", "--no-bank", model=dual("clip"))
    return {query: bench.seps("search", query, "--store", place, "--json").json() for query in QUERIES}


@probe("dual")
def find(bench: Bench) -> Any:
    """`seps find` by a sum."""
    words = ("circle + red - green", photos(bench), "--model", dual("clip"), "--device", "cpu", "--json")
    return bench.seps("find", *words).json()
