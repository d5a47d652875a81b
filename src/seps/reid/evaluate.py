"""Evaluation: features, distances over the sensors both samples have, figures, and every missing-sensor case.

Shapes: Q queries, G gallery shots, B samples, R branches (return pattern 3 has two), M modalities, C width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seps.method.checks import evaluating
from seps.metrics import ReidMetrics, reid_metrics, rerank
from seps.reid.config import Missing
from seps.reid.data import ReidDataset, ReidReader, ReidRecord
from seps.reid.data.transforms import unit_float
from seps.reid.network.model import Encoded, Fused, Pattern, ReidModel, missing_cases
from seps.reid.network.text import ShotTexts, texts_of
from seps.training import distributed as processes

TextSide = Literal["own", "gallery", "none"]


@dataclass(frozen=True)
class Case:
    """One way to look at the test set: the sensors that are there, what becomes of the others, which features.

    texts: for a model that reads them: every shot has its "own"; or those of the "gallery" alone count, as where nobody
    writes a text of a query; or "none".
    """

    present: tuple[str, ...]
    missing: Missing
    pattern: Pattern
    texts: TextSide = "own"


@dataclass(frozen=True)
class CaseResult:
    """The figures of one case."""

    case: Case
    metrics: ReidMetrics
    reranked: bool = False

    def row(self) -> dict[str, Any]:
        """Plain values for JSON and tables."""
        return {
            "present": list(self.case.present),
            "missing": self.case.missing,
            "pattern": self.case.pattern,
            "reranked": self.reranked,
            "texts": self.case.texts,
            **self.metrics.as_dict(),
        }

    def per_query(self, queries: Sequence[ReidRecord]) -> list[dict[str, Any]]:
        """For JSON, of each query that has a match: name, identity, camera, scene, average precision in percent, and
        the rank of its first match."""
        metrics = self.metrics
        if metrics.queries is None or metrics.precisions is None or metrics.first_ranks is None:
            return []
        columns = (part.tolist() for part in (metrics.queries, metrics.precisions, metrics.first_ranks))
        return [
            {
                "name": queries[number].name,
                "pid": queries[number].pid,
                "camera": queries[number].camid,
                "scene": queries[number].sceneid,
                "AP": 100 * precision,
                "first_match": rank,
            }
            for number, precision, rank in zip(*columns, strict=True)
        ]


@dataclass(frozen=True)
class Features:
    """Features (B, R, M, C) of samples, zeros at absent sensors, and which they have, (B, M) bool.

    Where texts join the feature, theirs is one more block, as of one more sensor.
    """

    vectors: Tensor
    present: Tensor
    concatenated: bool = False
    """How branches are compared; see `ReidModel.concatenated`."""

    def flat(self) -> Tensor:
        """Rows (B, R M C) of unit length for anything that takes plain vectors; branches have equal length."""
        if self.concatenated:
            return F.normalize(self.vectors.flatten(1), dim=1)
        return F.normalize(F.normalize(self.vectors.flatten(2), dim=2).flatten(1), dim=1)

    def __getitem__(self, part: slice) -> Features:
        return Features(self.vectors[part], self.present[part], self.concatenated)


def distances(query: Features, gallery: Features) -> Tensor:
    """Cosine distances (Q, G) over the sensors both samples have, averaged over the branches.

    With all sensors present and one branch this is the cosine distance of the whole features, as published. Where
    a sample lacks a sensor, dot product and norms are taken over the shared blocks alone, so that a complete and an
    incomplete sample can be as close as two complete ones. Samples without a shared sensor are at distance 1.
    Branches are compared by themselves, as their features differ in length and the longer would decide alone;
    `concatenated` features are compared as one vector, as published.
    """
    if query.concatenated:
        sides = [features.vectors.transpose(1, 2).flatten(2) for features in (query, gallery)]
        return 1 - _shared_cosines(sides[0], query.present, sides[1], gallery.present)
    branches = zip(query.vectors.unbind(1), gallery.vectors.unbind(1), strict=True)
    cosines = [_shared_cosines(left, query.present, right, gallery.present) for left, right in branches]
    return 1 - torch.stack(cosines).mean(dim=0)


def _shared_cosines(left: Tensor, left_present: Tensor, right: Tensor, right_present: Tensor) -> Tensor:
    """Cosines (Q, G) of blocks (Q, M, C) and (G, M, C), zeros at absent sensors, over those both have."""
    dots = left.flatten(1) @ right.flatten(1).T
    # |q|^2 over the sensors of the gallery's sample, |g|^2 over those of the query's.
    left_norms = left.square().sum(dim=2) @ right_present.float().T
    right_norms = left_present.float() @ right.square().sum(dim=2).T
    return dots / (left_norms * right_norms).clamp_min(1e-24).sqrt()


def default_cases(
    model: ReidModel, missing: Missing | None = None, pattern: Pattern | None = None, texts: TextSide | None = None
) -> list[Case]:
    """All sensors, with the model's own handling and its widest features."""
    side = texts or default_texts(model)
    return [Case(model.modalities, missing or model.config.missing, pattern or model.patterns[-1], side)]


