"""What a re-identification data set is: records, splits, and a report of what was wrong with the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from seps.parsing import is_whole

Excludes = Literal["camera", "scene"]


class ReidDataError(ValueError):
    """A data set that cannot be used as it is; the message names the files and the remedy."""


@dataclass(frozen=True)
class Source:
    """One modality of one record: a file, or a part of it.

    `box` is (left, top, right, bottom) in fractions of the image, so that side-by-side images need no
    opening to be described; `None` means the whole image.
    """

    path: Path
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class ReidRecord:
    """One shot of one identity in every modality; `pid`, `camid`, `sceneid` as the data set numbers them.

    `text` was written of this shot's pictures, and of no other (`seps.reid.data.texts`).
    """

    sources: Mapping[str, Source]
    pid: int
    camid: int
    sceneid: int = -1
    text: str | None = None

    @property
    def name(self) -> str:
        """The file name of the first modality without its suffix."""
        return next(iter(self.sources.values())).path.stem


@dataclass(frozen=True)
class Problem:
    """Something wrong with one shot: `kind` is one of the keys of `PROBLEM_KINDS`."""

    kind: str
    split: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.split}: {self.path}: {self.detail}"


PROBLEM_KINDS: Mapping[str, str] = {
    "missing_modality": "shots without a file in every modality",
    "missing_file": "rows of the table of labels without an image",
    "unparsable_name": "names without identity and camera",
    "duplicate_name": "names that occur twice in one folder",
    "undecodable": "files that are cut or cannot be decoded",
    "wrong_shape": "side-by-side images whose width does not divide by the modalities",
}


@dataclass(frozen=True)
class ReidReport:
    """What `load` saw: how many shots per split, how many marked as junk (pid -1), and every problem."""

    layout: str
    root: str
    shots: Mapping[str, int] = field(default_factory=dict)
    junk: int = 0
    problems: tuple[Problem, ...] = ()
    shared_identities: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Problems by kind, in the order of `PROBLEM_KINDS`."""
        seen = Counter(problem.kind for problem in self.problems)
        return {kind: seen[kind] for kind in PROBLEM_KINDS if seen[kind]}

    def summary(self, examples: int = 3) -> str:
        """A few lines for people: shots per split, then each kind of problem with its first examples."""
        shots = ", ".join(f"{split} {count}" for split, count in self.shots.items())
        lines = [f"{self.layout} in {self.root}: {shots} shots; {len(self.problems)} problems"]
        if self.junk:
            lines.append(f"  {self.junk} shots marked as junk (identity -1) left out")
        if self.shared_identities:
            lines.append(
                f"  {self.shared_identities} identities occur both in train and in query or gallery: figures on them "
                "say nothing about new ones"
            )
        for kind, count in self.counts.items():
            lines.append(f"  {count} {PROBLEM_KINDS[kind]}")
            of_kind = [problem for problem in self.problems if problem.kind == kind]
            lines += [f"    {problem}" for problem in of_kind[:examples]]
            if count > examples:
                lines.append(f"    and {count - examples} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class ReidDataset:
    """Train, query and gallery shots of `modalities`.

    `excludes` names the evaluation rule of the data set: gallery shots of the query's identity from the same
    camera (or, MSVR310, the same scene) do not count.
    """

    name: str
    modalities: tuple[str, ...]
    train: tuple[ReidRecord, ...]
    query: tuple[ReidRecord, ...]
    gallery: tuple[ReidRecord, ...]
    excludes: Excludes = "camera"
    report: ReidReport = field(default_factory=lambda: ReidReport("", ""))

    def __post_init__(self) -> None:
        if len(self.modalities) < 2 or len(set(self.modalities)) != len(self.modalities):
            raise ReidDataError(f"modalities must be two or more different names, not {self.modalities}")

    @cached_property
    def identities(self) -> tuple[int, ...]:
        """The training identities, sorted: position = class label."""
        return tuple(sorted({record.pid for record in self.train}))

    @cached_property
    def cameras(self) -> tuple[int, ...]:
        """All camera numbers of all splits, sorted: position = index of the camera embedding."""
        return tuple(sorted({r.camid for r in (*self.train, *self.query, *self.gallery)}))

    @cached_property
    def train_labels(self) -> tuple[int, ...]:
        """Class label of every training record, 0 .. len(identities) - 1."""
        label_of = {pid: label for label, pid in enumerate(self.identities)}
        return tuple(label_of[record.pid] for record in self.train)

    def camera_indices(self, records: Sequence[ReidRecord]) -> list[int]:
        """Index of each record's camera in `cameras`. Raises for a camera the data set does not have."""
        index_of = {camid: index for index, camid in enumerate(self.cameras)}
        unknown = sorted({record.camid for record in records} - set(index_of))
        if unknown:
            raise ReidDataError(f"cameras {unknown} are not among this data set's cameras {self.cameras}")
        return [index_of[record.camid] for record in records]


def holdout(dataset: ReidDataset, part: int | float, seed: int) -> tuple[ReidDataset, ReidDataset]:
    """Set training identities apart for choosing checkpoints, so that the test split is never looked at.

    `part` is a number of identities (int) or a fraction of them (float in (0, 1)). Only identities seen by
    two cameras (two scenes where the rule is `scene`) are drawn: others have no match to be found. Returns
    `(fit, dev)`: `fit` keeps query and gallery and the remaining training shots; `dev` has the held-out shots
    as query and as gallery (the data set's rule removes a query's own shot) and no training shots.

    Raises ReidDataError when fewer identities are eligible than asked, or fewer than two would remain.
    """
    views: dict[int, set[int]] = {}
    for record in dataset.train:
        views.setdefault(record.pid, set()).add(record.sceneid if dataset.excludes == "scene" else record.camid)
    eligible = sorted(pid for pid, seen in views.items() if len(seen) > 1)
    count = _holdout_count(part, len(dataset.identities))
    if count > len(eligible):
        raise ReidDataError(
            f"cannot hold out {count} identities: only {len(eligible)} of {len(dataset.identities)} training "
            f"identities were seen by two {dataset.excludes}s; ask for fewer. data.holdout 0 with train.eval_every 0 "
            "holds none out and takes the last checkpoint"
        )
    if len(dataset.identities) - count < 2:
        raise ReidDataError(
            f"holding out {count} of {len(dataset.identities)} training identities leaves fewer than two to "
            "train on; ask for fewer"
        )
    order = np.random.default_rng([seed, 0x0DE7]).permutation(len(eligible))
    held = {eligible[int(index)] for index in order[:count]}
    shots = tuple(record for record in dataset.train if record.pid in held)
    rest = tuple(record for record in dataset.train if record.pid not in held)
    return replace(dataset, train=rest), replace(dataset, train=(), query=shots, gallery=shots)


def _holdout_count(part: int | float, identities: int) -> int:
    """How many identities `part` asks for, at least one."""
    if is_whole(part, 1):
        return part
    if isinstance(part, float) and 0 < part < 1:
        return max(1, round(part * identities))
    raise ReidDataError(f"the held-out part must be a whole number >= 1 or a fraction in (0, 1), not {part!r}")
