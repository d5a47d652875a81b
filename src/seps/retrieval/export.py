"""A retrieval model as ONNX files, for programs without torch.

    image.onnx     pixels (B, 3, H, W) in [0, 1] -> patches (B, P + N, C)
    text.onnx      ids and mask (T, M) -> words (T, M, C) and lengths (T,); captions and descriptions alike. Of a model
                   that reads short queries by a projection of their own also sentences (T,): True for descriptions
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
from torch.nn import functional as F

from seps.encoders.saved import has_text_files
from seps.export import (
    OPSET,
    SCORE_AXES,
    ExportError,
    ScorePairs,
    check_packages,
    export_onnx,
    score_inputs,
    would_overwrite,
)
from seps.export import largest_difference as difference
from seps.files import read_json, sha256, write_json
from seps.parsing import as_object
from seps.retrieval.heads import Head, ImageFeatures, TextFeatures
from seps.retrieval.languages import STOP_WORDS
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


class ShortQueries(nn.Module):
    """`seps.retrieval.languages.is_short` by token ids: texts of fewer than three words that are no function words.

    Raises ExportError for a tokenizer that marks the beginnings or the ends of words, unlike WordPiece.
    """

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        vocabulary = vocabulary_size(model)
        tokens = model.text.tokenizer.convert_ids_to_tokens(list(range(vocabulary)))
        if any(token.startswith(("\u2581", "\u0120")) or token.endswith("</w>") for token in tokens):
            raise ExportError(
                f"The text encoder {model.config.text} is not exported with short queries: which of its tokens begin a "
                'word is known of WordPiece alone. Set "short_queries" of the model to false.'
            )
        goes_on = torch.tensor([token.startswith("##") for token in tokens])
        special = set(model.text.special_ids)
        letters = [number not in special and any(map(str.isalnum, token)) for number, token in enumerate(tokens)]
        self.register_buffer("goes_on", goes_on)
        self.register_buffer("begins", torch.tensor(letters) & ~goes_on)
        self.register_buffer("function", torch.tensor([token.lower() in STOP_WORDS for token in tokens]))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Ids and mask (T, M) -> (T,) bool."""
        goes_on, begins, function = (F.embedding(ids, table.float()[:, None])[:, :, 0] for table in self.buffers())
        after = F.pad(goes_on[:, 1:], (0, 1))  # "be" of "be ##ach" is no function word
        content = mask.float() * begins * (1 - function * (1 - after))
        return content.sum(dim=1) < 2.5


class IdsToWords(nn.Module):
    """Token ids to words in the joint space."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.model = model
        self.short = ShortQueries(model) if model.config.short_queries else None

    def forward(self, ids: Tensor, mask: Tensor, sentences: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ids and mask (T, M) -> words (T, M, C), the valid ones first, and their number (T,).

        `sentences` (T,) bool: also short ones are read as sentences, as descriptions are.
        """
        short = None if self.short is None or sentences is None else self.short(ids, mask) & ~sentences
        words, valid = self.model.encode_words(ids, mask, short)
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
    net = head.network
    score = HeadScore(head) if net is None else ScorePairs(net, descriptions=head.uses_description)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, *model.image_size, generator=generator)
    mask = torch.arange(7)[None, :] < torch.tensor([7, 4, 1])[:, None]
    ids = torch.randint(0, vocabulary_size(model), (3, 7), generator=generator)
    texts, axes = {"ids": ids, "mask": mask}, {"ids": {0: "text", 1: "word"}, "mask": {0: "text", 1: "word"}}
    if model.config.short_queries:
        texts["sentences"], axes["sentences"] = torch.tensor([False, True, False]), {0: "text"}
    tokens = model.vision.num_prefix_tokens + model.vision.num_patches
    parts: tuple[tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]], list[str]], ...] = (
        (PixelsToTokens(model), {"pixels": pixels}, {"pixels": {0: "image"}}, ["patches"]),
        (IdsToWords(model), texts, axes, ["words", "lengths"]),
        (
            score,
            score_inputs(tokens, model.config.embed_size, descriptions=head.uses_description),
            SCORE_AXES,
            ["similarity"],
        ),
    )
    differences = {}
    for name, (module, inputs, free, outputs) in zip(_GRAPHS, parts, strict=True):
        export_onnx(module.eval(), folder / name, inputs, free, outputs)
        differences[name] = difference(module, folder / name, inputs)
    return differences


def vocabulary_size(model: RetrievalModel) -> int:
    """How many tokens the text encoder embeds."""
    return int(model.text.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]


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
        "short_queries": model.config.short_queries,
    }


def _check_free(folder: Path, names: list[str] | tuple[str, ...]) -> None:
    """Raise `ExportError` for a file of these names that no export wrote, or that was changed since."""
    facts = read_json(folder / FACTS)
    lists = [facts[key] for key in ("files", "coming") if "seps_export" in facts and as_object(facts.get(key))]
    for name in names:
        path = folder / name
        known = [listed[name] for listed in lists if name in listed]
        mine = bool(lists) if name == FACTS else path.is_file() and bool(known) and sha256(path) in known
        if os.path.lexists(path) and not mine:
            raise would_overwrite(path)