def default_texts(model: ReidModel) -> TextSide:
    """Each shot's own, for a model that reads texts."""
    return "none" if model.text_head is None else "own"


def all_cases(model: ReidModel, pattern: Pattern | None = None, texts: TextSide | None = None) -> list[Case]:
    """Every set of sensors that can be left, each with both handlings (the full set once)."""
    chosen = pattern or model.patterns[-1]
    return [
        Case(present, missing, chosen, texts or default_texts(model))
        for present in missing_cases(model.modalities)
        for missing in get_args(Missing)
        if missing == "leave-out" or present != model.modalities
    ]


@torch.no_grad()
def extract(
    model: ReidModel,
    dataset: ReidDataset,
    records: Sequence[ReidRecord],
    cases: Sequence[Case],
    reader: ReidReader,
    *,
    batch_size: int = 64,
    queries: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Features]:
    """Features of `records` for each case, on the CPU; pixels go through the backbone once for all cases.

    A record's feature follows from its own pictures and its own text. The first `queries` records are queries, which
    have no text in a case with those of the gallery alone.

    `dataset` numbers the cameras. With several processes each takes its part of the records, and all get all.
    """
    unknown = sorted({name for case in cases for name in case.present} - set(model.modalities))
    if unknown:
        raise ValueError(f"The sensors {unknown} are not among those of the model, {model.modalities}.")
    device = next(model.parameters()).device
    rank, world = processes.rank(), processes.world_size()
    bounds = [len(records) * part // world for part in range(world + 1)]
    mine = records[bounds[rank] : bounds[rank + 1]]
    cameras = torch.tensor(dataset.camera_indices(mine), dtype=torch.long)
    queried = max(0, queries - bounds[rank])
    parts: list[list[Tensor]] = [[] for _ in cases]
    with evaluating(model):
        for start in range(0, len(mine), batch_size):
            pixels = unit_float(reader.batch(mine[start : start + batch_size]).to(device))
            texts = texts_of(reader, mine[start : start + batch_size]) if model.text_head is not None else None
            sides = _text_sides(texts, queried - start)
            features = _case_features(model, pixels, cameras[start : start + batch_size].to(device), cases, sides)
            for part, feature in zip(parts, features, strict=True):
                part.append(feature.cpu())
            if progress is not None:
                progress(min(start + batch_size, len(mine)), len(mine))
        told = torch.tensor([record.text is not None for record in records], dtype=torch.bool)
        return [
            _collect(model, part, case, _told(told, case, queries, reader))
            for part, case in zip(parts, cases, strict=True)
        ]


def _text_sides(texts: ShotTexts | None, queries: int) -> dict[TextSide, ShotTexts | None]:
    """The texts of a batch, whose first `queries` shots are queries, in each kind of case."""
    if texts is None:
        return {"own": None, "gallery": None, "none": None}
    written = texts.present & (torch.arange(len(texts.present)) >= queries)
    gallery = ShotTexts(torch.where(written[:, None], texts.vectors, 0.0), written)
    return {"own": texts, "gallery": gallery, "none": None}


def _told(told: Tensor, case: Case, queries: int, reader: ReidReader) -> Tensor:
    """(B,) bool: the records whose text is part of a case; `told` says which have one."""
    if case.texts == "none" or getattr(reader, "texts", None) is None:
        return torch.zeros_like(told)
    return told if case.texts == "own" else told & (torch.arange(len(told)) >= queries)


def _case_features(
    model: ReidModel,
    pixels: Tensor,
    cameras: Tensor,
    cases: Sequence[Case],
    sides: Mapping[TextSide, ShotTexts | None],
) -> list[Tensor]:
    """(B, R M C) of one batch for every case."""
    placed = {side: None if texts is None else texts.to(pixels.device) for side, texts in sides.items()}
    encoded = model.encode(pixels, cameras)
    full = set(model.modalities)
    blank: Encoded | None = None
    if any(case.missing == "zero" and set(case.present) != full for case in cases):
        # One blank picture per camera: they differ in nothing else.
        seen, which = torch.unique(cameras, return_inverse=True)
        blank = model.encode(model.blank(pixels[: len(seen)]), seen).rows(which)
    fused: dict[tuple[tuple[str, ...], Missing, TextSide], Fused] = {}
    for case in cases:
        key, texts = (case.present, case.missing, case.texts), placed[case.texts]
        if key in fused:
            continue
        mask = _mask(model, case, len(pixels)).to(pixels.device)
        if set(case.present) == full:
            fused[key] = model.fuse(encoded, texts=texts)
        elif case.missing == "leave-out" or blank is None:
            fused[key] = model.fuse(encoded, mask, texts)
        else:
            fused[key] = model.fuse(encoded.replaced(blank, ~mask), texts=texts)
    return [fused[case.present, case.missing, case.texts].pattern(case.pattern) for case in cases]


def _mask(model: ReidModel, case: Case, samples: int) -> Tensor:
    """(samples, M) bool: the sensors of the case."""
    if not case.present:
        raise ValueError("A case without any sensor cannot be evaluated: name at least one.")
    return torch.tensor([name in case.present for name in model.modalities]).expand(samples, -1)


def _collect(model: ReidModel, parts: Sequence[Tensor], case: Case, told: Tensor) -> Features:
    """All processes' features of one case; `told` (B,) says which shots have a text in it."""
    count, width, total = len(model.blocks), model.config.width, len(told)
    branches = 2 if case.pattern == 3 else 1
    mine = torch.cat([*parts, torch.empty(0, branches * count * width)])
    if processes.world_size() > 1:
        # Collectives of GPUs take what lies on the GPU.
        mine = processes.gather_ragged(mine.to(next(model.parameters()).device))
    zero = case.missing == "zero"
    sensors = len(model.modalities)
    present = torch.ones(total, sensors, dtype=torch.bool) if zero else _mask(model, case, total)
    if count > sensors:
        present = torch.cat([present, told[:, None]], dim=1)
    return Features(mine.cpu().view(total, branches, count, width), present, model.concatenated)


def measure(dataset: ReidDataset, matrix: Tensor) -> ReidMetrics:
    """mAP, CMC and mINP of the queries of `dataset` against its gallery, from their distances (Q, G).

    A gallery shot with the identity and the camera of a query is left out of the ranking of that query, as usual; where
    `dataset.excludes` is "scene" (MSVR310), the scene counts in the place of the camera.
    """
    q, g = dataset.query, dataset.gallery
    scenes: dict[str, Any] = {}
    if dataset.excludes == "scene":
        scenes = {"q_sceneids": [r.sceneid for r in q], "g_sceneids": [r.sceneid for r in g]}
    return reid_metrics(
        matrix,
        [record.pid for record in q],
        [record.pid for record in g],
        [record.camid for record in q],
        [record.camid for record in g],
        **scenes,
    )


def evaluate(
    model: ReidModel,
    dataset: ReidDataset,
    reader: ReidReader,
    cases: Sequence[Case] | None = None,
    *,
    cameras: ReidDataset | None = None,
    batch_size: int = 64,
    use_rerank: bool = False,
    neighbours: tuple[int, int] = (20, 6),
    progress: Callable[[int, int], None] | None = None,
) -> list[CaseResult]:
    """The figures of every case on query and gallery of `dataset`; `cameras` numbers them (default: itself).

    `use_rerank` adds those by k-reciprocal re-ranked distances (Zhong et al. 2017); `neighbours` are its k1 and k2.
    """
    chosen = list(cases) if cases is not None else default_cases(model)
    # With texts of the gallery alone a shot that is in both is encoded as both.
    same = dataset.query == dataset.gallery and all(case.texts != "gallery" for case in chosen)
    records = dataset.query if same else (*dataset.query, *dataset.gallery)
    queries = 0 if same else len(dataset.query)
    found = extract(
        model, cameras or dataset, records, chosen, reader, batch_size=batch_size, queries=queries, progress=progress
    )
    results = []
    for case, features in zip(chosen, found, strict=True):
        count = len(dataset.query)
        query = features[:count]
        gallery = features if same else features[count:]
        for again in (False, True) if use_rerank else (False,):
            matrix = rerank(query.flat(), gallery.flat(), *neighbours) if again else distances(query, gallery)
            results.append(CaseResult(case, measure(dataset, matrix), again))
    return results


@torch.no_grad()
def cost(model: ReidModel) -> dict[str, float]:
    """Parameters (millions), of them in the SDTPS branch, and the work of one sample by torch's own counter.

    `gflops`: a multiplication with its addition counts as two operations; `gmacs`: as one, as the papers count (DeMo's
    34.28 G). The classifiers are not part of it.
    """
    device = next(model.parameters()).device
    images = torch.zeros(1, len(model.modalities), 3, *model.config.image_size, device=device)
    cameras = torch.zeros(1, dtype=torch.long, device=device)
    counter = FlopCounterMode(display=False)
    # The fused attention of CPUs is one operator, which the counter passes over.
    with evaluating(model), sdpa_kernel(SDPBackend.MATH), counter:
        model.embed(images, cameras)
    gate = model.patch_gate
    # Of the gate its weights alone decide; its values and classifier are there to train them.
    parts = (model.sdtps_neck, model.original_neck, gate and gate.values, gate and gate.classifier)
    heads = sum(parameter.numel() for part in parts if part is not None for parameter in part.parameters())
    every = sum(parameter.numel() for parameter in model.parameters())
    branch = 0 if model.sdtps is None else sum(parameter.numel() for parameter in model.sdtps.parameters())
    return {
        "parameters_m": (every - heads) / 1e6,
        "sdtps_parameters_m": branch / 1e6,
        "gflops": counter.get_total_flops() / 1e9,
        "gmacs": counter.get_total_flops() / 2e9,
    }


@torch.no_grad()
def throughput(model: ReidModel, batch_size: int = 32, seconds: float = 2.0) -> float:
    """Samples (of all sensors) per second through the network on its device, without reading files."""
    device = next(model.parameters()).device
    images = torch.rand(batch_size, len(model.modalities), 3, *model.config.image_size, device=device)
    cameras = torch.zeros(batch_size, dtype=torch.long, device=device)
    with evaluating(model):
        model.embed(images, cameras)
        _wait(device)
        started, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - started < seconds:
            model.embed(images, cameras)
            _wait(device)
            done += batch_size
        return done / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
