"""Descriptions of a folder's pictures, read from JSONL files, and joined with the metadata of their files.

One JSON object per line: {"image": "sub/cat.jpg", "dense": "A tabby cat ..."}. `image` is the path in the folder, or
the name of a member of a tar, then with "shard": "a.tar" where several tars hold that name, or "c.mp4 @ 00:01:20" for a
frame of a video. A shard that is not in the folder is ignored: its pictures may lie there loose. `text` is read like
`dense`, and `id` like `image`. Lines that cannot be used are
remembered with their reason; the others count.
"""

from __future__ import annotations

import fnmatch
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seps.images.formats import is_video
from seps.images.metadata import WrittenText
from seps.images.sources import DataError
from seps.parsing import ShapeError, has_words, is_whole, parse_object
from seps.photos.indexing.gallery import Found, Gallery, Problem, shown
from seps.retrieval.data.lines import TOO_LONG, Root, cut_text, is_unicode, raw_lines

Place = tuple[str, str]
"""Shard ("" without) and image."""
_OTHER_KINDS = ("captions", "caption", "reason", "guides")
"""Keys of lines that rightly have no description: of a data set, of images that `seps caption` set aside, of guides."""


_ENDS = ".!?\u2026\u3002\uff01\uff1f"
"""Marks after which a sentence begins."""


class Descriptions:
    """Texts by image, and the lines that could not be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self._texts: dict[Place, tuple[str, str]] = {}
        self._composed: dict[Place, Place] = {}
        self._ids: dict[str, Place] = {}
        self._unpacked: dict[str, Place] = {}
        """Of pictures whose line names a shard that is not in the folder, by name: they may lie there loose."""

    def read(self, file: Path) -> None:
        """Take over the texts of a JSONL file; later files and lines count. Raises DataError where there is none."""
        root = Root(file.parent)
        for number, line in enumerate(raw_lines(file), start=1):
            where = f"{shown(file.name)}, line {number}"
            if line is None or line.strip():
                why = TOO_LONG if line is None else self._take(line, where, root)
                if why:
                    self.problems.append(Problem(where, why))

    def _take(self, line: bytes, where: str, root: Root) -> str | None:
        """Read one line; returns why it cannot be used, or not all of it."""
        try:
            value = parse_object(line.decode("utf-8"))
        except UnicodeDecodeError:
            return "not UTF-8 text"
        except ShapeError:
            return "not a JSON object like {...}"
        except ValueError as error:
            return f"not valid JSON ({error})"
        image, shard = value.get("image", value.get("id")), value.get("shard") or ""
        if is_whole(image):
            image = str(image)
        if not isinstance(image, str) or not isinstance(shard, str) or not image:
            return "it names no picture under the key 'image'"
        place = self._ids.get(image) or (shard, image.removeprefix("./"))
        if shard and not os.path.isfile(self.folder / shard):
            self._unpacked[place[1]] = place
        if value.get("id") is not None and "image" in value:
            self._ids[str(value["id"])] = place
        return self._keep(value, place, where)

    def _keep(self, value: dict[str, Any], place: Place, where: str) -> str | None:
        key = next((key for key in ("dense", "text") if key in value), None)
        if key is None:
            if any(name in value for name in _OTHER_KINDS):
                return None
            return f"it has no description under the key 'dense', only {', '.join(map(repr, value))}"
        text = value[key]
        if text is None:
            return None
        if not has_words(text):
            return f"its {key!r} is not a text with words in it"
        if not is_unicode(text):
            return f"its {key!r} holds half of a surrogate pair, which is not a character"
        text, notice = cut_text(text.strip())
        self._texts[place] = (text, where)
        self._composed[_composed(place)] = place
        return notice

    def of(self, image: Found) -> str | None:
        """The description of an image, or None."""
        place = self._place(image, self._texts)
        return None if place is None else self._texts[place][0]

    def _place(self, image: Found, table: Mapping[Place, Any]) -> Place | None:
        if image.member is None:
            wanted = [("", image.path), self._unpacked.get(image.path, ("", image.path))]
        else:  # a time code alone would be a frame of every video
            wanted = [(image.path, image.member), ("", str(image) if is_video(image.path) else image.member)]
        for place in wanted:
            # Some systems write the accents of file names as letters of their own.
            for known in (place, self._composed.get(_composed(place))):
                if known in table:
                    return known
        return None

    def unused(self, gallery: Gallery) -> list[Problem]:
        """The lines whose image is not in the folder; one that is left out on purpose is no fault."""
        images = gallery.images
        used = {self._place(image, self._texts) for image in images}
        return [
            Problem(where, f"there is no picture {shown(place[1])} in the folder")
            for place, (_, where) in self._texts.items()
            if place not in used and not gallery.is_left_out(place[0] or place[1])
        ]


def _composed(place: Place) -> Place:
    return unicodedata.normalize("NFC", place[0]), unicodedata.normalize("NFC", place[1])


def read_descriptions(root: Path, extra: Iterable[str | os.PathLike[str]] = ()) -> Descriptions:
    """Descriptions from `root`'s own JSONL files, then from the files named. Raises DataError for one not there."""
    texts = Descriptions(root)
    try:
        files = sorted(root.glob("*.jsonl"))
    except OSError as error:
        raise DataError(f"{root} cannot be read ({error.strerror or error}). Nothing was changed.") from error
    for file in files:
        if not file.name.startswith("."):
            try:
                texts.read(file)
            except DataError as error:
                texts.problems.append(Problem(shown(file.name), str(error)))
    for named in extra:
        texts.read(Path(named))
    return texts


def described(written: str | None, texts: Sequence[WrittenText]) -> tuple[str | None, str | None]:
    """The description of a picture, of what was written for it and of its metadata, and where it is from.

    What stands in the description already is not added again.
    """
    text, sources = written or "", ["jsonl"] if written else []
    for part in texts:
        whole = text.casefold()
        new = [each for each in part.texts if not re.search(rf"(?<!\w){re.escape(each.casefold())}(?!\w)", whole)]
        if new:
            between = "" if not text else " " if text[-1] in _ENDS else ". "
            text += between + ", ".join(new)
            sources.append(f"{part.source} {part.kind}")
    return cut_text(text)[0] or None, ", ".join(sources) or None


def named_by(patterns: Sequence[str], images: Iterable[Found]) -> set[str]:
    """Ids of the images that one of the names or patterns (`*`, `?`) fits. Raises DataError for one that fits none."""
    names = {str(image): image.id for image in images}
    found: set[str] = set()
    for pattern in patterns:
        fits = {names[name] for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not fits:
            raise DataError(
                f"No picture of the folder is named {pattern!r}, so no description was taken away. Give its path in "
                "the folder, or a pattern like 'holiday/*'; '*' is all of them. Nothing was changed."
            )
        found |= fits
    return found


def unusable(
    galleries: Sequence[Gallery], texts: Sequence[Descriptions], named: Iterable[str | os.PathLike[str]]
) -> list[Problem]:
    """Lines that cannot be used, of one `Descriptions` per gallery.

    A line of a `named` file, which all of them read, is of use where any of the folders has its picture.
    """
    found = [[*text.problems, *text.unused(gallery)] for gallery, text in zip(galleries, texts, strict=True)]
    names = {shown(Path(file).name) for file in named}
    return [
        problem
        for problem in dict.fromkeys(problem for some in found for problem in some)
        if problem.name.split(", line ")[0] not in names or all(problem in some for some in found)
    ]
