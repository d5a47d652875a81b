"""What a picture's file says of it: when and where it was taken, and what people wrote about it.

Dates and coordinates are from EXIF. Texts are from a sidecar, XMP, IPTC, EXIF and the text chunks of PNG, in this
order: for each kind of text the first of them that has it counts. Nothing here raises: a picture with broken metadata
is still a picture, and what is broken is a sentence in `Metadata.problems`.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, IptcImagePlugin

from seps.files import read_regular
from seps.images.dates import nanoseconds_of
from seps.images.decoding import opened
from seps.images.formats import is_video
from seps.images.sources import ImageSource
from seps.images.xmp import MAX_XMP_BYTES, BrokenXmp, position, read_xmp

KINDS = ("title", "caption", "persons", "places", "keywords")
"""Of texts, in the order in which a description has them."""
_CAMERA, _GPS = 0x8769, 0x8825
_TIMES = ((0x9003, 0x9011, 0x9291), (0x9004, 0x9012, 0x9292), (0x0132, 0x9010, 0x9290))
"""Tags of date, offset and parts of a second: of the original, of the digitised picture, of the last change."""
_IMAGE_DESCRIPTION, _USER_COMMENT = 0x010E, 0x9286
_XP_TITLE, _XP_COMMENT, _XP_KEYWORDS, _XP_SUBJECT = 0x9C9B, 0x9C9C, 0x9C9E, 0x9C9F
"""Tags of Windows, in UTF-16."""
_IPTC = {
    "title": ((2, 5), (2, 105)),
    "caption": ((2, 120),),
    "places": ((2, 27), (2, 92), (2, 90), (2, 95), (2, 101)),
    "keywords": ((2, 25),),
}
_IPTC_CODING, _UTF8_CODE = (1, 90), b"\x1b%G"
_PNG_TEXTS = {b"Title": "title", b"Description": "caption", b"Comment": "caption"}
_PNG_XMP = b"XML:com.adobe.xmp"
_MADE_BY_DEVICES = re.compile(
    r"(?:(?:olympus|minolta|samsung|kodak|sanyo|konica|sony) )?digital (?:still ?)?camera\W*|sony dsc|exif_jpeg_picture"
    r"|samsung camera pictures|dcim\\.*|untitled|default|dav|hdr|cof|mde|sdr|rhdr|ptr|nor|edf|fbt|dig|picasa"
    r"|(?:img|dsc[fn]?|pict|pxl|mvimg|gopr|imag|screenshot)[_-]?\d[\d_-]*(?:\.\w{3,4})?"
    r"|(?:processed|edited|saved) with .*|created by imagegear.*|file written by .*|adobe photoshop.*"
    r"|creator: gd-jpeg.*|lead technologies.*|intel\(r\) jpeg library.*|\W*",
    re.IGNORECASE,
)
"""Descriptions that cameras and programs write into every file."""
Texts = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class WrittenText:
    """One or more texts of a kind, and where they are from."""

    kind: str
    """One of `KINDS`."""
    source: str
    """"sidecar", "xmp", "iptc", "exif" or "png"."""
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Metadata:
    """What a picture's file and its sidecar say of it."""

    taken: int | None = None
    """Nanoseconds since 1970 by EXIF. The offset to UTC is that of the EXIF block, else that of this machine at that
    date: cameras write the time of their clock."""
    position: tuple[float, float] | None = None
    """(latitude, longitude) in degrees."""
    texts: tuple[WrittenText, ...] = ()
    """At most one per kind, in the order of `KINDS`."""
    problems: tuple[str, ...] = ()
    """What cannot be read of it, a sentence each."""


def read_metadata(data: bytes, source: ImageSource, sidecar: Path | None = None, *, texts: bool = True) -> Metadata:
    """The metadata of a picture from the bytes of its file; without `texts` and sidecar the date and position alone."""
    if is_video(source.path):
        return Metadata()  # a frame is a picture without metadata
    problems: list[str] = []
    sources: list[tuple[str, Texts]] = []
    taken, place = None, None
    if texts and sidecar is not None:
        place = _add_xmp(sources, problems, "sidecar", f"its sidecar {sidecar.name}", lambda: _sidecar(sidecar))
    try:
        image = opened(data, source)
        exif = Image.Image.getexif(image)  # not PNG's own method, which decodes all pixels to look behind them
        taken, where = _taken(exif), _position(exif)
        place = where or place
    except Exception:  # Pillow raises almost anything on broken bytes
        return Metadata(taken, place, _first_of_each(sources, source), tuple(problems))
    if texts:
        chunks = dict(_png_texts(data)) if image.format == "PNG" else {}
        packet = chunks.get(_PNG_XMP) or image.info.get("xmp")
        if packet:
            where = _add_xmp(sources, problems, "xmp", "its XMP block", lambda: _bytes(packet))
            place = place or where
        blocks: Mapping[str, Callable[[], Texts]] = {
            "iptc": lambda: _iptc(image),
            "exif": lambda: _exif(exif),
            "png": lambda: _png(chunks),
        }
        for name, read in blocks.items():
            try:
                sources.append((name, read()))
            except Exception as error:
                problems.append(f"its {name.upper()} block cannot be read ({type(error).__name__}); it is left out.")
    return Metadata(taken, place, _first_of_each(sources, source), tuple(problems))


def _add_xmp(
    sources: list[tuple[str, Texts]], problems: list[str], name: str, shown: str, read: Callable[[], bytes]
) -> tuple[float, float] | None:
    """Add the texts of a packet, or the sentence that it cannot be read; returns its coordinates."""
    try:
        texts, place = read_xmp(read())
    except OSError as error:
        problems.append(f"{shown} cannot be read ({error.strerror or error}); it is left out.")
        return None
    except BrokenXmp as error:
        problems.append(f"{shown} cannot be read: {error}; it is left out.")
        return None
    sources.append((name, texts))
    return place


