"""Listing and checking files: sorted, every problem named. The layouts stand on this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from seps.reid.data.records import Problem, ReidDataError, ReidRecord, Source

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
Tags = tuple[int, int, int]
"""(pid, camid, sceneid)"""
Parser = Callable[[str], "Tags | None"]
"""From a name without suffix to its tags, or None when it has none."""


@dataclass
class Findings:
    """What a scan collects beside the records."""

    root: Path
    problems: list[Problem] = field(default_factory=list)
    junk: int = 0

    def add(self, kind: str, split: str, path: Path, detail: str) -> None:
        """Note one problem, with the path relative to the data set's root where possible."""
        shown = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        self.problems.append(Problem(kind, split, shown.as_posix(), detail))


def require_folder(folder: Path, expected: str) -> Path:
    """The folder itself, or ReidDataError saying what was `expected` there."""
    if not folder.is_dir():
        raise ReidDataError(f"no folder {folder}: expected {expected}; check the root and the layout's name")
    return folder


def list_folder(folder: Path) -> list[Path]:
    """What lies in the folder, sorted. Raises ReidDataError where it cannot be read to its end."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ReidDataError(f"the folder {folder} cannot be read: {error.strerror or error}") from error


def list_images(folder: Path, split: str, findings: Findings) -> dict[str, Path]:
    """Name without suffix -> file, sorted; hidden and other files left out, double names reported."""
    found: dict[str, Path] = {}
    for path in list_folder(folder):
        if path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith(".") or not path.is_file():
            continue
        if path.stem in found:
            findings.add("duplicate_name", split, path, f"{found[path.stem].name} has the same name")
            continue
        found[path.stem] = path
    return found


def join_modalities(folders: dict[str, Path], split: str, parse: Parser, findings: Findings) -> Iterator[ReidRecord]:
    """Records of the names present in every modality's folder, in sorted order; the others are reported."""
    listings = {
        modality: list_images(folder, split, findings) if folder.is_dir() else {}
        for modality, folder in folders.items()
    }
    for name in sorted(set().union(*listings.values())):
        paths = {modality: listing[name] for modality, listing in listings.items() if name in listing}
        path = next(iter(paths.values()))
        absent = [modality for modality in folders if modality not in paths]
        if absent:
            findings.add("missing_modality", split, path, f"no {' and no '.join(absent)} image")
            continue
        sources = {modality: Source(paths[modality]) for modality in folders}
        yield from tag(sources, path, split, parse, findings)


def tag(sources: dict[str, Source], path: Path, split: str, parse: Parser, findings: Findings) -> Iterator[ReidRecord]:
    """One record, or none where the name tells no identity or marks junk (identity -1)."""
    tags = parse(path.stem)
    if tags is None:
        findings.add("unparsable_name", split, path, "the name tells no identity and camera in this layout")
    elif tags[0] == -1:
        findings.junk += 1
    else:
        yield ReidRecord(sources, *tags)


def to_rgb(image: Image.Image) -> Image.Image:
    """Three channels of a byte; of 16-bit images (thermal cameras) the upper byte.

    Raises ValueError for wider numbers: converted by Pillow, everything above 255 would become white.
    """
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"pixels from {values.min()} to {values.max()}: save them as 8 or 16 bits without sign")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("pixels are floating point numbers: save them as 8 or 16 bits without sign")
    return image.convert("RGB")


def fault_of(record: ReidRecord) -> tuple[str, Path, str] | None:
    """(kind, file, detail) of the first file of the record that does not decode or split, else None."""
    for path, sources in group_by_file(record.sources.values()):
        try:
            with Image.open(path) as image:
                width = to_rgb(image).width
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return "undecodable", path, f"cannot be decoded ({error})"
        if len(sources) > 1 and width % len(sources):
            return "wrong_shape", path, f"{width} pixels wide do not divide into {len(sources)} modalities"
    return None


def group_by_file(sources: Iterable[Source]) -> list[tuple[Path, list[Source]]]:
    """Sources by file, so that a side-by-side image is opened once."""
    groups: dict[Path, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.path, []).append(source)
    return list(groups.items())


def verify(records: Sequence[ReidRecord], split: str, findings: Findings, threads: int) -> list[ReidRecord]:
    """Decode every file; keep the records that decode, report the others."""
    sound: list[ReidRecord] = []
    with ThreadPoolExecutor(threads) as pool:
        for record, fault in zip(records, pool.map(fault_of, records), strict=True):
            if fault is None:
                sound.append(record)
            else:
                findings.add(fault[0], split, fault[1], fault[2])
    return sound
