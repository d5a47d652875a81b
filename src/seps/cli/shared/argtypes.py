"""Types of the options: numbers with bounds, devices, files and folders to read and to write.

Each type raises `argparse.ArgumentTypeError` with a sentence; the parser adds the option's name.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from seps.extras import install_command, is_installed

_DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")
_MOST = 2**31 - 1


def _bounded(kind: type[int] | type[float], fits: Callable[[float], bool], what: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not math.isfinite(value) or not fits(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    convert.__name__ = what
    return convert


positive: Callable[[str], int] = _bounded(int, lambda value: 1 <= value <= _MOST, "a whole number of at least 1")
non_negative: Callable[[str], int] = _bounded(int, lambda value: 0 <= value <= _MOST, "a whole number of at least 0")
port: Callable[[str], int] = _bounded(int, lambda value: 0 <= value <= 65535, "a port from 0 to 65535")
positive_real: Callable[[str], float] = _bounded(float, lambda value: value > 0, "a number above 0")
non_negative_real: Callable[[str], float] = _bounded(float, lambda value: value >= 0, "a number of at least 0")
fraction: Callable[[str], float] = _bounded(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
positive_fraction: Callable[[str], float] = _bounded(
    float, lambda value: 0 < value <= 1, "a number above 0 and at most 1"
)
inner_fraction: Callable[[str], float] = _bounded(float, lambda value: 0 < value < 1, "a number between 0 and 1")


def device(text: str) -> str:
    """A device that torch can use here: cpu, cuda, cuda:N or mps."""
    if not _DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: choose cpu, cuda, cuda:N or mps")
    if text == "cpu":
        return text
    if not is_installed("torch"):
        raise argparse.ArgumentTypeError(f"{text!r} needs torch, which is not installed: {install_command('torch')}")
    import torch

    if text == "mps":
        if not torch.backends.mps.is_available():
            raise argparse.ArgumentTypeError("torch sees no mps device here: choose cpu")
        return text
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise argparse.ArgumentTypeError(
            f"{text!r} needs a GPU, and torch sees none here: choose cpu (see seps doctor)"
        )
    number = int(text.partition(":")[2] or 0)
    if number >= count:
        names = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise argparse.ArgumentTypeError(f"{text!r} is not here: torch sees {names}")
    return text


def device_or_auto(text: str) -> str:
    """As `device`, or auto."""
    return text if text == "auto" else device(text)


def default_device() -> str:
    """A GPU if there is one, else the CPU. Torch is imported only where there may be one."""
    if not _may_have_gpu() or not is_installed("torch"):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _may_have_gpu() -> bool:
    """Whether this machine has a driver of GPUs."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, the same under Windows' Linux, and AMD
    return any(map(os.path.exists, drivers)) or shutil.which("nvidia-smi") is not None


def date(text: str) -> int:
    """A date like 2024-05-31, as nanoseconds since 1970."""
    from seps.images.dates import nanoseconds

    try:
        return nanoseconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def place(text: str) -> tuple[float, float]:
    """Latitude and longitude, like 48.86,2.35."""
    from seps.photos.store.filters import place_of

    try:
        return place_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def input_file(text: str) -> str:
    """A file that is there and may be read."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    return _readable(text)


def named_file(text: str) -> tuple[str, str]:
    """NAME=FILE, a file that is there and may be read."""
    name, equals, file = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE, such as audio=cat.npy")
    return name.strip(), input_file(file)


def input_folder(text: str) -> str:
    """A folder that is there and may be read."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    return _readable(text)


def _readable(text: str) -> str:
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: it does not exist")
    if not os.access(text, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: you may not")
    return text


def output_file(text: str) -> str:
    """A file that can be written, in a folder that is there."""
    parent = Path(text).parent
    if text and not os.path.lexists(parent) and not _first_existing(parent).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: the folder {parent} does not exist")
    return output_file_anywhere(text)


def output_file_or_stdout(text: str) -> str:
    """As `output_file`, or "-" for standard output."""
    return text if text == "-" else output_file(text)


def output_file_anywhere(text: str) -> str:
    """A file that can be written; its folder is made where it is missing."""
    if not text or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file" if text else "name a file")
    if os.path.exists(text) and not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written by you")
    _check_folder(Path(text).parent, text)
    return text


def output_folder(text: str) -> str:
    """A folder that can be written, or made."""
    if not text:
        raise argparse.ArgumentTypeError("name a folder")
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    _check_folder(Path(text), text)
    return text


def store_place(text: str) -> str:
    """As `output_folder`, or the address of object storage. A store that is there may be one to read alone."""
    return text if "://" in text or os.path.isdir(text) else output_folder(text)


def _first_existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    above = path.absolute()
    while not above.exists():
        above = above.parent
    return above


def _check_folder(folder: Path, text: str) -> None:
    above = _first_existing(folder)
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {above} is a file, not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: you may not write in {above}")


def refuse_same_file(option: str, out: str | None, inputs: Iterable[str | None]) -> None:
    """Raises ValueError where the file to write is one of those to read, which would be lost."""
    for path in inputs:
        if out and path and os.path.exists(out) and os.path.exists(path) and os.path.samefile(out, path):
            raise ValueError(f"{option} {out} is the file that is read ({path}). Name another file to write.")