def _sidecar(path: Path) -> bytes:
    return read_regular(path, MAX_XMP_BYTES)


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def _first_of_each(sources: Sequence[tuple[str, Texts]], source: ImageSource) -> tuple[WrittenText, ...]:
    """Of each kind the texts of the first source that has some which a person wrote."""
    found = []
    names = {(source.member or source.path.name).rpartition("/")[2]}
    names |= {name.rpartition(".")[0] for name in names}
    for kind in KINDS:
        for name, by_kind in sources:
            cleaned = (" ".join(text.replace("\0", " ").split()) for text in by_kind.get(kind, ()))
            texts = [text for text in cleaned if not _MADE_BY_DEVICES.fullmatch(text) and text not in names]
            if texts:
                found.append(WrittenText(kind, name, tuple(dict.fromkeys(texts))))
                break
    return tuple(found)


def _taken(exif: Image.Exif) -> int | None:
    more = exif.get_ifd(_CAMERA)
    for date, offset, second in _TIMES:
        time = nanoseconds_of(*(more.get(tag, exif.get(tag)) for tag in (date, offset, second)))
        if time is not None:
            return time
    return None


def _position(exif: Image.Exif) -> tuple[float, float] | None:
    gps = exif.get_ifd(_GPS)
    try:
        return position(_degrees(gps[2], gps[1], "S"), _degrees(gps[4], gps[3], "W"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _degrees(parts: Sequence[Any], reference: object, negative: str) -> float | None:
    """Degrees, minutes and seconds as degrees; None for what is no number."""
    degrees = float(sum(float(part) / 60**place for place, part in enumerate(parts)))
    if not math.isfinite(degrees) or len(parts) > 3:
        return None
    return -degrees if _decoded(reference).strip("\0 ").upper().startswith(negative) else degrees


def _exif(exif: Image.Exif) -> dict[str, list[str]]:
    more = exif.get_ifd(_CAMERA)
    keywords = _wide(exif.get(_XP_KEYWORDS)).split(";")
    captions = (exif.get(_IMAGE_DESCRIPTION), exif.get(_USER_COMMENT, more.get(_USER_COMMENT)))
    caption = next((text for value in captions if not _MADE_BY_DEVICES.fullmatch(text := _comment(value))), "")
    return {
        "title": [_wide(exif.get(_XP_TITLE))],
        "caption": [caption or _wide(exif.get(_XP_COMMENT)) or _wide(exif.get(_XP_SUBJECT))],
        "keywords": [word.strip() for word in keywords],
    }


def _wide(value: object) -> str:
    """A text of Windows, in UTF-16."""
    match value:
        case bytes() | tuple() | list():
            return bytes(value).decode("utf-16-le", "ignore").strip("\0 \ufeff")
    return ""


def _comment(value: object) -> str:
    """A description or comment; a comment begins with eight bytes that name its coding."""
    match value:
        case str():  # Pillow reads these bytes as Latin-1, whatever they are
            return _decoded(value.encode("latin-1", "replace")).strip("\0 ")
        case bytes():
            return _coded(value)
    return ""


def _coded(value: bytes) -> str:
    code, text = value[:8].rstrip(b"\0 "), value[8:]
    if code == b"UNICODE":  # in the byte order of the file, which writers get wrong: one with more letters of Latin
        little, big = (text.decode(f"utf-16-{order}", "ignore") for order in ("le", "be"))
        return max(little, big, key=lambda each: sum(letter < "\u0250" for letter in each)).strip("\0 \ufeff")
    return _decoded(text if code in (b"ASCII", b"JIS", b"") else value).strip("\0 ")


def _decoded(value: object) -> str:
    """Bytes as text: of a mark in UTF-16, else UTF-8, else the Latin letters of Windows."""
    if not isinstance(value, bytes):
        return value if isinstance(value, str) else ""
    if value[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return value.decode("utf-16", "ignore")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("cp1252", "replace")


def _iptc(image: Any) -> dict[str, list[str]]:
    info: Mapping[tuple[int, int], Any] = IptcImagePlugin.getiptcinfo(image) or {}
    utf8 = info.get(_IPTC_CODING) == _UTF8_CODE
    found: dict[str, list[str]] = {}
    for kind, tags in _IPTC.items():
        values = [info[tag] for tag in tags if tag in info]
        flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
        found[kind] = [each.decode("utf-8", "replace") if utf8 else _decoded(each) for each in flat]
    return found


def _png(chunks: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, kind in _PNG_TEXTS.items():
        if name in chunks:
            found.setdefault(kind, []).append(_decoded(chunks[name]))
    return {kind: texts[:1] for kind, texts in found.items()}


def _png_texts(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keyword and text of the text chunks of a PNG file, also of those behind its pixels, which Pillow must decode.

    Of each keyword that counts the first is read: any number of chunks takes the memory of a few.
    """
    place, wanted = 8, {*_PNG_TEXTS, _PNG_XMP}
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind in (b"tEXt", b"iTXt", b"zTXt"):
            name, _, value = data[place + 8 : place + 8 + length].partition(b"\0")
            if name not in wanted:
                place += 12 + length
                continue
            wanted.remove(name)
            packed = kind == b"zTXt"
            if kind == b"iTXt":
                packed, value = value[:1] == b"\1", value[2:].split(b"\0", 2)[-1]
            elif packed:
                value = value[1:]
            try:
                yield name, zlib.decompressobj().decompress(value, MAX_XMP_BYTES + 1) if packed else value
            except zlib.error:
                yield name, b""
        place += 12 + length
