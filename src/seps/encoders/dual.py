"""Dual encoders as they were published: one vector per picture and one per sentence, nothing to train.

`Embedder` is the whole interface. `DualEncoder` is a transformers model behind it: its own image processor (with
Pillow), its own tokenizer and padding, and its own `get_image_features` and `get_text_features`.

Shapes: B pictures, T sentences, N patches of a picture, C width.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.files import read_json

from .parts import PatchParts, cls_parts, probe_parts
from .text import load_tokenizer, longest_text, several_texts, whole_characters
from .weights import EncoderUnavailable, first_line, load_model, quiet, read_config, refuse_missing, transformers_module

UNMASKED = ("siglip", "siglip2")
"""Families that were trained on texts padded to their full length, without a mask, in lower case."""
FAMILIES = ("clip", "siglip", "siglip2", "chinese_clip", "altclip")
"""`model_type` of the models that can be used."""
ENGLISH_TOKENS = 100_000
"""A vocabulary of fewer tokens is that of a CLIP or SigLIP trained on English."""
LONGEST = 16
_TOKENIZING = threading.Lock()
"""A tokenizer keeps padding and limit as a state, which calls from several threads would change for each other."""
SAMPLED = 4096
"""Values of each tensor that `digest` reads."""


@dataclass(frozen=True)
class DualPreset:
    """A published dual encoder by a short name."""

    hub: str
    size: str
    languages: str = "English"


DUAL_PRESETS: dict[str, DualPreset] = {
    "clip-b-32": DualPreset("openai/clip-vit-base-patch32", "0.6 GB"),
    "clip-b-16": DualPreset("openai/clip-vit-base-patch16", "0.6 GB"),
    "siglip-b-16": DualPreset("google/siglip-base-patch16-224", "0.8 GB"),
    "siglip2-b-16": DualPreset("google/siglip2-base-patch16-224", "1.5 GB", "many languages"),
    "siglip2-so400m": DualPreset("google/siglip2-so400m-patch14-384", "4.5 GB", "many languages"),
}


def presets_sentence() -> str:
    """The presets, each with its size and languages."""
    return ", ".join(f"{name} ({preset.size}, {preset.languages})" for name, preset in DUAL_PRESETS.items())


class Embedder(Protocol):
    """A model that gives pictures and sentences vectors in one space, as CLIP does; search needs no more of it.

    The score of a pair is the cosine of its vectors. Shapes: B pictures, T sentences, C width of the space.
    """

    width: int
    """C."""
    side: int
    """Pixels of the longest side that `prepare` resizes to; pictures may be decoded at twice that."""
    languages: tuple[str, ...]
    """Languages that it reads, as ISO 639 codes; empty: not known, or many."""
    scale: float
    """The model's logit scale: a cosine that is larger by 1 / `scale` makes a match e times likelier."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    def prepare(self, image: Any) -> Any:
        """What the model takes of one PIL image, RGB."""
        ...

    def image_vectors(self, prepared: Sequence[Any]) -> Tensor:
        """(B, C) float32 of length one, from what `prepare` gave."""
        ...

    def text_vectors(self, texts: Sequence[str]) -> Tensor:
        """(T, C) float32 of length one."""
        ...

    def cut(self, text: str) -> tuple[int, int] | None:
        """Tokens of a text and how many the model reads, where these are fewer; else None."""
        ...

    def digest(self) -> str:
        """Hex digest that identifies the weights."""
        ...


