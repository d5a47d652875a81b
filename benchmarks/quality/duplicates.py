"""How well `seps duplicates` finds photos that were saved again, and how often it joins different photos.

    python -m benchmarks.quality.duplicates --tar train-000.tar --work DIR [--model mini] [--photos 1000]
    python -m benchmarks.quality.duplicates --rows 50000

The first takes photos of a tar, saves some of them again in the ways of `CHANGES`, indexes all, and prints per way the
part that is in one group with its original, by kind of group, and the groups that hold photos of different originals;
then how alike the vectors are: each changed photo and its original, and different originals. By this cosine the
threshold of a model is set (`seps.retrieval.embedded.NEAR_DUPLICATE_COSINES`).

The second times the search for groups in made-up rows, without a store.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps


def _jpeg(image: Image.Image, quality: int = 90) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def _scaled(image: Image.Image, factor: float) -> bytes:
    width, height = image.size
    return _jpeg(image.resize((round(width * factor), round(height * factor)), Image.Resampling.LANCZOS))


def _cut(image: Image.Image, left: float, top: float, right: float, bottom: float) -> bytes:
    width, height = image.size
    box = (width * left, height * top, width * (1 - right), height * (1 - bottom))
    return _jpeg(image.crop(tuple(round(value) for value in box)))


def _tilted(image: Image.Image, degrees: float) -> bytes:
    turned = image.rotate(degrees, Image.Resampling.BICUBIC)
    return _cut(turned, 0.06, 0.06, 0.06, 0.06)


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    **{f"JPEG, quality {q}": (lambda image, q=q: _jpeg(image, q)) for q in (95, 70, 50, 30)},
    "half the size": lambda image: _scaled(image, 0.5),
    "twice the size": lambda image: _scaled(image, 2.0),
    "brighter by 20 %": lambda image: _jpeg(ImageEnhance.Brightness(image).enhance(1.2)),
    "darker by 20 %": lambda image: _jpeg(ImageEnhance.Brightness(image).enhance(0.8)),
    "without colour": lambda image: _jpeg(ImageOps.grayscale(image).convert("RGB")),
    "5 % cut off": lambda image: _cut(image, 0.025, 0.025, 0.025, 0.025),
    "10 % cut off": lambda image: _cut(image, 0.05, 0.05, 0.05, 0.05),
    "10 % cut off one corner": lambda image: _cut(image, 0.1, 0.1, 0.0, 0.0),
    "turned by 2 degrees": lambda image: _tilted(image, 2.0),
}


def write_photos(tar: Path, folder: Path, photos: int, changed: int) -> None:
    """The first photos of a tar as files, and the changed copies of the first of them in folders by way."""
    with tarfile.open(tar) as shard:
        members = [member for member in shard if member.isreg()][:photos]
        for number, member in enumerate(members):
            file = shard.extractfile(member)
            assert file is not None
            data = file.read()
            (folder / "original").mkdir(parents=True, exist_ok=True)
            (folder / "original" / f"{number:04}.jpg").write_bytes(data)
            if number < changed:
                image = Image.open(io.BytesIO(data)).convert("RGB")
                for way, change in CHANGES.items():
                    (folder / way.replace(" ", "-")).mkdir(exist_ok=True)
                    (folder / way.replace(" ", "-") / f"{number:04}.jpg").write_bytes(change(image))


def measure(folder: Path, location: Path, model_name: str) -> list[str]:
    """Index the photos and print what is found; returns the lines of the report."""
    from seps.photos.duplicates.duplicates import group
    from seps.photos.duplicates.likeness import KINDS, read_gallery
    from seps.photos.indexing.build import IndexOptions, index_folder
    from seps.photos.store.store import Store
    from seps.retrieval.embedded import near_duplicate_cosine
    from seps.retrieval.engine.loading import load_engine

    index_folder(folder, location, load_engine(model_name), model_name, options=IndexOptions(bank=False))
    store = Store.open(location)
    gallery, near = read_gallery(store), near_duplicate_cosine(store.settings.model_hash)
    groups = group(gallery, "near", near)
    joined: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    mixed = []
    for found in groups:
        numbers = {Path(copy.path).stem for copy in found.pictures}
        if len(numbers) > 1:
            mixed.append(found)
        original = next((copy for copy in found.pictures if copy.path.startswith("original/")), None)
        for copy in found.pictures:
            way = copy.path.split("/")[0]
            if original is None or copy is original or Path(copy.path).stem != Path(original.path).stem:
                continue
            # What the pair is: the looser of the two relations to the first of the group.
            kinds = [one.kind for one in (copy, original) if one.kind is not None]
            joined[max(kinds, key=KINDS.index)][way] += 1
    lines = ["| changed | the same picture | nearly the same | not found |", "|---|---|---|---|"]
    for way in CHANGES:
        name = way.replace(" ", "-")
        total = len(list((folder / name).iterdir()))
        same, near = joined["file"][name] + joined["picture"][name], joined["near"][name]
        cells = [f"{100 * value / total:.0f} %" for value in (same, near, total - same - near)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines.append(f"{len(mixed)} groups hold different originals, of {len(list((folder / 'original').iterdir()))}:")
    lines += [
        f"  {found.kind}: " + ", ".join(f"{copy} ({copy.likeness:.3f})" for copy in found.pictures) for found in mixed
    ]
    return lines + cosines({row["path"]: place for place, row in enumerate(gallery.facts)}, gallery.vectors, near)


def cosines(places: dict[str, int], vectors: np.ndarray, near: float) -> list[str]:
    """Cosines of changed photos with their originals by way, and of different originals; `places` are rows by path."""
    lines = ["", f"| changed | least cosine | 5 % are below | at least {near} |", "|---|---|---|---|"]
    for way in CHANGES:
        copies = [path for path in places if path.startswith(f"{way.replace(' ', '-')}/")]
        originals = vectors[[places[f"original/{Path(path).name}"] for path in copies]]
        found = (vectors[[places[path] for path in copies]] * originals).sum(axis=1)
        part = 100 * (found >= near).mean()
        lines.append(f"| {way} | {found.min():.3f} | {np.quantile(found, 0.05):.3f} | {part:.0f} % |")
    originals = vectors[[place for path, place in places.items() if path.startswith("original/")]]
    found = np.sort((originals @ originals.T)[np.triu_indices(len(originals), 1)])[::-1]
    most, count = ", ".join(f"{value:.3f}" for value in found[:5]), (found >= near).sum()
    return [*lines, f"different originals: most alike {most}; {count} of {len(found):,} pairs >= {near}"]


def time_rows(count: int, width: int = 384) -> str:
    """Seconds for made-up rows, of which a tenth are copies of others."""
    from seps.photos.duplicates.duplicates import group
    from seps.photos.duplicates.likeness import SIDE, ComparedPictures, Looks

    draw = np.random.default_rng(0)
    source = np.where(draw.random(count) < 0.1, draw.integers(0, count, count), np.arange(count))
    pixels = draw.integers(0, 255, (count, 3 * SIDE**2), dtype=np.uint8)[source]
    hashes = draw.integers(0, 2**63, count, dtype=np.uint64)[source]
    vectors = draw.standard_normal((count, width), dtype=np.float32)[source]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    means, deviations = pixels.mean(axis=1, dtype=np.float32), np.full(count, 73.3, np.float32)
    facts = [
        {"id": f"{i:020x}", "path": f"{i}.jpg", "member": None, "size": 1, "mtime": i, "sha256": str(i)}
        | {"width": 4000, "height": 3000}
        for i in range(count)
    ]
    looks = Looks(hashes, pixels, means, deviations, np.zeros(count, np.float32))
    gallery = ComparedPictures(facts, looks, vectors, np.full(count, -1))
    start, cpu = time.perf_counter(), time.process_time()
    groups = group(gallery, "near", 0.9)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return f"{count:,} rows, vectors of {width}: {len(groups):,} groups in {wall:.1f} s ({cpu:.1f} s of processor time)"


def main() -> None:
    """Measure, or time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tar", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--photos", type=int, default=1000)
    parser.add_argument("--changed", type=int, default=150)
    parser.add_argument("--rows", type=int, default=0)
    options = parser.parse_args()
    if options.rows:
        print(time_rows(options.rows))
        return
    if options.tar is None or options.work is None:
        parser.error("name the tar of photos and a work folder, or give --rows")
    if not (options.work / "photos").exists():
        write_photos(options.tar, options.work / "photos", options.photos, options.changed)
    print("\n".join(measure(options.work / "photos", options.work / f"store-{options.model}", options.model)))


if __name__ == "__main__":
    main()
