"""Formats of pictures: which suffix means which, and which package reads those that Pillow does not.

Pillow reads `PLAIN` by itself. Every other format has a `Reader`: a package of the extra "formats", imported when the
first such file is opened.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

from seps.images.sources import DataError

EXTRA = "pip install 'seps[formats]'"


def _suffixes(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLAIN = _suffixes(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .gif .bmp .tif .tiff .ppm .pgm .pbm .pnm .jp2 .j2k .avif .avifs"
)


@dataclass(frozen=True)
class Reader:
    """A package that reads some formats."""

    format: str
    """As `Image.format` of what it opens."""
    plural: str
    """What its files are called, for messages."""
    package: str
    suffixes: frozenset[str]

    @property
    def missing(self) -> str:
        """Why its files are passed over where the package is not installed."""
        return f"{self.plural}, passed over: {EXTRA} reads them"


HEIF = Reader("HEIF", "HEIC pictures", "pillow_heif", _suffixes(".heic .heics .heif .heifs .hif"))
JXL = Reader("JXL", "JPEG XL pictures", "pylibjxl", _suffixes(".jxl"))
_CAMERAS = (
    ".3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .iiq .kdc .mef .mos .mrw .nef .nrw .orf .pef .raf .raw .rw2 .rwl "
    ".sr2 .srf .srw .x3f"
)
RAW = Reader("RAW", "RAW pictures", "rawpy", _suffixes(_CAMERAS))
_VIDEOS = ".mp4 .m4v .mov .3gp .3g2 .avi .mkv .webm .mts .m2ts .mpg .mpeg .wmv"
VIDEO = Reader("VIDEO", "videos", "av", _suffixes(_VIDEOS))
READERS = (HEIF, JXL, RAW, VIDEO)
_BY_SUFFIX = {suffix: reader for reader in READERS for suffix in reader.suffixes}
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs", b"mif1", b"msf1"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_RAW_STARTS = (b"FUJIFILMCCD-RAW", b"IIRO", b"IIRS", b"MMOR", b"IIU\0", b"FOVb")
"""Of RAW files that are nothing else by their first bytes; most of the others are TIFF files by these."""


class MissingReader(DataError):
    """A file whose format is read by a package that is not installed."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        super().__init__(f"{reader.plural} need the package {reader.package}, which is not installed: {EXTRA}")


def suffix_of(name: str | os.PathLike[str]) -> str:
    """The suffix of a file's name in small letters, with its dot."""
    return os.path.splitext(os.fspath(name))[1].lower()


def reader_of(name: str | os.PathLike[str]) -> Reader | None:
    """The reader that a file's name asks for; None for what Pillow reads and for what is no picture."""
    return _BY_SUFFIX.get(suffix_of(name))


def is_video(name: str | os.PathLike[str]) -> bool:
    """Whether a file is a video by its name."""
    return suffix_of(name) in VIDEO.suffixes


@functools.cache
def installed(reader: Reader) -> bool:
    """Whether the reader's package is there; nothing is imported."""
    try:
        return importlib.util.find_spec(reader.package) is not None
    except (ImportError, ValueError):
        return False


def reader_for(data: bytes, name: str = "") -> Reader | None:
    """The reader that the bytes of a picture need; the name decides only where the bytes can mean several formats."""
    if data[4:8] == b"ftyp":
        brands = {data[8:12], *(data[start : start + 4] for start in range(16, min(_box_size(data), 256), 4))}
        if data[8:12] == b"crx ":
            return RAW
        # "mif1" alone says only that it is a still picture: AVIF where a brand says so, which Pillow reads.
        return HEIF if data[8:12] in _HEIF_BRANDS and not brands & _AVIF_BRANDS else None
    if data[:2] == b"\xff\x0a" or data[4:12] == b"JXL \r\n\x87\n":
        return JXL
    if data.startswith(_RAW_STARTS) or (data[:2] in (b"II", b"MM") and data[8:10] == b"CR"):
        return RAW
    named = suffix_of(name) in RAW.suffixes and not data.startswith(b"\xff\xd8\xff")
    return RAW if named else None


def _box_size(data: bytes) -> int:
    return int.from_bytes(data[:4], "big")
