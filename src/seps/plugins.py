"""Ideas of your own outside the network (heads, encoders, rows of a comparison), and the Python files they are in.

A file is loaded because its user named it, with `--plugin FILE` or `load_plugin(FILE)`. A model folder names the ideas
it needs and never a file: nothing in a folder, a store or a data set makes code run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Literal

from seps.registry import RegistryError, Thing, register

PLUGIN_MODULE = "seps_plugin_"
"""How the names of their modules begin."""


class PluginError(ValueError):
    """A file of ideas that cannot be loaded; the message says why, and where in it."""


def load_plugin(file: str | os.PathLike[str]) -> ModuleType:
    """Run a Python file that registers ideas; the same file is run once per process.

    Raises `PluginError` where there is none, or where it fails.
    """
    path = Path(os.path.realpath(file))
    if not path.is_file():
        raise PluginError(f"There is no Python file {file} to load ideas from. Check the path.")
    # By its place: two files of one name are two modules.
    name = f"{PLUGIN_MODULE}{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{file} is not a Python file; name one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does: its classes may be looked up there
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[name]
        raise PluginError(
            f"{file}{_line(path, error)} cannot be loaded: it ends the program instead of registering ideas. What it "
            'does as a program belongs under `if __name__ == "__main__":`.'
        ) from error
    except Exception as error:
        del sys.modules[name]
        told = f"{error}" if isinstance(error, RegistryError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{file}{_line(path, error)} cannot be loaded: {told}") from error
    return module


def _line(path: Path, error: BaseException) -> str:
    """ ", line N" of the file where it failed; nothing where that is not known."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.filename == str(path) else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def load_plugins(files: Iterable[str | os.PathLike[str]] | str | os.PathLike[str]) -> None:
    """`load_plugin` of each, or of one."""
    for file in (files,) if isinstance(files, str | os.PathLike) else files:
        load_plugin(file)


def plugin_modules() -> list[ModuleType]:
    """The files that were loaded, as modules."""
    return [module for name, module in sys.modules.items() if name.startswith(PLUGIN_MODULE)]


def register_head(name: str) -> Callable[[Thing], Thing]:
    """A head of your own: a class made as `Mine(config)` with a `SlimmingConfig`, a `seps.retrieval.heads.Head`.

    Its `forward(images, texts)` gives the similarities. A head is scored by its own `score`; there is no fast form.
    """
    return register("head", name)


def register_encoder(name: str, kind: Literal["vision", "text"] = "vision") -> Callable[[Thing], Thing]:
    """An encoder of your own: what makes a `seps.encoders.VisionEncoder`, or with kind="text" a `TextEncoder`.

    A vision encoder is made as `mine(image_size=(height, width))`, or `mine()` where no size is set; a text encoder as
    `mine()`. Its name then stands where that of a preset may: `--model.vision NAME`.
    """
    if kind not in ("vision", "text"):
        raise RegistryError(f"An encoder is of the kind 'vision' or 'text', not {kind!r}.")
    return register(f"{kind} encoder", name)


def register_row(
    name: str, title: str, *, suite: str = "baselines", group: str = "", reference: str | None = None
) -> Callable[[Thing], Thing]:
    """A row of your own in `seps compare`: a function from the shared recipe (`RunConfig`) to that of this row.

    suite: "baselines" or "ablation". reference: the row that differences are taken to. group: the table it stands in.
    """
    return register("row", name, title=title, suite=suite, group=group, reference=reference)
