"""The trained network outside of training: as an ONNX file, and as features of a folder of pictures.

    model.onnx    images (B, M, 3, H, W) in [0, 1], with a camera embedding also cameras (B,) -> feature (B, D)
    export.json   sensors in their order, image size, cameras, what the features are, and the threshold if there is one

Features have unit length, and the cosine of two is the similarity that `seps reid eval` ranks by.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seps.export import OPSET, check_packages, export_onnx, largest_difference, would_overwrite
from seps.files import read_json, replacing, sha256, write_json
from seps.reid.config import ReidConfig
from seps.reid.data import ReidDataError, ReidDataset, ReidReader, ReidRecord
from seps.reid.data.layouts import (
    GENERIC_PATTERN,
    NAMES,
    ProblemLog,
    by_pattern,
    compile_pattern,
    join_modalities,
    readable_shots,
)
from seps.reid.data.records import Problem
from seps.reid.evaluate import Features, default_cases, extract
from seps.reid.network.model import Pattern, ReidModel
from seps.reid.trained import TrainedReid

GRAPH, FACTS = "model.onnx", "export.json"


class Deployable(nn.Module):
    """Pixels of all sensors to one feature of unit length."""

    def __init__(self, model: ReidModel, pattern: Pattern) -> None:
        super().__init__()
        self.model, self.pattern = model, pattern

    def forward(self, images: Tensor, cameras: Tensor | None = None) -> Tensor:
        """(B, M, 3, H, W) in [0, 1], (B,) -> (B, D)."""
        fused = self.model.fuse(self.model.encode(images, cameras)).pattern(self.pattern)
        branches = 2 if self.pattern == 3 else 1
        config, blocks = self.model.config, len(self.model.blocks)
        vectors = fused.reshape(-1, branches, blocks, config.width)
        return Features(vectors, torch.ones(1, blocks, dtype=torch.bool), self.model.concatenated).flat()


def check_export(folder: Path | str) -> None:
    """Raise `ExportError` without the packages of ONNX, or where a file that no export wrote is in the way."""
    check_packages()
    facts = read_json(Path(folder) / FACTS)
    for name in (GRAPH, FACTS):
        path = Path(folder) / name
        ours = facts.get("seps_reid_export") == 1
        if os.path.lexists(path) and not (ours and (name == FACTS or sha256(path) == facts.get("sha256"))):
            raise would_overwrite(path)


def export_reid(
    trained: TrainedReid, folder: Path | str, *, pattern: Pattern | None = None, threshold: float | None = None
) -> float:
    """Write the files of this module's head; returns the largest difference of a feature from torch.

    The number of shots is free in the file, all sensors must be there; texts have no part in it. Raises ExportError
    without the extra `export`, or where a file that no export wrote is in the way.
    """
    folder = Path(folder)
    check_export(folder)
    model = trained.model.to("cpu").eval()
    chosen = pattern or model.patterns[-1]
    module = Deployable(model, chosen).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = {"images": torch.rand(3, len(model.modalities), 3, *model.config.image_size, generator=generator)}
    if model.camera_embedding is not None:
        inputs["cameras"] = torch.arange(3) % model.camera_embedding.num_embeddings
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder) as made:
        path = Path(made) / GRAPH
        export_onnx(module, path, inputs, {name: {0: "shot"} for name in inputs}, ["feature"])
        with torch.no_grad():
            difference = largest_difference(module, path, inputs)
            width = module(*inputs.values()).shape[1]
        facts: dict[str, Any] = {
            "seps_reid_export": 1,
            "opset": OPSET,
            "sha256": sha256(path),
            "sensors": list(model.modalities),
            "image_size": list(model.config.image_size),
            "cameras": list(trained.cameras) if model.camera_embedding is not None else None,
            "pattern": chosen,
            "width": width,
            "threshold": threshold,
            "largest_difference": difference,
        }
        # Killed between the two, the folder holds a graph that the facts know.
        write_json(folder / FACTS, facts)
        os.replace(path, folder / GRAPH)
    return difference


@dataclass(frozen=True)
class FolderFeatures:
    """names (B,) of shots, features (B, D) float32 of unit length, cameras (B,), -1 where the names tell none."""

    names: list[str]
    features: NDArray[np.float32]
    cameras: list[int]
    left_out: tuple[Problem, ...] = ()
    """Why shots of the folder are not among them."""

    def save(self, path: Path | str) -> None:
        """Write a .npz with the arrays names, features and cameras, whole or not at all."""
        with replacing(Path(path)) as temporary, temporary.open("wb") as made:
            np.savez(
                made, names=np.array(self.names, dtype=str), features=self.features, cameras=np.array(self.cameras)
            )


def check_features_file(path: Path | str) -> None:
    """Raise ReidDataError where a file is in the way that `FolderFeatures.save` did not write; an empty one is not."""
    if not os.path.lexists(path) or (os.path.isfile(path) and not os.path.getsize(path)):
        return
    try:
        with np.load(path, allow_pickle=False) as held:
            ours = {"names", "features", "cameras"} == set(held.files)
    except Exception:  # a cut archive, a pickle, an array without names: numpy raises each in its own way
        ours = False
    if not ours:
        raise ReidDataError(f"{path} exists and holds no features; it was left as it is: choose another file")


def folder_features(
    trained: TrainedReid,
    config: ReidConfig,
    folder: Path | str,
    *,
    camera: int | None = None,
    pattern: Pattern | None = None,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> FolderFeatures:
    """Features of `folder`/SENSOR/NAME.jpg, for every name that all sensors have.

    The camera is taken from the names by `data.pattern` (default: as in the run's layout, else PID_cCAMERA), or is
    `camera` for all. Raises
    ReidDataError for a name that one sensor lacks or, with `data.verify_files`, a picture that cannot be read (unless
    `data.on_problem` is "skip"), a camera the model does not know, or a folder without shots.
    """
    model, root = trained.model, Path(folder)
    log = ProblemLog(root)
    folders = {sensor: root / sensor for sensor in model.modalities}
    absent = [str(path) for path in folders.values() if not path.is_dir()]
    if absent:
        raise ReidDataError(f"no folder {absent[0]}: the pictures of each sensor lie in a folder of its name")
    own = NAMES.get(config.data.layout.lower(), GENERIC_PATTERN)
    patterns = [config.data.pattern] if config.data.pattern else [own, GENERIC_PATTERN]
    parsers = [by_pattern(compile_pattern(expression)) for expression in patterns]

    def tags(name: str) -> tuple[int, int, int]:
        found = next(filter(None, (parse(name) for parse in parsers)), None)
        read = found[1] if found is not None else -1
        return 0, camera if camera is not None else read, -1

    records = list(join_modalities(folders, "pictures", tags, log))
    if config.data.verify_files:
        with ThreadPoolExecutor(config.data.threads) as pool:
            records = readable_shots(records, "pictures", log, pool)
    if log.problems and config.data.on_problem == "refuse":
        more = len(log.problems) - 1
        raise ReidDataError(
            f"{log.problems[0]}{f', and {more} more' if more else ''}. Fix the files, or skip these shots with "
            "--data.on_problem skip"
        )
    if not records:
        raise ReidDataError(f"{root} has no picture that all of {model.modalities} have")
    numbered = records
    if model.camera_embedding is not None:
        unknown = sorted({record.camid for record in records} - set(trained.cameras))
        if unknown:
            raise ReidDataError(
                f"the model has an embedding of the cameras {trained.cameras}, and these pictures are of {unknown} "
                "(-1: the name tells none); give --camera or --data.pattern"
            )
        # The index of a camera is its place among all that the model knows.
        numbered = [*records, *(ReidRecord({}, 0, number) for number in trained.cameras)]
    dataset = ReidDataset("folder", model.modalities, tuple(numbered), (), ())
    case = default_cases(model, pattern=pattern)[0]
    with ReidReader(model.modalities, config.model.image_size, threads=config.data.threads) as reader:
        found = extract(model, dataset, records, [case], reader, batch_size=batch_size, progress=progress)[0]
    cameras = [record.camid for record in records]
    return FolderFeatures([record.name for record in records], found.flat().numpy(), cameras, tuple(log.problems))
