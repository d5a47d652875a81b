"""Draw a synthetic set into a folder: whole or not at all, the same bytes with any number of workers."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from seps.files import load_json, naming
from seps.locks import FileLock
from seps.synthetic.world import Shot, SyntheticConfig, World, plan_shots

VERSION = 1
MODALITIES = ("RGB", "NI", "TI")
# Marks a folder as an unfinished set of ours, which may be removed.
_MARK = ".seps-unfinished"
T = TypeVar("T")


def make_synthetic(
    out_dir: str | Path,
    identities: int = 150,
    images_per_identity: int = 16,
    cameras: int = 4,
    seed: int = 0,
    size: tuple[int, int] = (256, 128),
    *,
    test_fraction: float = 0.4,
    scenes: int = 4,
    blindness: float = 0.5,
    clutter: float = 3.0,
    quality: int = 90,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Draw a set into `out_dir` and return its manifest; a finished set with the same parameters is kept.

    `identities` counts train and test together. `size` is (H, W). `blindness`: probability that a sensor is blind in
    part of a shot. `clutter`: mean number of unrelated things. `progress(done, all)` is called after every shot. With
    `workers` > 1 the caller's main module must be importable (`if __name__ == "__main__"`). The set is drawn beside
    `out_dir` and moved there when complete. Raises ValueError for parameters out of range and for a folder that
    holds anything else.
    """
    config = SyntheticConfig(
        identities, images_per_identity, cameras, seed, (size[0], size[1]), test_fraction, scenes,
        blindness, clutter, quality,
    )  # fmt: skip
    out = Path(out_dir).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _existing(out, config)
    with _lock(out):
        return _draw(out, config, workers, progress)


def _lock(out: Path) -> FileLock:
    """What keeps a second call from removing the unfinished files of a living one, as those of a killed one are."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_drawn(out, error) from error
    return FileLock(out.with_name(f".{out.name}.lock"), out)


def _not_drawn(out: Path, error: OSError) -> ValueError:
    return ValueError(f"no set can be drawn in {out}: {error.strerror or error}; choose another folder")


def _draw(
    out: Path, config: SyntheticConfig, workers: int, progress: Callable[[int, int], None] | None
) -> dict[str, Any]:
    """Draw all shots beside `out` and move them there; the manifest."""
    shots = plan_shots(config)
    unfinished = _begin(out)
    digest, done = hashlib.sha256(), 0
    for chunk in in_chunks(partial(_write_shots, config, unfinished), shots, workers):
        for name, part in chunk:
            digest.update(f"{name} {part}\n".encode())
            done += 1
            if progress is not None:
                progress(done, len(shots))
    manifest = {
        "format": "seps-synthetic-reid",
        "version": VERSION,
        "parameters": _plain(config),
        "modalities": list(MODALITIES),
        "shots": {s: sum(shot.split == s for shot in shots) for s in ("train", "query", "gallery")},
        "sha256": digest.hexdigest(),
    }
    (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    (unfinished / _MARK).unlink()
    if out.exists():
        out.rmdir()
    os.replace(unfinished, out)
    return manifest


def _begin(out: Path) -> Path:
    """The folder beside `out` to draw in, empty but for its folders; one that a stopped call left is replaced.

    Raises ValueError when it cannot be made, or when something else has that name.
    """
    unfinished = out.with_name(out.name + ".partial")
    try:
        if unfinished.exists():
            if not (unfinished / _MARK).is_file():
                raise ValueError(f"{unfinished} is in the way and was not made by this command: move it elsewhere")
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        (unfinished / _MARK).touch()
        for split in ("train", "query", "gallery"):
            for modality in MODALITIES:
                (unfinished / split / modality).mkdir(parents=True)
    except OSError as error:
        raise _not_drawn(out, error) from error
    return unfinished


def _plain(config: SyntheticConfig) -> dict[str, Any]:
    return {**asdict(config), "size": list(config.size)}


def _existing(out: Path, config: SyntheticConfig) -> dict[str, Any]:
    """The manifest of the finished set in `out` if it is the one asked for."""
    try:
        manifest = load_json(out / "manifest.json")
    except (OSError, ValueError) as error:
        raise ValueError(f"{out} is not empty and holds no synthetic set; choose another folder") from error
    if manifest.get("version") != VERSION or manifest.get("parameters") != _plain(config):
        raise ValueError(f"{out} holds a synthetic set with other parameters; choose another folder")
    return manifest


def in_chunks(work: Callable[[Sequence[Shot]], T], shots: Sequence[Shot], workers: int) -> Iterator[T]:
    """`work` of 64 shots at a time, in their order, in `workers` processes."""
    chunks = [shots[start : start + 64] for start in range(0, len(shots), 64)]
    if workers <= 1 or len(chunks) < 2:
        yield from map(work, chunks)
        return
    # Spawned, not forked: the caller may hold threads (torch, readers) that a fork would copy in mid-flight.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(chunks)), mp_context=context) as pool:
        yield from pool.map(work, chunks)


def _write_shots(config: SyntheticConfig, root: Path, shots: Sequence[Shot]) -> list[tuple[str, str]]:
    """Draw and write some shots; (name, digest of the three files) of each."""
    # Loaded here: drawing itself needs numpy alone.
    from PIL import Image

    world = World(config)
    written = []
    for shot in shots:
        digest = hashlib.sha256()
        for modality, pixels in zip(MODALITIES, world.look(shot).images, strict=True):
            buffer = BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=config.quality)
            file = root / shot.split / modality / f"{shot.name}.jpg"
            with naming(file):
                file.write_bytes(buffer.getvalue())
            digest.update(buffer.getvalue())
        written.append((f"{shot.split}/{shot.name}", digest.hexdigest()))
    return written