class DualEncoder(nn.Module):
    """CLIP, SigLIP, SigLIP 2, Chinese-CLIP or AltCLIP of transformers as an `Embedder`. Any thread may call it."""

    def __init__(self, model: nn.Module, processor: Any, tokenizer: Any) -> None:
        super().__init__()
        config: Any = model.config
        self.model = model.eval()
        self.family = str(config.model_type)
        self.processor, self.tokenizer = processor, tokenizer
        self.side = max([*_sizes(processor), 224])
        self.max_length = longest_text(config.text_config, tokenizer)
        # SigLIP 2 of one image size is a "siglip" with the 256,000 tokens of many languages; Chinese-CLIP and AltCLIP
        # read several as well.
        english = self.family in ("clip", "siglip") and len(tokenizer) < ENGLISH_TOKENS
        self.languages: tuple[str, ...] = ("en",) if english else ()
        self.scale = math.exp(float(getattr(model, "logit_scale").detach()))  # noqa: B009
        self.width = int(self.text_vectors(["a"]).shape[1])

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def prepare(self, image: Any) -> dict[str, Tensor]:
        """The processor's tensors for one PIL image: resized, cropped and normalised as the model's own are.

        An image with one side more than `LONGEST` times the other is cut to its middle first: resized by its shorter
        side, a strip one pixel wide would become hundreds of thousands of pixels long.
        """
        width, height = image.size
        across, down = min(width, LONGEST * height), min(height, LONGEST * width)
        if (across, down) != (width, height):
            left, top = (width - across) // 2, (height - down) // 2
            image = image.crop((left, top, left + across, top + down))
        return dict(self.processor(images=[image], return_tensors="pt"))

    @torch.no_grad()
    def image_vectors(self, prepared: Sequence[Any]) -> Tensor:
        """(B, C) float32 of length one."""
        return self._pooled(self._model.get_image_features(**self._stacked(prepared)))

    def patch_parts(self, prepared: Any, masked: Tensor | None = None) -> PatchParts:
        """The vector of one prepared picture as a sum over its patches.

        With `masked` (N,) it is the vector where the last attention does not see those patches.
        """
        inputs, vision = self._stacked([prepared]), self._model.vision_model
        if "spatial_shapes" in inputs:
            rows, columns = map(int, inputs["spatial_shapes"][0])
            return probe_parts(vision, inputs, (rows, columns), masked)
        size, (height, width) = int(vision.config.patch_size), inputs["pixel_values"].shape[-2:]
        grid = (height // size, width // size)
        if self.family in UNMASKED:
            return probe_parts(vision, inputs, grid, masked)
        return cls_parts(vision, self._model.visual_projection, inputs, grid, masked)

    def seen(self, width: int, height: int) -> tuple[float, float]:
        """Which part of a picture's height and of its width, round its middle, `prepare` keeps: 1 is all of it."""
        across, down = min(width, LONGEST * height), min(height, LONGEST * width)
        kept_down, kept_across = float(down), float(across)
        size, crop = getattr(self.processor, "size", None), getattr(self.processor, "crop_size", None)
        shortest = getattr(size, "shortest_edge", None)
        if shortest and getattr(self.processor, "do_center_crop", False) and crop is not None:
            unit = min(down, across) / shortest
            kept_down, kept_across = min(down, crop["height"] * unit), min(across, crop["width"] * unit)
        return kept_down / height, kept_across / width

    @torch.no_grad()
    def text_vectors(self, texts: Sequence[str]) -> Tensor:
        """(T, C) float32 of length one; texts are cut where the model ends reading.

        Raises ValueError for a text that is not valid Unicode.
        """
        return self._pooled(self._model.get_text_features(**self._tokens(texts)))

    def cut(self, text: str) -> tuple[int, int] | None:
        """Tokens of a text and how many the model reads, where these are fewer; else None."""
        with _TOKENIZING:
            count = len(self.tokenizer(self._cased(text), verbose=False)["input_ids"])
        return (count, self.max_length) if count > self.max_length else None

    def digest(self) -> str:
        """Names, shapes and some values of every tensor: all of a large model's would take seconds at each search."""
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // SAMPLED)].cpu().contiguous()
            found.update(some.view(torch.uint8).numpy().data)
        return found.hexdigest()

    @property
    def _model(self) -> Any:
        return self.model

    def _stacked(self, prepared: Sequence[Any]) -> dict[str, Tensor]:
        return {name: torch.cat([one[name] for one in prepared]).to(self.device) for name in prepared[0]}

    def _cased(self, text: str) -> str:
        text = whole_characters(text)
        return text.lower() if self.family in UNMASKED else text

    def _tokens(self, texts: Sequence[str]) -> dict[str, Tensor]:
        whole = self.family in UNMASKED
        with _TOKENIZING:
            encoded = self.tokenizer(
                [self._cased(text) for text in several_texts(texts)],
                padding="max_length" if whole else True,
                truncation=True,
                max_length=self.max_length,
                return_attention_mask=not whole,
                return_tensors="pt",
            )
        names = ("input_ids",) if whole else ("input_ids", "attention_mask")
        return {name: encoded[name].to(self.device) for name in names}

    def _pooled(self, found: Any) -> Tensor:
        vectors: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return F.normalize(vectors.float(), dim=-1)


def _sizes(processor: Any) -> list[int]:
    """Lengths that a processor resizes to."""
    size = getattr(processor, "size", None)
    if size is None:  # free shapes, as many patches as fit
        return [2 * int(processor.patch_size * processor.max_num_patches**0.5)]
    names = ("shortest_edge", "longest_edge", "height", "width")
    return [int(value) for value in (getattr(size, name, None) for name in names) if value]


def is_dual(folder: Path) -> bool:
    """Whether a folder holds a model of transformers, not one of seps, by its config.json alone.

    That it has two towers is checked when it is loaded (`dual_encoder`).
    """
    values = read_json(folder / "config.json")
    return "model_type" in values and "format" not in values


def refuse_other_kind(folder: Path) -> Any:
    """The configuration of a dual encoder's folder. Raises EncoderUnavailable for a model of another kind."""
    config = read_config(folder)
    kind = str(config.model_type)
    if kind not in FAMILIES:
        raise EncoderUnavailable(
            f"The model in {folder} is of the kind {kind}, which does not put pictures and sentences into one space. "
            f"Kinds that do and are known here: {', '.join(FAMILIES)}. Presets: {presets_sentence()}."
        )
    return config


def dual_encoder(folder: str | Path) -> DualEncoder:
    """The dual encoder of a folder, float32, in eval mode.

    Raises EncoderUnavailable where weights, tokenizer or image processor are missing, cut off or damaged, and for a
    model of another kind.
    """
    folder = Path(folder).expanduser()
    config = refuse_other_kind(folder)
    processor = _image_processor(folder)
    tokenizer = load_tokenizer(folder)
    model, missing = load_model(folder, config)
    refuse_missing(model, model, missing, str(folder))
    try:
        return DualEncoder(model, processor, tokenizer)
    except (RuntimeError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise EncoderUnavailable(
            f"The tokenizer in {folder} does not fit the model ({type(error).__name__}: {error}): their files come "
            "from different models. Download the model again."
        ) from error


def _image_processor(folder: Path) -> Any:
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((folder / name).is_file() for name in names):
        raise EncoderUnavailable(
            f"The folder {folder} has no {names[0]}, which says how the model's pictures are resized, cropped and "
            "normalised. Save its processor there: AutoProcessor.from_pretrained(MODEL).save_pretrained(FOLDER)."
        )
    transformers = transformers_module()
    try:
        with quiet():
            return transformers.AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, backend="pil"
            )
    except Exception as error:  # broken JSON, an unknown class: many types, one sentence
        raise EncoderUnavailable(f"The image processor in {folder} cannot be loaded: {first_line(error)}.") from error
