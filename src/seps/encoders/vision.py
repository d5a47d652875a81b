"""Vision encoders: pixels in [0, 1] to prefix tokens and patches, with the counts told and never guessed.

Shapes: B images, H x W pixels, P prefix tokens (CLS, registers), N = h * w patches, C width.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.files import load_json

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_NORMALISATION = {
    "vit": HALF,
    "beit": HALF,
    "siglip_vision_model": HALF,
    "clip_vision_model": CLIP,
    "chinese_clip_vision_model": CLIP,
    "altclip_vision_model": CLIP,
}
_PREFIX = {
    "vit": 1,
    "beit": 1,
    "clip_vision_model": 1,
    "chinese_clip_vision_model": 1,
    "altclip_vision_model": 1,
    "dinov2": 1,
    "deit": 2,
}
_PREFIX |= {"swin": 0, "swinv2": 0, "donut-swin": 0, "siglip_vision_model": 0}
_FIXED_WINDOW = ("swin", "donut-swin")
_NORM_ON_POOLED_ONLY = ("clip_vision_model", "chinese_clip_vision_model", "altclip_vision_model")

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """What an encoder expects of its pixels: mean and std per channel, and a size (h, w) if one is stated."""

    mean: Triple
    std: Triple
    size: tuple[int, int] | None = None


class VisionEncoder(nn.Module):
    """Base of every vision encoder: `forward(pixels (B, 3, H, W) in [0, 1]) -> (B, P + N, C)`.

    Prefix tokens come first: `tokens[:, :num_prefix_tokens]`. Patches follow row by row: `grid_for(H, W)`.
    Normalisation happens inside, so that one data pipeline serves every encoder.
    """

    mean: Tensor
    std: Tensor
    early_width: int | None = None
    """F of `forward_with_early`; None: this encoder has no features of patches by themselves."""

    def __init__(
        self,
        *,
        width: int,
        num_prefix_tokens: int,
        image_size: tuple[int, int],
        stride: tuple[int, int],
        preprocessing: Preprocessing,
        min_size: int = 1,
    ) -> None:
        super().__init__()
        self.width = width
        self.num_prefix_tokens = num_prefix_tokens
        self.stride = stride
        self.min_size = min_size
        self.image_size = image_size
        self.grid = self.grid_for(*image_size)
        # Not in the state dict: checkpoints hold what is learned, and these follow from the encoder's name.
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing.std).view(1, 3, 1, 1), persistent=False)

    @property
    def num_patches(self) -> int:
        """Patches at `image_size`, prefix tokens not counted."""
        return self.grid[0] * self.grid[1]

    def grid_for(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches for an image size. Raises ValueError for a size that does not fit."""
        rows, columns = self.stride
        if height % rows or width % columns or min(height, width) < max(self.min_size, 1):
            floor = f", each at least {self.min_size}" if self.min_size > 1 else ""
            raise ValueError(
                f"Image size {height}x{width} does not fit this encoder: height must be a multiple of {rows} "
                f"and width of {columns}{floor}. The nearest that fits is "
                f"{self._fit(height, rows)}x{self._fit(width, columns)}."
            )
        return height // rows, width // columns

    def _fit(self, size: int, stride: int) -> int:
        smallest = -(-self.min_size // stride) * stride
        return max(round(size / stride) * stride, smallest)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) float in [0, 1] -> tokens (B, P + N, C). Raises ValueError on other shapes."""
        normalised = self.normalise(pixels)
        grid = self.grid_for(pixels.shape[2], pixels.shape[3])
        tokens = self.encode(normalised)
        self._check_count(tokens, grid)
        return tokens

    def _check_count(self, tokens: Tensor, grid: tuple[int, int]) -> None:
        rows, columns = grid
        if tokens.shape[1] != self.num_prefix_tokens + rows * columns:
            raise ValueError(
                f"The encoder gave {tokens.shape[1]} tokens for a {rows}x{columns} grid and "
                f"{self.num_prefix_tokens} prefix tokens: this architecture is not supported."
            )

    def forward_with_early(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of `forward`, and each patch before anything is mixed between patches: (B, P + N, C), (B, N, F).

        The second carries no gradient. Raises ValueError on other shapes, and for an encoder without `early_width`.
        """
        if self.early_width is None:
            raise ValueError(f"The encoder {type(self).__name__} has no features of patches by themselves.")
        normalised = self.normalise(pixels)
        grid = self.grid_for(pixels.shape[2], pixels.shape[3])
        tokens, early = self.encode_with_early(normalised)
        self._check_count(tokens, grid)
        return tokens, onto_grid(early.detach(), grid)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) float in [0, 1], less the mean, over the std. Raises ValueError on other shapes."""
        if pixels.ndim != 4 or pixels.shape[1] != 3 or not pixels.is_floating_point():
            raise ValueError(
                f"Pixels must be a float tensor (B, 3, H, W) with values in [0, 1]; got {pixels.dtype} of "
                f"shape {tuple(pixels.shape)}."
            )
        return (pixels.to(self.mean.dtype) - self.mean) / self.std

    def set_normalisation(self, mean: Triple, std: Triple) -> None:
        """Normalise by other figures than the encoder was trained with."""
        self.mean = torch.tensor(mean, dtype=self.mean.dtype, device=self.mean.device).view(1, 3, 1, 1)
        self.std = torch.tensor(std, dtype=self.std.dtype, device=self.std.device).view(1, 3, 1, 1)

    def encode(self, normalised: Tensor) -> Tensor:
        """Normalised pixels (B, 3, H, W) -> tokens (B, P + N, C); each encoder's own part."""
        raise NotImplementedError

    def encode_with_early(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """`encode`, and what it is made from: a map (B, F, h', w') or (B, N, F), on the grid of patches or a finer
        one; the own part of an encoder with `early_width`."""
        raise NotImplementedError


def onto_grid(early: Tensor, grid: tuple[int, int]) -> Tensor:
    """Average features of a finer grid onto the grid of patches: a map (B, F, h', w') or rows (B, N', F) -> (B, N, F).

    Raises ValueError where the number of rows is that of no such grid.
    """
    if early.ndim == 3:
        finer = math.isqrt(early.shape[1] // (grid[0] * grid[1]))
        if finer == 1 and early.shape[1] == grid[0] * grid[1]:
            return early
        if early.shape[1] != finer * finer * grid[0] * grid[1]:
            raise ValueError(f"The encoder embeds {early.shape[1]} patches, which is no grid over {grid[0]}x{grid[1]}.")
        early = early.transpose(1, 2).reshape(len(early), -1, grid[0] * finer, grid[1] * finer)
    size = (early.shape[2] // grid[0], early.shape[3] // grid[1])
    return F.avg_pool2d(early, size).flatten(2).transpose(1, 2)


class TransformersVision(VisionEncoder):
    """A transformers vision model (ViT, Swin, CLIP, SigLIP, DINOv2, ...) behind the small interface.

    CLIP normalises only the token it pools; here its final norm is applied to every token, so that patches
    are on the same scale as CLS and no parameter is left without gradient.
    """

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, image_size: tuple[int, int]) -> None:
        config: Any = model.config
        prefix = count_prefix(config)
        super().__init__(
            stride=patch_stride(config),
            width=int(config.hidden_size),
            num_prefix_tokens=prefix if prefix is not None else 0,
            image_size=image_size,
            preprocessing=preprocessing,
            min_size=_min_size(config),
        )
        self.model = drop_pooling(model)
        self._interpolates = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        self._final_norm = config.model_type in _NORM_ON_POOLED_ONLY
        self._windows = [
            (module, module.window_size, module.shift_size)
            for module in model.modules()
            if hasattr(module, "set_shift_and_window_size")
        ]
        if prefix is None:
            self.num_prefix_tokens = self._measure_prefix()
        if hasattr(model, "embeddings"):
            self.early_width = int(getattr(config, "embed_dim", config.hidden_size))

    def encode(self, normalised: Tensor) -> Tensor:
        # Swin clamps its windows to a small input and keeps them so: without this, the features of an image
        # would depend on the sizes seen before it.
        for module, window, shift in self._windows:
            module.window_size, module.shift_size = window, shift
        extra = {"interpolate_pos_encoding": True} if self._interpolates else {}
        tokens: Tensor = self.model(pixel_values=normalised, **extra).last_hidden_state
        if self._final_norm:
            tokens = self.model.post_layernorm(tokens)  # type: ignore[operator]
        return tokens

    def encode_with_early(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """The embedded patches with their positions, those of Swin on its finer first grid."""
        embeddings: Any = self.model.embeddings
        takes = "interpolate_pos_encoding" in inspect.signature(embeddings.forward).parameters
        # Computed a second time: one convolution, where keeping all hidden states would cost their memory.
        with torch.no_grad():
            found = embeddings(normalised, **({"interpolate_pos_encoding": True} if takes else {}))
        tokens: Tensor = found[0] if isinstance(found, tuple) else found
        return self.encode(normalised), tokens[:, self.num_prefix_tokens :]

    def _measure_prefix(self) -> int:
        kind, tokens = self.model.config.model_type, 0  # type: ignore[union-attr]
        try:
            with torch.no_grad():
                tokens = self.encode(torch.zeros(1, 3, *self.image_size)).shape[1]
        except TypeError as error:  # it wants more than pixels, as SigLIP 2 with free image shapes does
            raise ValueError(f"The vision model {kind} is not supported: {error}") from error
        if tokens < self.num_patches:
            raise ValueError(
                f"The vision model {kind} is not supported: it gave {tokens} tokens for a "
                f"{self.grid[0]}x{self.grid[1]} grid."
            )
        return tokens - self.num_patches


def count_prefix(config: Any) -> int | None:
    """Tokens before the patches by the model's configuration, or None for a family that must be measured."""
    registers = getattr(config, "num_register_tokens", None)
    return 1 + int(registers) if registers is not None else _PREFIX.get(config.model_type)


def pair(value: Any) -> tuple[int, int]:
    """(vertical, horizontal) of one number for both or of two, as configurations state sizes."""
    vertical, horizontal = (value, value) if isinstance(value, int) else tuple(value)
    return int(vertical), int(horizontal)


def patch_stride(config: Any) -> tuple[int, int]:
    """Pixels per patch (vertical, horizontal), over all merging stages."""
    patch = getattr(config, "patch_size", None)
    if patch is None or not hasattr(config, "hidden_size"):
        raise ValueError(
            f"The vision model {config.model_type} is not supported: it is not made of equal patches "
            "(its configuration states no patch_size or no hidden_size)."
        )
    rows, columns = pair(patch)
    depths = getattr(config, "depths", None)
    merged = 2 ** (len(depths) - 1) if depths else 1
    return rows * merged, columns * merged


def _min_size(config: Any) -> int:
    # Swin's position biases are tables for one window size: a last stage smaller than a window has none.
    return int(config.window_size * max(patch_stride(config))) if config.model_type in _FIXED_WINDOW else 1


def drop_pooling(module: nn.Module) -> nn.Module:
    """Take away the parts that only pooled or masked outputs use: they would never receive a gradient."""
    model: Any = module
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    if hasattr(model, "use_head"):
        model.use_head = False
    if getattr(model, "head", None) is not None:
        model.head = nn.Identity()
    embeddings: Any = getattr(model, "embeddings", None)
    if getattr(embeddings, "mask_token", None) is not None:
        embeddings.mask_token = None
    return module


def read_preprocessing(folder: Path | None, config: Any) -> Preprocessing:
    """Mean, std and size from a folder's preprocessor_config.json, else the family's own figures."""
    mean, std = _NORMALISATION.get(config.model_type, IMAGENET)
    stated = _stated(folder)
    if stated.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    elif len(stated.get("image_mean") or ()) == 3 and len(stated.get("image_std") or ()) == 3:
        mean, std = tuple(stated["image_mean"]), tuple(stated["image_std"])
    cropped = stated.get("do_center_crop", True) and stated.get("crop_size")
    return Preprocessing(mean, std, _size(cropped or stated.get("size")))


def _stated(folder: Path | None) -> dict[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name if folder else None
        if path and path.is_file():
            try:
                stated = load_json(path)
            except ValueError as error:
                raise ValueError(f"{path} is not valid JSON ({error}). Repair it, or delete it.") from error
            return dict(stated.get("image_processor", stated))
    return {}


def _size(stated: Any) -> tuple[int, int] | None:
    match stated:
        case int():
            return stated, stated
        case {"height": height, "width": width}:
            return int(height), int(width)
        case {"shortest_edge": side}:
            return int(side), int(side)
    return None
