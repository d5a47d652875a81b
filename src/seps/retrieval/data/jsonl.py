"""The simple format for everybody's pictures: JSON lines, one image per line.

    {"image": "photos/cat.jpg", "captions": ["a cat", "a cat on a mat"], "dense": "A grey cat lies ..."}
    {"image": "000017.jpg", "shard": "train-000.tar", "captions": ["two dogs"], "id": "17"}

`image` is a path relative to the file's folder (or to `images_root`), or a member of the uncompressed tar
`shard`, itself such a path. `dense`, `guides` (see `guides`), `id` and `caption_ids` (one for each caption, as COCO
has them) are optional; without an id the image's name is its id. Other keys are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from seps.files import write_text
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import DataError, ImageSource
from seps.parsing import as_list, is_whole

from .guides import GuideSource, parse_guides
from .lines import Root, checked_member, checked_text, cut_text, json_lines
from .records import ImageRecord, RetrievalDataset


class NothingDescribed(DataError):
    """Descriptions of which none belongs to an image of the data set."""


def load_jsonl(
    path: str | os.PathLike[str],
    *,
    images_root: str | os.PathLike[str] | None = None,
    name: str | None = None,
    split: str | None = None,
) -> RetrievalDataset:
    """Read a JSONL data set; `name` and `split` default to the folder's and the file's name.

    Raises DataError, with file and line, for a malformed line or a path that leads out of the root.
    Images are not opened here: `check_dataset` does that.
    """
    path = Path(path)
    root = Root(Path(images_root) if images_root is not None else path.parent)
    beside = Root(path.parent)  # files of guides lie beside the lines that name them
    records = tuple(_record(value, root, beside, place) for place, value in json_lines(path))
    if not records:
        raise DataError(f"{path} holds no images. Write one JSON object per line.")
    return RetrievalDataset(records, name or path.absolute().parent.name or "data", split or path.stem)


def _record(value: dict[str, Any], root: Root, beside: Root, place: str) -> ImageRecord:
    if "image" not in value:
        raise DataError(f'{place}: no "image". Name a file, or a member of a tar "shard".')
    image = checked_text(value["image"], '"image"', place)
    if value.get("shard") is not None:
        shard = checked_text(value["shard"], '"shard"', place)
        source = ImageSource(root(shard, place), checked_member(image, place))
    else:
        source = ImageSource(root(image, place))
    captions = value.get("captions")
    if not isinstance(captions, list):
        raise DataError(f'{place}: "captions" must be a list of texts, like ["a cat on a mat"].')
    texts = tuple(checked_text(text, f"caption {k}", place).strip() for k, text in enumerate(captions, 1))
    description, guides = description_text(value.get("dense"), place), parse_guides(value.get("guides"), beside, place)
    caption_ids = _caption_ids(value.get("caption_ids"), len(texts), place)
    return ImageRecord(_id(value.get("id"), image, place), source, texts, description, guides, caption_ids)


def _caption_ids(value: object, captions: int, place: str) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = as_list(value)
    if listed != value or len(listed) != captions:
        raise DataError(
            f'{place}: "caption_ids" must be a list with one id for each of the {captions} captions, in their order.'
        )
    return tuple(
        str(number) if type(number) is int else checked_text(number, "a caption id", place) for number in listed
    )


def _id(value: object, image: str, place: str) -> str:
    if value is None:
        return image
    if is_whole(value):
        return str(value)
    return checked_text(value, '"id"', place)


def description_text(value: object, place: str) -> str | None:
    """The description that a line of JSON holds; None for null and for blank text. Raises DataError."""
    # A blank description is what a captioner leaves when it failed: the image then has none.
    if value is None or not str(value).strip():
        return None
    text, notice = cut_text(checked_text(value, '"dense" (one text, the image\'s own)', place).strip())
    if notice is not None:
        warnings.warn(f"{place}: the description was cut: {notice}.", stacklevel=2)
    return text


def save_jsonl(
    dataset: RetrievalDataset,
    path: str | os.PathLike[str],
    *,
    images_root: str | os.PathLike[str] | None = None,
) -> None:
    """Write `dataset` so that `load_jsonl` gives it back; the file appears whole or not at all.

    Raises DataError if an image lies outside the file's folder (or `images_root`), or a guide outside the file's.
    """
    path = Path(path)
    root = Path(os.path.realpath(images_root if images_root is not None else path.parent))
    lines = [json.dumps(_line(record, root, path.parent), ensure_ascii=False) + "\n" for record in dataset.records]
    write_text(path, "".join(lines))


def _line(record: ImageRecord, root: Path, beside: Path) -> dict[str, Any]:
    file = Path(os.path.realpath(record.source.path))
    if not file.is_relative_to(root):
        raise DataError(
            f"Image {record.id!r} ({record.source}) lies outside {root}: a JSONL file names images relative "
            "to a folder. Give the folder that holds them as the image root, here and when loading."
        )
    relative = file.relative_to(root).as_posix()
    place: dict[str, Any] = {"image": relative}
    if record.source.member is not None:
        place = {"image": record.source.member, "shard": relative}
    line = {"id": record.id, **place, "captions": list(record.captions)}
    line |= {"caption_ids": list(record.caption_ids)} if record.caption_ids else {}
    line |= {} if record.dense is None else {"dense": record.dense}
    guides = {name: _guide(source, Path(os.path.realpath(beside))) for name, source in record.guides.items()}
    return {**line, "guides": guides} if guides else line


def _guide(source: GuideSource, beside: Path) -> str | list[float]:
    if source.path is None:
        return list(source.values)
    file = Path(os.path.realpath(source.path))
    if not file.is_relative_to(beside):
        raise DataError(
            f"The guide {source.path} lies outside {beside}, where the JSONL file is; write that elsewhere."
        )
    return file.relative_to(beside).as_posix()


def attach_dense(dataset: RetrievalDataset, path: str | os.PathLike[str], *, verify: bool = False) -> RetrievalDataset:
    """Give images the descriptions of a JSONL file, each line `{"image": ID, "dense": TEXT}`.

    The keys may also be `id` and `text`. A line belongs to the image with its id, wherever it stands in the file. If
    no id fits at all (a folder was described as x.jpg, and the data set says FOLDER/x.jpg), lines are matched by
    `sha256`, the hash of the image's bytes, which `seps caption` writes.

    - An image without a line keeps the description it has. A line without an image is ignored.
    - Two lines for one image with different `sha256`: the later one counts, for the image has changed in between.
    - `verify=True` reads every image, and refuses one whose bytes are not those that were described.

    Raises DataError if two lines give one image different descriptions, NothingDescribed if no line fits.
    """
    path = Path(path)
    texts: dict[str, str] = {}
    hashes: dict[str, object] = {}
    for place, value in json_lines(path):
        key = _id(value.get("image", value.get("id")), "", place)
        if not key:
            raise DataError(f'{place}: no "image". Name the image by its id, as in the data set.')
        text = description_text(value.get("dense", value.get("text")), place)
        if text is None:
            continue
        before, now = hashes.get(key), value.get("sha256")
        if before is not None and now is not None and before != now:
            texts[key] = text
        hashes[key] = now
        if texts.setdefault(key, text) != text:
            raise DataError(f"{place}: a second, different description of image {key!r}. Keep one of them.")
    ids = {record.id for record in dataset.records}
    if not ids & texts.keys():
        by_content = {digest: texts[key] for key, digest in hashes.items() if digest is not None}
        texts = {record.id: by_content[digest] for record, digest in _digests(dataset, by_content)}
        if not texts:
            example = dataset.records[0].id if dataset.records else "?"
            raise NothingDescribed(
                f"No line of {path} names an image of {dataset.label}, or describes the content of one. "
                f'Its images have ids like {example!r}: write that as "image".'
            )
    elif verify:
        _verify(dataset, hashes, path)
    records = tuple(replace(record, dense=texts.get(record.id, record.dense)) for record in dataset.records)
    return replace(dataset, records=records)


def _digests(dataset: RetrievalDataset, wanted: dict[object, str]) -> Iterator[tuple[ImageRecord, str]]:
    """The images whose content is `wanted`, with its sha256; images that cannot be read are left out."""
    for record in dataset.records if wanted else ():
        try:
            digest = hashlib.sha256(read_source(record.source)).hexdigest()
        except UnreadableImage:
            continue
        if digest in wanted:
            yield record, digest


def _verify(dataset: RetrievalDataset, hashes: dict[str, object], path: Path) -> None:
    for record in dataset.records:
        expected = hashes.get(record.id)
        if expected is not None and hashlib.sha256(read_source(record.source)).hexdigest() != expected:
            raise DataError(
                f"{path} describes another picture under the id {record.id!r} than {record.source} contains. "
                "Describe it again: run `seps caption` again with the same output."
            )
