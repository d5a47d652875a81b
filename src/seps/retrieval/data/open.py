"""One way to name a data set on the command line and in configurations."""

from __future__ import annotations

from pathlib import Path

from .jsonl import load_jsonl
from .published import load_published
from .records import DataError, RetrievalDataset


def load_data(name: str, *, images_root: str | None = None) -> RetrievalDataset:
    """The data set called `name`: a JSONL file, or a split of the published layout as `FOLDER:SPLIT[:NAME]`.

    `data/f30k:test:f30k` is the test split in `data/f30k` with descriptions from `f30k_test.jsonl`; its images are in
    `images_root` (default: `FOLDER/images`). Raises DataError for a name that is neither.
    """
    if Path(name).is_file():
        return load_jsonl(name, images_root=images_root, split=Path(name).stem)
    folder, *rest = name.split(":")
    if rest and len(rest) <= 2 and Path(folder).is_dir():
        return load_published(
            folder, rest[0], rest[1] if len(rest) == 2 else "f30k", images_dir=images_root or Path(folder) / "images"
        )
    if Path(name).is_dir():
        raise DataError(
            f"{name} is a folder: name a JSONL file in it, or a split of the published layout as {name}:test:f30k."
        )
    raise DataError(f"There is no data file {name}.")
