"""The published layout of Flickr30K and MS-COCO, read so that a description is bound to its image at once.

id_mapping.json    {"51": "101362133.jpg", ...}   image id -> file name
SPLIT_ids.txt      an image id per caption; or one per image, for five captions in a row (the published train_ids.txt)
SPLIT_caps.txt     the captions, a line each
SPLIT_caption_ids.txt  the data set's id of each caption, a line each (optional; not in the published files)
NAME_SPLIT.jsonl   {"text": ...} per image, in the order in which the ids first appear (optional)

Karpathy's files of the same sets (dataset_flickr30k.json, dataset_coco.json) are read as well:

{"images": [{"filename": ..., "filepath": folder (COCO), "split": "test", "sentences": [{"raw": ...}, ...]}, ...]}
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from seps.images.sources import DataError, ImageSource
from seps.parsing import ShapeError, as_list, as_object, parse_object

from .jsonl import description_text, load_jsonl
from .lines import Root, checked_text, json_lines, read_bytes, text_lines
from .records import ImageRecord, RetrievalDataset

CAPTIONS = 5
"""Captions per image where a list of ids names each image once."""


def load_published(
    folder: str | os.PathLike[str],
    split: str,
    name: str = "f30k",
    *,
    images_dir: str | os.PathLike[str],
) -> RetrievalDataset:
    """Read one split of the published layout; `name` is `f30k` or `coco`, as the JSONL file is called.

    Without `NAME_SPLIT.jsonl` no image has a description. Images are ordered as their ids first appear, so
    that COCO's five folds are subsets of consecutive thousands.
    Raises DataError where files are missing or their counts disagree.
    """
    folder = Path(folder)
    for part in (split, name):
        if not part or os.path.basename(part) != part:
            raise DataError(f"{part!r} is not the name of a split or of a data set, like 'test' or 'f30k'.")
    ids, captions = _captions(folder / f"{split}_ids.txt", folder / f"{split}_caps.txt")
    files = _file_names(folder / "id_mapping.json")
    descriptions = _descriptions_by_id(folder / f"{name}_{split}.jsonl", ids)
    caption_ids = _caption_ids(folder / f"{split}_caption_ids.txt", len(captions))
    captions_of: dict[str, list[str]] = {}
    caption_ids_of: dict[str, list[str]] = {}
    for row, (image_id, caption) in enumerate(zip(ids, captions, strict=True)):
        captions_of.setdefault(image_id, []).append(caption)
        caption_ids_of.setdefault(image_id, []).extend(caption_ids[row : row + 1])
    root = Root(Path(images_dir))
    records = []
    for image_id, texts in captions_of.items():
        if image_id not in files:
            raise DataError(
                f"{folder / 'id_mapping.json'} has no file for image id {image_id!r} of {split}_ids.txt. "
                "Take both files from the same release."
            )
        place = f"{folder / 'id_mapping.json'}, id {image_id!r}"
        source = ImageSource(root(files[image_id], place))
        record = ImageRecord(image_id, source, tuple(texts), descriptions.get(image_id))
        records.append(replace(record, caption_ids=tuple(caption_ids_of[image_id])))
    return RetrievalDataset(tuple(records), name, split)


def _captions(ids_path: Path, captions_path: Path) -> tuple[list[str], list[str]]:
    """(image id of each caption, captions), in the order of the files."""
    ids = [line.strip() for line in text_lines(ids_path)]
    lines = text_lines(captions_path)
    for number, image_id in enumerate(ids, start=1):
        if not image_id:
            raise DataError(f"{ids_path}, line {number}: blank, where an image id should be.")
    if len(lines) == CAPTIONS * len(ids) and len(set(ids)) == len(ids):
        ids = [image_id for image_id in ids for _ in range(CAPTIONS)]
    if len(ids) != len(lines):
        raise DataError(
            f"{ids_path} has {len(ids)} lines and {captions_path} has {len(lines)}: there must be one image id for "
            f"each caption, or one for each image with {CAPTIONS} captions in a row. Take both files from "
            "the same release."
        )
    if not ids:
        raise DataError(f"{ids_path} is empty: no captions to load.")
    captions = [
        checked_text(line, "the caption", f"{captions_path}, line {number}").strip()
        for number, line in enumerate(lines, start=1)
    ]
    return ids, captions


def _caption_ids(path: Path, captions: int) -> list[str]:
    """The id of each caption; [] without the file."""
    if not path.exists():
        return []
    lines = [line.strip() for line in text_lines(path)]
    for number, line in enumerate(lines, start=1):
        if not line:
            raise DataError(f"{path}, line {number}: blank, where the id of a caption should be.")
    if len(lines) != captions:
        raise DataError(
            f"{path} has {len(lines)} ids for {captions} captions: it must have one for each, in their order."
        )
    return lines


def _file_names(path: Path) -> dict[str, str]:
    data = read_bytes(path)
    try:
        mapping = parse_object(data)
    except ShapeError as error:
        raise DataError(f'{path}: must be one object like {{"51": "101362133.jpg"}}.') from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}).") from error
    return {key: checked_text(value, f"the file of id {key!r}", str(path)) for key, value in mapping.items()}


def _descriptions_by_id(path: Path, ids: list[str]) -> dict[str, str | None]:
    """Descriptions by image id; {} without the file.

    Accepts a line per image, or a line per caption when all lines of one image agree.
    """
    if not path.exists():
        return {}
    texts: list[str | None] = []
    for place, value in json_lines(path):
        if "text" not in value and "dense" not in value:
            raise DataError(f'{place}: must hold the description as {{"text": "..."}}; null stands for none.')
        texts.append(description_text(value.get("text", value.get("dense")), place))
    images = list(dict.fromkeys(ids))
    if len(texts) == len(images):
        return dict(zip(images, texts, strict=True))
    if len(texts) != len(ids):
        raise DataError(
            f"{path} has {len(texts)} descriptions for {len(images)} images with {len(ids)} captions: "
            "it must have one for each image. Take it from the same release as the ids."
        )
    by_id: dict[str, str | None] = {}
    for number, (image, text) in enumerate(zip(ids, texts, strict=True), start=1):
        if by_id.setdefault(image, text) != text:
            raise DataError(
                f"{path}, description {number}: image {image!r} has another description above. The file has "
                "one per caption, and they differ: a description belongs to an image. Keep one per image."
            )
    return by_id


def load_karpathy(path: str | os.PathLike[str], split: str, *, images_dir: str | os.PathLike[str]) -> RetrievalDataset:
    """Some splits of one of Karpathy's files: `split` is "test", or several as "train+restval".

    An image's id is its file's name. The first five captions of an image count, as in the published layout and its
    evaluations; COCO has a few more. Raises DataError, naming the splits of the file where it has no such.
    """
    path = Path(path)
    images = _karpathy_images(path)
    if images is None:
        raise DataError(f'{path} is no file of splits: it must be one object with a list "images", as Karpathy\'s are.')
    wanted, present = set(split.split("+")), {str(value.get("split")) for value in images}
    if wanted - present:
        named = ", ".join(sorted(present))
        raise DataError(f"{path} has no split {', '.join(sorted(wanted - present))!r}; its splits are: {named}.")
    root, records = Root(Path(images_dir)), []
    for number, value in enumerate(images, start=1):
        if value.get("split") not in wanted:
            continue
        place = f"{path}, image {number}"
        file = checked_text(value.get("filename"), '"filename"', place)
        if value.get("filepath"):
            file = "/".join((checked_text(value["filepath"], '"filepath"', place), file))
        sentences = value.get("sentences")
        if not isinstance(sentences, list) or not all(isinstance(one, dict) for one in sentences):
            raise DataError(f'{place}: "sentences" must be a list of objects like {{"raw": "a cat on a mat"}}.')
        captions = [
            checked_text(one.get("raw"), f"caption {k}", place).strip()
            for k, one in enumerate(sentences[:CAPTIONS], start=1)
        ]
        records.append(ImageRecord(str(value["filename"]), ImageSource(root(file, place)), tuple(captions)))
    return RetrievalDataset(tuple(records), path.stem, split)


def _karpathy_images(path: Path) -> list[dict[str, Any]] | None:
    """The images of one of Karpathy's files; None where the file is something else, such as lines of JSON."""
    try:
        images = as_list(parse_object(read_bytes(path)).get("images"))
    except ValueError:
        return None
    return images if images and all(image == as_object(image) for image in images) else None


def load_data(name: str, *, images_root: str | None = None) -> RetrievalDataset:
    """The data set called `name`: a JSONL file, or a split, as `FOLDER:SPLIT[:NAME]` of the published layout or as
    `FILE.json:SPLIT` of a file of Karpathy's.

    `data/f30k:test:f30k` is the test split in `data/f30k` with descriptions from `f30k_test.jsonl`; its images are in
    `images_root` (default: `images` in FOLDER, or beside FILE). Raises DataError for a name that is none of them.
    """
    if Path(name).is_file():
        images = _karpathy_images(Path(name)) if name.lower().endswith(".json") else None
        if images is not None:
            splits = sorted({str(value.get("split")) for value in images})
            raise DataError(f"{name} has the splits {', '.join(splits)}: name one of them, as {name}:{splits[0]}.")
        return load_jsonl(name, images_root=images_root, split=Path(name).stem)
    file, _, split = name.rpartition(":")
    if split and Path(file).is_file():
        return load_karpathy(file, split, images_dir=images_root or Path(file).parent / "images")
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
