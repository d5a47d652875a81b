"""ONNX files: the network's score, and any module whose inputs are tensors.

The score of B images and T texts is one graph without a loop over the texts: what depends on the image alone is
computed once (`PatchSlimming.encode_images`), then every pair of an image and a text is a row of one batch of B * T.
The numbers of images, texts and words are free in the file; the number of patches is fixed, because K and Q follow
from it. Memory grows with B * T * N * C: score a large gallery in blocks.

Shapes: B images, T texts, P prefix tokens, N patches, M words of a caption, L words of a description, C width.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.files import naming
from seps.method.checks import evaluating
from seps.method.encoded import Texts
from seps.method.network import PatchSlimming

__all__ = [
    "ExportError",
    "ScorePairs",
    "check_packages",
    "export_onnx",
    "export_score",
    "largest_difference",
    "open_session",
]

OPSET = 18
"""Version of the ONNX operators in the files."""
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


class ExportError(ValueError):
    """A network that cannot be written as ONNX, or a missing package; the message says what to do."""


def check_packages() -> None:
    """Raise `ExportError` unless the packages of the extra `export` are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f"ONNX needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'seps[export]'"
        )


def would_overwrite(path: Path) -> ExportError:
    """The error for a file that an export would overwrite and did not write."""
    return ExportError(
        f"{path} is in the way: no export wrote it, or it was changed since. Nothing was written; move it away, or "
        "choose another folder."
    )


class ScorePairs(nn.Module):
    """The similarity (B, T) of `PatchSlimming` in evaluation, as one batch of all pairs, without a loop over texts.

    Inputs: images (B, P + N, C), words (T, M, C) and lengths (T,), and with `descriptions` dense (B, L, C) and
    dense_lengths (B,), where 0 marks an image without description.
    """

    def __init__(self, net: PatchSlimming, *, descriptions: bool) -> None:
        super().__init__()
        if net.config.extra_guides:
            raise ExportError(
                f"The network has the guides {sorted(net.config.extra_guides)}, and an ONNX file has no input for "
                "them; export a network without extra_guides."
            )
        if descriptions and net.config.dense == "none":
            raise ExportError("The network has dense='none' and reads no description; export it without descriptions.")
        self.net = net
        self.training = net.training

    def forward(
        self,
        images: Tensor,
        words: Tensor,
        lengths: Tensor,
        dense: Tensor | None = None,
        dense_lengths: Tensor | None = None,
    ) -> Tensor:
        """Similarity (B, T)."""
        net = self.net
        # Masked positions change nothing; with them there are never fewer words than the top-k of Eq. 5 reads.
        more = net.config.top_k if net.config.alignment == "topk" else 0
        words = F.pad(words, (0, 0, 0, more))
        dense = None if dense is None else F.pad(dense, (0, 0, 0, more))
        side = net.encode_images(images, dense=dense, dense_lengths=dense_lengths)
        mask = torch.arange(words.shape[1], device=words.device)[None, :] < lengths[:, None]

        return net.score(side, Texts.of(words, mask)).similarity


def export_score(net: PatchSlimming, path: Path | str, *, descriptions: bool | None = None) -> dict[str, Tensor]:
    """Write the score of a network as ONNX, see `ScorePairs`; the output is called `similarity`.

    Args:
        net: the network; it is exported as it is in evaluation.
        path: file to write.
        descriptions: whether the file has the inputs `dense` and `dense_lengths`. None: if the network reads
            descriptions. A network that reads them is exported without as one whose images have none.

    Returns:
        The inputs it was traced with, by name.

    Raises:
        ExportError: without the extra `export`, or for a network that has no such file.
    """
    config = net.config
    descriptions = config.dense != "none" if descriptions is None else descriptions
    inputs = score_inputs(config.num_prefix_tokens + config.num_patches, config.embed_size, descriptions=descriptions)
    export_onnx(ScorePairs(net, descriptions=descriptions), path, inputs, SCORE_AXES, ["similarity"])
    return inputs


SCORE_AXES: dict[str, dict[int, str]] = {
    "images": {0: "image"},
    "words": {0: "text", 1: "word"},
    "lengths": {0: "text"},
    "dense": {0: "image", 1: "dense_word"},
    "dense_lengths": {0: "image"},
}
"""The axes of a score's inputs whose sizes are free."""


def score_inputs(tokens: int, width: int, *, descriptions: bool) -> dict[str, Tensor]:
    """Random inputs of a score for images of `tokens` tokens; with `descriptions` one image of two has none."""
    generator = torch.Generator().manual_seed(0)

    def features(rows: int, positions: int) -> Tensor:
        return torch.randn(rows, positions, width, generator=generator)

    inputs = {"images": features(2, tokens), "words": features(3, 7), "lengths": torch.tensor([7, 1, 4])}
    if descriptions:
        inputs |= {"dense": features(2, 9), "dense_lengths": torch.tensor([9, 0])}
    return inputs


def export_onnx(
    module: nn.Module,
    path: Path | str,
    inputs: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    outputs: Sequence[str],
) -> None:
    """Write `module(*inputs.values())` in evaluation as one ONNX file; `axes` names the axes whose sizes are free.

    Raises `ExportError` without the extra `export`.
    """
    check_packages()
    names = sorted({name for key in inputs for name in axes.get(key, {}).values()})
    sizes = {name: torch.export.Dim(name, min=1, max=2**20) for name in names}
    shapes = tuple({axis: sizes[name] for axis, name in axes.get(key, {}).items()} for key in inputs)
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    try:
        quiet.setLevel(logging.ERROR)
        with (
            naming(Path(path)),
            evaluating(module),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                tuple(inputs.values()),
                path,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=shapes,
                opset_version=OPSET,
                dynamo=True,
                # Its optimiser takes the 1e-8 of min-max scaling for zero and removes it: 0 / 0 where all are equal.
                optimize=False,
                external_data=False,
                verbose=False,
            )
            _without_traces(Path(path))
    finally:
        quiet.setLevel(level)


def _without_traces(path: Path) -> None:
    """Take out of a file where each node comes from: a megabyte of lines of source, with this machine's folders."""
    import onnx

    graph = onnx.load(str(path))
    for node in graph.graph.node:
        del node.metadata_props[:]
    del graph.graph.value_info[:]
    onnx.save(graph, str(path))


def open_session(path: Path | str) -> Any:
    """An ONNX file in onnxruntime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: the warnings are about its own optimiser
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@torch.no_grad()
def largest_difference(module: nn.Module, path: Path | str, inputs: Mapping[str, Tensor]) -> float:
    """The largest difference between `module` and its ONNX file in onnxruntime, on these inputs."""
    check_packages()
    session = open_session(path)
    theirs = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    made = module(*inputs.values())
    ours = made if isinstance(made, tuple) else (made,)
    pairs = zip(ours, map(torch.from_numpy, theirs), strict=True)
    return max(float((mine - other).abs().max()) for mine, other in pairs)
