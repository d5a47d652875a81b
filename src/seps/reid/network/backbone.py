"""Backbones of re-identification: any vision encoder, with a stride below its own by choice.

A plain ViT then cuts overlapping patches, and its positions are resized to the larger grid (TransReID); the
embedded EfficientNet leaves out its last strides (the "last stride 1" of re-identification baselines).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from seps.encoders import EfficientNetLite0, Preprocessing, VisionEncoder, ViT, plain_vit, vision_encoder
from seps.encoders.vision import TransformersVision
from seps.encoders.vit import build_vit, describe_vit


def build_backbone(
    name: str, image_size: tuple[int, int], stride: int | None = None, *, pretrained: bool = True
) -> VisionEncoder:
    """The encoder `name` for images of (height, width) `image_size`; `stride` None leaves its own.

    Raises ValueError for a size or stride that does not fit, EncoderUnavailable when weights cannot be had.
    """
    if Path(name).expanduser().is_file():
        made = vision_encoder(name, image_size=image_size)
        _refuse_stride(made, stride, "an encoder from a file of weights")
        return made
    if stride is None:
        return vision_encoder(name, image_size=image_size, pretrained=pretrained)
    if name == "mini":
        # A smaller stride accepts sizes the full one does not, so the size is checked after the change.
        mini = EfficientNetLite0((32, 32), pretrained=pretrained)
        shorten_strides(mini, stride)
        mini.image_size, mini.grid = image_size, mini.grid_for(*image_size)
        return mini
    inner = vision_encoder(name, image_size=None, pretrained=pretrained)
    if isinstance(inner, ViT):  # a saved model's own files: what was trained from a file of weights
        _refuse_stride(inner, stride, "this encoder")
        return vision_encoder(name, image_size=image_size, pretrained=pretrained)
    return OverlappingPatches(inner, stride, image_size)


def plain_backbone(
    name: str, image_size: tuple[int, int], stride: int | None = None, *, pretrained: bool = True
) -> ViT:
    """The encoder `name` as a plain ViT with its trained projection, positions resized to `image_size` once.

    `name` may be a file of weights. Raises ValueError for a stride other than the patch size and for an encoder that is
    no plain ViT, EncoderUnavailable when weights cannot be had.
    """
    if name in ("mini", "dinov2-s-focus"):
        raise ValueError(
            f"model.projection = 'trained': the encoder {name!r} has none; use clip-b-16 or a file of CLIP."
        )
    made = plain_vit(name, image_size=image_size, pretrained=pretrained)
    _refuse_stride(made, stride, "model.projection = 'trained'")
    return made


def _refuse_stride(encoder: VisionEncoder, stride: int | None, why: str) -> None:
    patch = encoder.stride[0]
    if stride is not None and stride != patch:
        raise ValueError(
            f"model.stride = {stride}, but with {why} patches do not overlap: set it to {patch} or leave it out."
        )


def describe_backbone(backbone: nn.Module) -> dict[str, Any] | None:
    """What `build_backbones` needs of a plain ViT, so that a run can be read where its file of weights is not."""
    return describe_vit(backbone) if isinstance(backbone, ViT) else None


def build_backbones(stated: Mapping[str, Any] | None, count: int) -> list[VisionEncoder] | None:
    """`count` encoders of `describe_backbone`, with random weights; None where there is no description."""
    return None if stated is None else [build_vit(stated) for _ in range(count)]


def shorten_strides(encoder: EfficientNetLite0, stride: int) -> None:
    """Make the embedded encoder's grid finer, in place: its last stages no longer halve the picture."""
    if stride not in (8, 16, 32):
        raise ValueError(f"The stride of the embedded encoder can be 8, 16 or 32, not {stride}.")
    for block in reversed(encoder.blocks):
        if encoder.stride[0] == stride:
            return
        depthwise: Any = block.depthwise
        if depthwise.pad is not None:
            depthwise.pad = None
            depthwise.conv.stride = (1, 1)
            depthwise.conv.padding = (depthwise.conv.kernel_size[0] // 2,) * 2
            encoder.stride = (encoder.stride[0] // 2, encoder.stride[1] // 2)


def _patch_convolution(encoder: TransformersVision) -> nn.Conv2d | None:
    """The convolution that cuts the patches of a plain ViT (ViT, CLIP, SigLIP, DINOv2), if it is one."""
    embeddings: Any = getattr(encoder.model, "embeddings", None)
    if getattr(embeddings, "interpolate_pos_encoding", None) is None or hasattr(encoder.model.config, "depths"):
        return None
    inner = getattr(embeddings, "patch_embedding", None) or getattr(embeddings, "patch_embeddings", None)
    found = getattr(inner, "projection", inner)
    return found if isinstance(found, nn.Conv2d) else None


class ResizedPositions:
    """Asks a ViT for positions of the real grid: its own arithmetic takes stride = patch size for granted."""

    def __init__(self, encoder: OverlappingPatches, original: Any) -> None:
        # Not the module itself, which would be registered as its own child's child.
        self.grid_for, self.patch, self.original = encoder.grid_for, encoder.patch, original

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        rows, columns = self.grid_for(height, width)
        resized: Tensor = self.original(embeddings, rows * self.patch, columns * self.patch)
        return resized


class OverlappingPatches(VisionEncoder):
    """A plain ViT with its patches `stride` pixels apart: (H - patch) // stride + 1 rows, columns alike.

    Raises ValueError for another encoder, or a stride that leaves gaps between the patches.
    """

    def __init__(self, inner: VisionEncoder, stride: int, image_size: tuple[int, int]) -> None:
        if not isinstance(inner, TransformersVision) or (convolution := _patch_convolution(inner)) is None:
            raise ValueError("model.stride can be set for plain ViTs and 'mini', not for this encoder: leave it out.")
        self.patch = int(convolution.kernel_size[0])
        if not 1 <= stride <= self.patch:
            raise ValueError(f"The stride must be from 1 to the patch size {self.patch}, not {stride}.")
        mean, std = (tuple(buffer.flatten().tolist()) for buffer in (inner.mean, inner.std))
        super().__init__(
            width=inner.width,
            num_prefix_tokens=inner.num_prefix_tokens,
            image_size=image_size,
            stride=(stride, stride),
            preprocessing=Preprocessing(mean, std),
        )
        self.inner, self.early_width = inner, inner.early_width
        convolution.stride = (stride, stride)
        embeddings: Any = inner.model.embeddings
        embeddings.interpolate_pos_encoding = ResizedPositions(self, embeddings.interpolate_pos_encoding)
        self.eval()

    def grid_for(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches; pixels that do not fill a step at the border are left out."""
        if min(height, width) < self.patch:
            raise ValueError(f"Image size {height}x{width} is smaller than a patch of {self.patch} pixels.")
        return (height - self.patch) // self.stride[0] + 1, (width - self.patch) // self.stride[1] + 1

    def encode(self, normalised: Tensor) -> Tensor:
        """Normalised pixels (B, 3, H, W) -> tokens (B, P + N, C)."""
        return self.inner.encode(normalised)

    def encode_with_early(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """See `VisionEncoder.encode_with_early`."""
        return self.inner.encode_with_early(normalised)
