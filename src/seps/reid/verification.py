"""A threshold for "the same one", chosen on identities that were held out from training, and its curve as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from seps.metrics.verification import Roc, accept_rate, roc, threshold_at
from seps.reid.config import ReidConfig
from seps.reid.data import ReidDataError, ReidDataset, ReidReader, ReidRecord
from seps.reid.evaluate import Case, Features, default_cases, distances, extract
from seps.reid.network.model import Pattern
from seps.reid.run import shots_digest
from seps.reid.task import split_dataset
from seps.reid.trained import TrainedReid

_BLUE, _ORANGE, _GREY = (0, 114, 178), (213, 94, 0), (150, 150, 150)


@dataclass(frozen=True)
class Pairs:
    """Distances of genuine and of impostor pairs, each (pairs,), and how many identities they are of."""

    genuine: Tensor
    impostor: Tensor
    identities: int

    def at(self, threshold: float) -> dict[str, float | int]:
        """Rates and counts at a threshold, for JSON."""
        return {
            "false_accept": accept_rate(self.impostor, threshold),
            "true_accept": accept_rate(self.genuine, threshold),
            "genuine_pairs": self.genuine.numel(),
            "impostor_pairs": self.impostor.numel(),
            "identities": self.identities,
        }


@dataclass(frozen=True)
class Threshold:
    """A distance up to which two shots count as the same one, and what it does on both kinds of unseen identities."""

    distance: float
    rate: float
    case: Case
    held_out: Pairs
    test: Pairs

    def to_json(self) -> dict[str, Any]:
        """Plain values: the threshold, what was asked, and the rates that were measured."""
        return {
            "distance": self.distance,
            "asked_false_accept": self.rate,
            "pattern": self.case.pattern,
            "sensors": list(self.case.present),
            "held_out": self.held_out.at(self.distance),
            "test": self.test.at(self.distance),
        }


def pairs(
    dataset: ReidDataset, left: Features, right: Features, rows: Sequence[ReidRecord], columns: Sequence[ReidRecord]
) -> Pairs:
    """Pairs of shots by different cameras (scenes, where that is the data set's rule), each counted once.

    Shots of one camera are left out of both kinds: they share background and light, which would make the genuine pairs
    easier and the impostors harder than where the threshold is used.
    """
    places = [
        [shot.sceneid if dataset.excludes == "scene" else shot.camid for shot in side] for side in (rows, columns)
    ]
    apart = torch.tensor(places[0])[:, None] != torch.tensor(places[1])[None, :]
    if rows is columns:
        apart = apart.triu(1)
    pids = [torch.tensor([shot.pid for shot in side]) for side in (rows, columns)]
    same = pids[0][:, None] == pids[1][None, :]
    matrix = distances(left, right)
    identities = len({shot.pid for shot in (*rows, *columns)})
    return Pairs(matrix[same & apart], matrix[~same & apart], identities)


def calibrate(
    trained: TrainedReid,
    config: ReidConfig,
    dataset: ReidDataset,
    reader: ReidReader,
    rate: float,
    *,
    pattern: Pattern | None = None,
    batch_size: int = 64,
) -> Threshold:
    """The largest distance at which at most `rate` of the held-out impostor pairs is accepted; all sensors present.

    `config` is that of the run, from which, with the training shots, the held-out identities follow. What the threshold
    does on query and gallery is measured too, and chooses nothing. Raises ReidDataError when the run held no identity
    out, when the training shots are not those of the run, or where there are no pairs of a kind.
    """
    fit, dev = split_dataset(config, dataset)
    if not dev.query:
        raise ReidDataError(
            "the run held no identity out (data.holdout 0), and a threshold must not be chosen on identities that were "
            "trained on: train with data.holdout 0.1 or so"
        )
    others = trained.shots is not None and trained.shots != shots_digest(dataset)
    # Converted models do not state their shots, but how many identities they know.
    if others or len(fit.identities) != trained.model.identities:
        raise ReidDataError(
            f"the shots in {dataset.report.root or 'the data set'} are not the training shots that the model was "
            "trained on. Which identities were held out follows from those, and a threshold must not be chosen on "
            "identities that were trained on: give the set of the run, unchanged, with --data.root"
        )
    case = default_cases(trained.model, pattern=pattern)[0]

    def features(records: Sequence[ReidRecord]) -> Features:
        return extract(trained.model, dataset, records, [case], reader, batch_size=batch_size)[0]

    known = features(dev.query)
    held_out = pairs(dataset, known, known, dev.query, dev.query)
    query = features(dataset.query)
    same = dataset.query == dataset.gallery
    gallery, shots = (query, dataset.query) if same else (features(dataset.gallery), dataset.gallery)
    test = pairs(dataset, query, gallery, dataset.query, shots)
    held = f"{held_out.identities} held-out identities"
    _refuse_none(held_out, dataset, held, f"hold out two identities or more that two {dataset.excludes}s saw")
    _refuse_none(test, dataset, "query and gallery", "add such shots")
    return Threshold(threshold_at(held_out.impostor, rate), rate, case, held_out, test)


def _refuse_none(found: Pairs, dataset: ReidDataset, where: str, remedy: str) -> None:
    """Raise ReidDataError where there is no pair of a kind to count."""
    for kind, count in (("one identity", found.genuine.numel()), ("two identities", found.impostor.numel())):
        if not count:
            raise ReidDataError(
                f"{where}: no pair of shots of {kind} by two {dataset.excludes}s, so that no rate can be measured; "
                f"{remedy}"
            )


def roc_picture(calibration: Threshold, size: tuple[int, int] = (720, 540)) -> Image.Image:
    """True against false accept rate (logarithmic), held-out and test identities; circles mark the threshold."""
    curves = {
        "held-out identities": (roc(calibration.held_out.genuine, calibration.held_out.impostor), _BLUE),
        "test identities": (roc(calibration.test.genuine, calibration.test.impostor), _ORANGE),
    }
    fewest = min(calibration.held_out.impostor.numel(), calibration.test.impostor.numel())
    decades = max(1, math.ceil(math.log10(max(fewest, 10))))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    left, top, right, bottom = 70, 30, size[0] - 20, size[1] - 60

    def place(false_accept: float, true_accept: float) -> tuple[float, float]:
        across = 1 + math.log10(max(false_accept, 10.0**-decades)) / decades
        return left + across * (right - left), bottom - true_accept * (bottom - top)

    _axes(pen, (left, top, right, bottom), decades)
    marks: Mapping[str, Mapping[str, float | int]] = calibration.to_json()
    for number, (name, (curve, colour)) in enumerate(curves.items()):
        pen.line(_steps(curve, place), fill=colour, width=2)
        figures = marks["test" if name.startswith("test") else "held_out"]
        x, y = place(float(figures["false_accept"]), float(figures["true_accept"]))
        pen.ellipse([x - 5, y - 5, x + 5, y + 5], outline=colour, width=3)
        told = f"{name}: {figures['true_accept']:.1%} accepted at {figures['false_accept']:.2%} false"
        pen.text((right - 380, bottom - 55 + 18 * number), told, fill=colour)
    title = f"threshold {calibration.distance:.4f}, asked for {calibration.rate:g} false accepts"
    pen.text((left + 110, 8), title, fill="black")
    return sheet


def _steps(curve: Roc, place: Any) -> list[tuple[float, float]]:
    """The curve as a line, without the points that lie on one another."""
    points = [place(x, y) for x, y in zip(curve.false_accept.tolist(), curve.true_accept.tolist(), strict=True)]
    return [point for number, point in enumerate(points) if number == 0 or point != points[number - 1]]


def _axes(pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], decades: int) -> None:
    left, top, right, bottom = box
    pen.rectangle(box, outline="black")
    for step in range(decades + 1):
        x = left + (right - left) * step / decades
        pen.line([(x, top), (x, bottom)], fill=_GREY)
        pen.text((x - 14, bottom + 6), f"{10.0 ** (step - decades):g}", fill="black")
    for tenth in range(0, 11, 2):
        y = bottom - (bottom - top) * tenth / 10
        pen.line([(left, y), (right, y)], fill=_GREY)
        pen.text((left - 34, y - 6), f"{tenth / 10:.1f}", fill="black")
    pen.text(((left + right) / 2 - 60, bottom + 28), "false accept rate", fill="black")
    pen.text((6, 8), "true accept rate", fill="black")
