"""Texts of drawn shots, as a describer writes them that sees part of the figure and errs at times.

They are made from the identity's code, not from the pixels: they are there to try `model.text`, and figures with them
say nothing about texts of a real model. Each shot has a text of its own: what it mentions, in which order, and where it
errs, are drawn for the shot alone, and no two texts of an identity are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seps.files import write_text
from seps.synthetic.people import ATTRIBUTES, Code, draw_codes
from seps.synthetic.world import Shot, SyntheticConfig, plan_shots

FILE = "texts.jsonl"
MENTIONED, MISTAKEN, MISTAKEN_AT_NIGHT = 0.6, 0.08, 0.25
_STREAM = 64
_COLOURS = ("red", "orange", "yellow", "green", "teal", "blue", "purple", "white", "grey", "black")
_LOWER = (9, 5, 8, 1, 3, 7)
_BUILDS, _SLEEVES, _HATS = ("slim", "medium", "heavy"), ("long sleeves", "short sleeves"), ("", "a cap", "a red hat")
_LEGWEAR = ("long trousers", "shorts", "a skirt")
_BAGS = ("", "a backpack", "a shoulder bag", "a hand bag")
_PRINTS = ("", "a badge on the chest", "a checked front", "a striped front")
_HAIR = ("black hair", "brown hair", "long fair hair")


def write_texts(folder: Path | str, manifest: Mapping[str, Any]) -> Path:
    """Write texts.jsonl beside the pictures of a finished set, a line per shot; the same manifest, the same bytes."""
    parameters = dict(manifest["parameters"])
    config = SyntheticConfig(**{**parameters, "size": tuple(parameters["size"])})
    lines = [
        json.dumps({"image": f"{shot.split}/RGB/{shot.name}.jpg", "dense": text}) + "\n"
        for shot, text in texts_of(config)
    ]
    file = Path(folder) / FILE
    write_text(file, "".join(lines))
    return file


def texts_of(config: SyntheticConfig) -> list[tuple[Shot, str]]:
    """Every shot of the set with its text, in the order of the plan."""
    codes = draw_codes(config.identities, config.generator(0))
    written: dict[int, set[str]] = {}
    found = []
    for shot in plan_shots(config):
        rng = config.generator(_STREAM, shot.identity, shot.number)
        earlier = written.setdefault(shot.identity, set())
        text = describe(codes[shot.identity], rng, night=shot.scene % 2 == 1)
        while text in earlier:
            text = describe(codes[shot.identity], rng, night=shot.scene % 2 == 1)
        earlier.add(text)
        found.append((shot, text))
    return found


def describe(code: Code, rng: np.random.Generator, *, night: bool) -> str:
    """One text: some attributes in any order, some of them mistaken, colours more often at night."""

    def seen(name: str, rate: float = MISTAKEN) -> int:
        wrong = rng.random() < rate
        return int(rng.integers(ATTRIBUTES[name])) if wrong else code[name]

    colours = MISTAKEN_AT_NIGHT if night else MISTAKEN
    clauses = [
        f"the top is {_COLOURS[seen('upper_colour', colours)]}",
        f"{_LEGWEAR[seen('legwear')]} in {_COLOURS[_LOWER[seen('lower_colour', colours)]]}",
        _SLEEVES[seen("sleeves")],
        _BAGS[seen("bag")] or "no bag",
        _HATS[seen("hat")] or "no hat",
        _HAIR[seen("hair")],
        f"a {_BUILDS[seen('build')]} build",
        _PRINTS[seen("print")] or "a plain front",
    ]
    mentioned = [clause for clause in clauses if rng.random() < MENTIONED] or clauses[:1]
    ordered = [mentioned[int(index)] for index in rng.permutation(len(mentioned))]
    return f"A person: {', '.join(ordered)}."
