"""Files that a command writes at the end: checked before the work begins, and never put over something else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seps.cli.shared.argtypes import refuse_same_file
from seps.files import read_json, replacing, write_text

if TYPE_CHECKING:
    from PIL.Image import Image

MADE_BY = "seps"
"""How the comment of every picture begins that a command writes."""
PAGE_MARK = '<meta name="generator" content="seps'
"""Stands in the head of every page that a command writes."""


def check_output(path: str | Path, option: str, ours: str, inputs: Iterable[str | None] = ()) -> Path:
    """The path of a JSON file to write. Raises ValueError where it holds what the command did not write.

    `ours` is a key that every such file has: an earlier result may be replaced, nothing else. `inputs` are files that
    the command reads.
    """
    path = Path(path)
    if path.exists() and path.stat().st_size and ours not in read_json(path):
        raise ValueError(
            f"{option} {path} exists and was not written by this command; it was left as it is. Choose another file."
        )
    refuse_same_file(option, str(path), inputs)
    return path


def write_output(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def check_page(path: str | Path) -> Path:
    """The path of a page (--html) to write. Raises ValueError where it holds something else than a page of ours."""
    path = Path(path)
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if PAGE_MARK.encode() not in file.read(1000):
                raise ValueError(_foreign(path, "--html"))
    return path


def check_picture(path: str | Path, option: str) -> Path:
    """The path of a picture to write. Raises ValueError for a file that is none of ours: it may be a person's photo."""
    path = Path(path)
    if path.exists() and path.stat().st_size and not is_our_picture(path):
        raise ValueError(_foreign(path, option))
    return path


def is_our_picture(path: Path) -> bool:
    """Whether a command of ours wrote the picture."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            comment = picture.info.get("comment", "")
    except Exception:  # Pillow raises almost anything on broken or huge files
        return False
    return str(comment.decode("latin-1") if isinstance(comment, bytes) else comment).startswith(MADE_BY)


def save_picture(picture: Image, path: Path, **options: Any) -> None:
    """Write a picture, whole or not at all, with the comment by which `check_picture` knows it."""
    from PIL.PngImagePlugin import PngInfo

    mark = PngInfo()
    mark.add_text("comment", MADE_BY)
    path = Path(os.path.realpath(path))  # a link stays one
    with replacing(path, path.with_name(f".{path.stem}.new{path.suffix}")) as temporary:
        picture.save(temporary, pnginfo=mark, comment=MADE_BY, **options)  # each format takes its own


def _foreign(path: Path, option: str) -> str:
    return f"{option} {path} exists and was not made by seps; it was left as it is. Choose another file."
