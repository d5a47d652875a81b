"""A retrieval model as ONNX files, for programs without torch.

    image.onnx     pixels (B, 3, H, W) in [0, 1] -> patches (B, P + N, C)
    text.onnx      ids and mask (T, M) -> words (T, M, C) and lengths (T,); captions and descriptions alike
    score.onnx     images, words and lengths, and where the model reads descriptions dense and dense_lengths
                   -> similarity (B, T)
    tokenizer/     makes the ids and the mask of a text
    export.json    sizes, names of inputs, and the sha256 of every file

The numbers of images, texts and words are free; the image size and the number of patches are fixed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seps.encoders.saved import has_text_files
from seps.export import OPSET, SCORE_AXES, ScorePairs, check_packages, export_onnx, in_the_way, score_inputs
from seps.export import largest_difference as difference
from seps.files import read_json, sha256, write_json
from seps.retrieval.heads import Head, ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.model import RetrievalModel

FACTS = "export.json"
_GRAPHS = ("image.onnx", "text.onnx", "score.onnx")
_FORMAT = 1


class PixelsToTokens(nn.Module):
    """Pixels to tokens in the joint space."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, P + N, C)."""
        return self.model.encode_pixels(pixels)


class IdsToWords(nn.Module):
    """Token ids to words in the joint space."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask (T, M) -> words (T, M, C), the valid ones first, and their number (T,)."""
        words, valid = self.model.encode_words(ids, mask)
        return words, valid.sum(dim=1)


class HeadScore(nn.Module):
    """The score of a head that has no loop over texts."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        images: Tensor,
        words: Tensor,
        lengths: Tensor,
        dense: Tensor | None = None,
        dense_lengths: Tensor | None = None,
    ) -> Tensor:
        """Similarity (B, T); see `seps.export.ScorePairs` for the inputs."""
        dense_mask = None if dense is None or dense_lengths is None else _mask(dense, dense_lengths)
        scores: Tensor = self.head(
            ImageFeatures(images, dense, dense_mask), TextFeatures(words, _mask(words, lengths))
        ).similarity
        return scores


def _mask(features: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(features.shape[1], device=features.device)[None, :] < lengths[:, None]


def check_export(folder: Path | str) -> None:
    """Raise `ExportError` where `export_model` would refuse: no packages, or a file in the way that it did not write.

    For callers that load a model first.
    """
    check_packages()
    _check_free(Path(folder), (*_GRAPHS, FACTS))


def export_model(model: RetrievalModel, folder: Path | str) -> dict[str, float]:
    """Write the files of this module's head into `folder`.

    Returns:
        By file, the largest difference from torch on a random input.

    Raises:
        ExportError: without the extra `export`, or where a file that no export wrote is in the way.
    """
    model = model.to("cpu").eval()

    def write(staged: Path) -> tuple[dict[str, float], dict[str, Any]]:
        differences = _write_graphs(model, staged)
        if has_text_files(model.text):
            model.text.tokenizer.save_pretrained(str(staged / "tokenizer"))
        return differences, _facts(model)

    return publish(folder, write)


Written = TypeVar("Written")


def publish(folder: Path | str, write: Callable[[Path], tuple[Written, dict[str, Any]]]) -> Written:
    """Let `write` fill an empty folder, then move its files into `folder`, with export.json beside them.

    Args:
        folder: files of former exports are replaced there.
        write: returns what this function returns, and the facts of export.json, which also has the digest of each file.

    Raises:
        ExportError: without the extra `export`, or where a file that no export wrote is in the way.
    """
    folder = Path(folder)
    check_export(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder) as made:
        staged = Path(made)
        result, facts = write(staged)
        names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file())
        facts = {"seps_export": _FORMAT, **facts, "files": {name: sha256(staged / name) for name in names}}
        _check_free(folder, names)
        # Killed from here on, the folder holds files of both exports; the next export must know them all as ours.
        before = read_json(folder / FACTS)
        write_json(folder / FACTS, {"seps_export": _FORMAT, "files": before.get("files", {}), "coming": facts["files"]})
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            os.replace(staged / name, folder / name)
    write_json(folder / FACTS, facts)
    return result


def _write_graphs(model: RetrievalModel, folder: Path) -> dict[str, float]:
    head = model.head
    score = (
        ScorePairs(head.net, descriptions=head.uses_description) if isinstance(head, SlimmingHead) else HeadScore(head)
    )
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, *model.image_size, generator=generator)
    mask = torch.arange(7)[None, :] < torch.tensor([7, 4, 1])[:, None]
    vocabulary = model.text.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (3, 7), generator=generator)
    tokens = model.vision.num_prefix_tokens + model.vision.num_patches
    words = {0: "text", 1: "word"}
    parts: tuple[tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]], list[str]], ...] = (
        (PixelsToTokens(model), {"pixels": pixels}, {"pixels": {0: "image"}}, ["patches"]),
        (IdsToWords(model), {"ids": ids, "mask": mask}, {"ids": words, "mask": words}, ["words", "lengths"]),
        (
            score,
            score_inputs(tokens, model.config.embed_size, descriptions=head.uses_description),
            SCORE_AXES,
            ["similarity"],
        ),
    )
    differences = {}
    for name, (module, inputs, axes, outputs) in zip(_GRAPHS, parts, strict=True):
        export_onnx(module.eval(), folder / name, inputs, axes, outputs)
        differences[name] = difference(module, folder / name, inputs)
    return differences


def _facts(model: RetrievalModel) -> dict[str, Any]:
    return {
        "opset": OPSET,
        "head": model.config.head,
        "image_size": list(model.image_size),
        "prefix_tokens": model.vision.num_prefix_tokens,
        "patches": model.vision.num_patches,
        "width": model.config.embed_size,
        "max_words": model.config.max_words,
        "max_dense_words": model.config.max_dense_words,
        "descriptions": model.head.uses_description,
    }


def _check_free(folder: Path, names: list[str] | tuple[str, ...]) -> None:
    """Raise `ExportError` for a file of these names that no export wrote, or that was changed since."""
    facts = read_json(folder / FACTS)
    lists = [facts[key] for key in ("files", "coming") if "seps_export" in facts and isinstance(facts.get(key), dict)]
    for name in names:
        path = folder / name
        known = [listed[name] for listed in lists if name in listed]
        mine = bool(lists) if name == FACTS else path.is_file() and bool(known) and sha256(path) in known
        if os.path.lexists(path) and not mine:
            raise in_the_way(path)
