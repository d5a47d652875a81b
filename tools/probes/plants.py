"""Small faults, each of which its area must see: `tools/identity.py planted` plants one at a time in a copy of `src`.

A plant is found by its text in any file of `src`, so that files may move. Where its text is gone it fits nowhere, which
is a failure too: give the area another one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plant:
    """A fault: what it is, the text that is replaced, and the probes that must see it."""

    about: str
    old: str
    new: str
    probes: tuple[str, ...]


PLANTS = (
    Plant(
        "min-max normalisation of a guide",
        "/ (high - low + 1e-8)",
        "/ (high - low + 1e-5)",
        ("scores/scores default", "scores/gradients default", "heads/losses slimming"),
    ),
    Plant(
        "slope of the leaky cosine",
        "rows, columns = F.leaky_relu(rows, 0.1)",
        "rows, columns = F.leaky_relu(rows, 0.1001)",
        ("published/parts",),
    ),
    Plant(
        "weight of the predictor beside the other sensors",
        "self.predictor_weight = 1 - (len(modalities) - 1) * beta",
        "self.predictor_weight = 1.001 - (len(modalities) - 1) * beta",
        (
            "sensors/module default",
            "modules/numbers annotated en",
            "modules/numbers annotated zh",
            "reid/losses default",
        ),
    ),
    Plant(
        "cosine schedule of the learning rate",
        "low + (1 - low) * 0.5 * (1 + math.cos",
        "low + (1 - low) * 0.4999 * (1 + math.cos",
        ("training/run default", "training/run triplet", "training/run average"),
    ),
    Plant(
        "softmax of a baseline's attention",
        "scores = F.normalize(F.leaky_relu(cosines, 0.1), dim=3)",
        "scores = F.normalize(F.leaky_relu(cosines, 0.11), dim=3)",
        ("heads/losses scan-t2i", "heads/figures scan-t2i", "heads/search scan-t2i"),
    ),
    Plant(
        "cells of the smallest size",
        '"tiny": PatchSize("int2", means=2, words=5)',
        '"tiny": PatchSize("int2", means=3, words=5)',
        ("stores/columns of tiny", "stores/searches tiny"),
    ),
    Plant(
        "which pictures a folder holds",
        'if path.startswith(f"{root}/")), key=len',
        'if path.startswith(f"{root}//")), key=len',
        ("stores/several folders",),
    ),
    Plant(
        "level of the background where there is none",
        "if images.levels is None:\n            return None",
        "if images.levels is None:\n            return [0.1] * len(images.ids)",
        ("dual/without a bank", "stores/searches without a bank"),
    ),
    Plant(
        "weights of the parts of a query",
        "scale = weight / total / deviation",
        "scale = weight / total / deviation * 1.0001",
        ("library/find sum", "library/find by pictures"),
    ),
    Plant(
        "words that an explanation sums up",
        "values[part.word] = values.get(part.word, 0.0) + part.contribution",
        "values[part.word] = values.get(part.word, 0.0) - part.contribution",
        ("library/explain",),
    ),
    Plant(
        "what was added to the score of a stored picture",
        "words, added = part.matches, sum(terms.values())",
        "words, added = part.matches, 1.01 * sum(terms.values())",
        ("stores/explanations as it is", "service/answer explain"),
    ),
    Plant(
        "how many results the service returns by default",
        "k: Count = 24",
        "k: Count = 5",
        ("service/answer options", "service/answer pictures"),
    ),
    Plant(
        "length of a dual encoder's vectors",
        "return F.normalize(vectors.float(), dim=-1)",
        "return F.normalize(vectors.float(), p=1, dim=-1)",
        ("dual/search clip", "dual/figures siglip2", "dual/explanation clip"),
    ),
    Plant(
        "the confidence of a hit",
        "(count - 0.375) / (count + 0.25)",
        "(count - 0.376) / (count + 0.25)",
        ("pictures/search mini", "library/search", "service/answer search"),
    ),
    Plant(
        "notes of the single file",
        "# Step 1, cosines: words",
        "# Step 1, all cosines: words",
        ("modules/text annotated en",),
    ),
    Plant(
        "the gate's statistics",
        "/ (self.variance[sensors] + 1e-6).sqrt()",
        "/ (self.variance[sensors] + 1e-3).sqrt()",
        ("reid/losses gate", "reid/figures gate", "reid/exported file gate"),
    ),
    Plant(
        "the ONNX graph of the score",
        "        self.net = net\n",
        "        self.net = net\n        net.config.__dict__['pooled'] *= 1.01\n",
        ("exported/model default",),
    ),
    Plant(
        "help of an option",
        "show at most this many pictures (default: 10)",
        "print at most this many pictures (default: 10)",
        ("reference/help of commands",),
    ),
)


def plant(tree: Path, fault: Plant, place: Path) -> list[str]:
    """Copy the tree to `place`, files as links, with this fault wherever its text stands; returns the changed files."""
    shutil.copytree(tree / "src", place / "src", copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tree / "pyproject.toml", place)
    found = []
    for path in sorted((place / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if fault.old in text:
            path.unlink()  # a link would change the tree itself
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
            found.append(str(path.relative_to(place)))
    return found


def _link(source: str, target: str) -> None:
    os.symlink(source, target)
