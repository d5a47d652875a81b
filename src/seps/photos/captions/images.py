"""The images of a run: which there are, what identifies each, and how a describing model gets their pixels."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from seps.images.decoding import MAX_PIXELS, decode_upright, opened
from seps.images.formats import is_video, reader_of
from seps.images.shards import shard_members
from seps.images.sources import DataError, ImageSource
from seps.photos.indexing.gallery import SUFFIXES, Problem, walk, why_member_skipped
from seps.retrieval.data.lines import is_unicode

SENT_AS_THEY_ARE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
LOSSLESS = ("PNG", "GIF", "BMP")
_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Item:
    """One image to describe, with the content hashes of it that need no new description.

    described: the hash of the content that has a description. set_aside: of the content that got bad answers only.
    """

    id: str
    source: ImageSource
    described: str = ""
    set_aside: str = ""


@dataclass
class ImageList:
    """Images in a fixed order, what could not be read, and the names of what was skipped, by reason."""

    items: list[Item]
    problems: list[Problem] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)


def list_images(path: str | os.PathLike[str], images_root: str | os.PathLike[str] | None = None) -> list[Item]:
    """The images under `path`, in a fixed order: the items of `scan_images`."""
    return scan_images(path, images_root).items


def scan_images(path: str | os.PathLike[str], images_root: str | os.PathLike[str] | None = None) -> ImageList:
    """The images under `path`, and what of it could not be read.

    A folder is walked as `seps index` walks it; an image's id is its path in the folder, and the images of a .tar in
    it are its members' names, the frames of a video "c.mp4 @ 00:01:20". A .tar may be given alone. Another file is a
    JSONL data set, with `images_root` for its paths. Raises DataError where there are no images, or where two have the
    same id.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        gallery = walk(path)
        # A time code alone would be the id of a frame in every video.
        items = [
            Item(str(image) if is_video(image.path) else image.member or image.path, image.source(gallery.root))
            for image in gallery.images
        ]
        images = ImageList(items, gallery.problems, gallery.skipped)
    elif suffix == ".tar":
        names = [name for name in shard_members(path) if why_member_skipped(name) is None]
        images = ImageList([Item(name, ImageSource(path, name)) for name in names])
    elif suffix in SUFFIXES or reader_of(path) is not None:
        raise DataError(f"{path} is one image or video. Give the folder that holds it, a .tar or a JSONL file.")
    else:
        from seps.retrieval.data import load_jsonl  # with torch, which is not installed everywhere

        records = load_jsonl(path, images_root=images_root).records
        images = ImageList([Item(record.id, record.source) for record in records])
    if not images.items:
        unread = "".join(f" {problem}." for problem in images.problems[:3])
        raise DataError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))}).{unread} Check the path.")
    _check_ids(images.items)
    return images


def _check_ids(items: list[Item]) -> None:
    seen: dict[str, Item] = {}
    for item in items:
        if not is_unicode(item.id):
            raise DataError(f"The name {item.id!r} is not UTF-8 text, so no line can name it. Rename it.")
        other = seen.setdefault(item.id, item)
        if other is not item:
            raise DataError(
                f"Two images have the id {item.id!r}: {other.source} and {item.source}. A description is bound "
                "to an image by its id. Rename one, or describe them in two runs."
            )


def content_hash(data: bytes) -> str:
    """The SHA-256 of an image's encoded bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def open_picture(data: bytes, source: ImageSource, max_side: int = 0) -> Any:
    """The decoded PIL image, upright and RGB, no side longer than `max_side` (0: any). Raises UnreadableImage.

    A JPEG of more pixels than are decoded (`MAX_PIXELS`) is decoded at half its size.
    """
    try:
        width, height = opened(data, source).size
    except Exception:  # `decode_upright` says what is wrong with it
        width = height = 1
    side = max(width, height) if width * height <= MAX_PIXELS else min(width, height) // 2
    image = decode_upright(data, source, side).image
    if max_side and max(image.size) > max_side:
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    return image


def data_url(data: bytes, source: ImageSource, max_side: int = 0) -> str:
    """The image as a `data:` URL. Raises UnreadableImage.

    Most photos are sent as they are. Those that are turned by EXIF, too large, or of a format that servers do not
    read are encoded again, upright: not every server applies the EXIF orientation.
    """
    picture = open_picture(data, source, max_side)  # also where the bytes are sent: broken ones must not be
    original = opened(data, source)
    kind = SENT_AS_THEY_ARE.get(original.format)
    if kind is not None and picture.size == original.size and not _is_turned_or_animated(original):
        return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    buffer = io.BytesIO()
    if original.format in LOSSLESS:
        kind = "image/png"
        picture.save(buffer, "PNG")
    else:
        kind = "image/jpeg"
        picture.save(buffer, "JPEG", quality=95)
    return f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _is_turned_or_animated(image: Any) -> bool:
    try:
        return image.getexif().get(_ORIENTATION, 1) != 1 or getattr(image, "is_animated", False)
    except Exception:  # an EXIF block that cannot be read: encoding the image again drops it
        return True
