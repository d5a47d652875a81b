"""What a library finds, as objects that show themselves: in a notebook with thumbnails, elsewhere as text."""

from __future__ import annotations

import base64
import html
import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from seps.images.dates import local_time
from seps.photos.search.query import Query, Term
from seps.retrieval.ranking.bank import GOOD_CONFIDENCE

if TYPE_CHECKING:
    from PIL import Image

    from seps.images.sources import ImageSource
    from seps.photos.library import Library
    from seps.retrieval.explain.explanation import Explanation

SHOWN = (
    *("id", "path", "member", "width", "height", "mtime", "sha256", "taken"),
    *("sources", "latitude", "longitude", "ocr"),
)
"""Columns of the store that a `Hit` has."""
IN_PICTURE = "text in the picture"
"""As a source, beside those of descriptions."""


def sources_of(described: str | None, ocr: str | None) -> list[str]:
    """Sources of a picture's texts, of the columns `sources` and `ocr` of a row."""
    return [*(described.split(", ") if described else []), *([IN_PICTURE] if ocr else [])]


@dataclass(frozen=True)
class Hit:
    """One image that a search found: `rank` from 1, `score`, and where the image is.

    `path` is relative to the indexed folder; `member` is its name inside a tar shard, or the time of a video's frame.
    `mtime` is the time of the file in nanoseconds since 1970, `width` and `height` are pixels.
    """

    rank: int
    score: float
    id: str
    path: str
    """Relative to the indexed folder."""
    member: str | None
    width: int
    height: int
    mtime: int
    sha256: str = ""
    """Of the file's content when it was indexed."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Parts of the score that do not come from the model, by name: "lexical" for words found in texts,
    "background" for the level of the picture over the bank."""
    confidence: float | None = None
    """In [0, 1]; None where the store has no bank of background queries, or a picture was searched by."""
    taken: int | None = None
    """Nanoseconds since 1970 at which the photo was taken, by EXIF; None where that is not known."""
    parts: Sequence[float] = ()
    """Of a query of several parts what each adds to the score."""
    sources: str | None = None
    """Where its description is from: "jsonl, xmp title, iptc keywords"; None without a description."""
    latitude: float | None = None
    longitude: float | None = None
    """Degrees, where the file says where the photo was taken."""
    ocr: str | None = None
    """Text in the picture; empty where there is none, None where it was not looked for."""
    folded: tuple[Hit, ...] = ()
    """Near-duplicates that come after it, where these are folded."""

    @property
    def when(self) -> int:
        """Nanoseconds since 1970 at which it was taken, or else the time of its file."""
        return self.mtime if self.taken is None else self.taken

    @property
    def date(self) -> str:
        """`when` in local time like 2024-05-31T18:20:05."""
        return local_time(self.when)

    @property
    def described_by(self) -> list[str]:
        """Sources of its texts, like "jsonl", "xmp title" or `IN_PICTURE`."""
        return sources_of(self.sources, self.ocr)

    @property
    def date_source(self) -> str:
        """Where `date` comes from: "exif" or "file"."""
        return "file" if self.taken is None else "exif"

    @property
    def good(self) -> bool | None:
        """Whether it is a good match and not one of the rest; None without a confidence."""
        return None if self.confidence is None else self.confidence >= GOOD_CONFIDENCE

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank": self.rank,
            "score": round(self.score, 6),
            **({"confidence": round(self.confidence, 4)} if self.confidence is not None else {}),
            "path": self.path,
            **({"member": self.member} if self.member is not None else {}),
            "id": self.id,
            "width": self.width,
            "height": self.height,
            "date": self.date,
            "date_source": self.date_source,
            **({"described_by": self.described_by} if self.described_by else {}),
            **({"text_in_picture": self.ocr} if self.ocr else {}),
            **({"position": [self.latitude, self.longitude]} if self.latitude is not None else {}),
            **({"terms": {name: round(value, 6) for name, value in self.terms.items()}} if self.terms else {}),
        }


_CELL = "display:inline-block;vertical-align:top;width:180px;margin:4px;font:12px sans-serif;overflow-wrap:anywhere"


@dataclass(frozen=True, repr=False)
class Result:
    """One picture of a library that fits a query."""

    library: Library
    hit: Hit
    query: Query

    @property
    def folded(self) -> tuple[Result, ...]:
        """Its near-duplicates, where the query folds them."""
        return tuple(replace(self, hit=copy) for copy in self.hit.folded)

    @property
    def source(self) -> ImageSource:
        """Where its bytes are. Raises StoreError for a path out of the store's folders."""
        return self.library.source(self.hit.path, self.hit.member)

    @property
    def path(self) -> Path:
        """Its file, absolute; of a picture in a tar shard the shard."""
        return self.source.path

    @property
    def name(self) -> str:
        """Its file, absolute; `SHARD.tar:MEMBER` for a member of a shard."""
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def member(self) -> str | None:
        """Its name inside a tar shard; None for a plain file."""
        return self.hit.member

    @property
    def rank(self) -> int:
        """1 is the best."""
        return self.hit.rank

    @property
    def score(self) -> float:
        """What pictures are ranked by."""
        return self.hit.score

    @property
    def confidence(self) -> float | None:
        """In [0, 1]; None without a bank of background queries, or where a picture was searched by."""
        return self.hit.confidence

    @property
    def good(self) -> bool | None:
        """Whether it is a good match and not one of the rest; None without a confidence."""
        return self.hit.good

    @property
    def id(self) -> str:
        """Its row in the store."""
        return self.hit.id

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.hit.width, self.hit.height

    @property
    def terms(self) -> Mapping[str, float]:
        """Parts of the score that do not come from the model, by name."""
        return self.hit.terms

    @property
    def described_by(self) -> list[str]:
        """Sources of its texts, like "jsonl", "xmp title" or "text in the picture"; empty without any."""
        return self.hit.described_by

    @property
    def texts(self) -> str:
        """Its description and the text in it, read from the store; empty without any."""
        row = self.library.store.get(self.id, ["dense", "ocr"]) or {}
        return "\n".join(filter(None, (row.get("dense"), row.get("ocr"))))

    @property
    def text_in_picture(self) -> str | None:
        """Text in it, a line per line; empty where there is none, None where it was not looked for."""
        return self.hit.ocr

    @property
    def position(self) -> tuple[float, float] | None:
        """(latitude, longitude) in degrees, where its file has them."""
        latitude, longitude = self.hit.latitude, self.hit.longitude
        return None if latitude is None or longitude is None else (latitude, longitude)

    @property
    def parts(self) -> list[tuple[Term, float]]:
        """Of a query of several parts what each adds to the score; else empty."""
        return list(zip(self.query.parts, self.hit.parts, strict=False))

    def thumbnail(self) -> bytes:
        """A small JPEG of it, kept in the store. Raises StoreError where the picture was taken out meanwhile."""
        return self.library.thumbnail(self.id)

    def image(self) -> Image.Image:
        """The picture, upright; the thumbnail where its file cannot be read."""
        return self.library.image(self.id)

    def explain(self) -> Explained:
        """Why it has its score: of a sum for the first sentence. Raises ValueError where a picture was searched by."""
        text = self.query.explained
        if text is None:
            raise ValueError("This picture was found by a picture; only a sentence can be explained. Use search().")
        return self.library.explain(self.id, text, self.score if self.query.sentence is not None else None)

    def as_dict(self, *, absolute: bool = True) -> dict[str, Any]:
        """Plain values for JSON; the path `absolute`, or below the indexed folder."""
        facts = self.hit.as_dict()
        if absolute:
            facts["path"] = str(self.path)
        if self.hit.parts:
            facts["parts"] = [{"part": str(term), "score": round(value, 6)} for term, value in self.parts]
        if self.hit.folded:
            copies = [replace(copy, hit=replace(copy.hit, parts=())) for copy in self.folded]  # the whole score alone
            facts["folded"] = [copy.as_dict(absolute=absolute) for copy in copies]
        return facts

    def __repr__(self) -> str:
        sure = "" if self.confidence is None else f", confidence {self.confidence:.2f}"
        return f"<{self.rank}: {self.name}, score {self.score:.3f}{sure}>"

    def _repr_html_(self) -> str:
        sure = "" if self.confidence is None else f" &middot; confidence {self.confidence:.2f}"
        name = html.escape(self.member or self.hit.path)
        return (
            f'<div style="{_CELL}">{_image(self.thumbnail())}<br><b>{self.rank}</b> {name}<br>'
            f"score {self.score:.3f}{sure}</div>"
        )


class Results(Sequence[Result]):
    """What a search has: pictures, the best first, and the query. The same at every door."""

    def __init__(self, library: Library, query: Query, hits: Sequence[Hit], notes: Sequence[str] = ()) -> None:
        self.library, self.query, self.hits, self.notes = library, query, tuple(hits), tuple(notes)
        self.every = [hit for first in self.hits for hit in (first, *first.folded)]
        """The hits, each with its near-duplicates behind it."""

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> Results: ...
    def __getitem__(self, place: int | slice) -> Result | Results:
        if isinstance(place, slice):
            return Results(self.library, self.query, self.hits[place], self.notes)
        return Result(self.library, self.hits[place], self.query)

    def __len__(self) -> int:
        return len(self.hits)

    @property
    def paths(self) -> list[Path]:
        """Their files."""
        return [result.path for result in self]

    @property
    def note(self) -> str:
        """Sentences where the model did not read the whole query; else empty."""
        return " ".join(self.notes)

    @property
    def good(self) -> int | None:
        """How many are good matches; None where that is not known of all."""
        known = [hit.good for hit in self.hits]
        return None if None in known else sum(map(bool, known))

    def thumbnails(self) -> dict[str, bytes]:
        """Small JPEGs by id, without those of pictures that were taken out meanwhile."""
        return self.library.thumbnails([hit.id for hit in self.hits])

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "<nothing found>"

    def _repr_html_(self) -> str:
        title = f"<p>{html.escape(str(self.query))}</p>" if self.query.sentences else ""
        note = f"<p><i>{html.escape(self.note)}</i></p>" if self.note else ""
        return f"<div>{title}{note}{''.join(result._repr_html_() for result in self) or 'nothing found'}</div>"


@dataclass(frozen=True, repr=False)
class Explained:
    """Why a picture has its score for a sentence."""

    explanation: Explanation
    photo: Image.Image
    path: Path
    photo_note: str = ""
    """Why `photo` is the thumbnail and not the file; empty where it is the file."""

    @property
    def note(self) -> str:
        """What took no part in the score, and why `photo` is not the file; empty where nothing is to be noted."""
        return " ".join(filter(None, (self.explanation.note, self.photo_note)))

    @property
    def score(self) -> float:
        """The score that the search gave it; words and patches add up to it."""
        return self.explanation.score

    @property
    def words(self) -> dict[str, float]:
        """What each word of the sentence adds; a word that occurs twice adds up."""
        values: dict[str, float] = {}
        for part in self.explanation.words:
            values[part.word] = values.get(part.word, 0.0) + part.contribution
        return values

    def image(self) -> Image.Image:
        """One sheet: the kept patches, the merged groups, and a heat map per word."""
        from seps.retrieval.explain.picture import draw

        return draw(self.explanation, self.photo)

    def save(self, path: str | Path) -> Path:
        """Write the sheet; the name says the format."""
        self.image().save(path)
        return Path(path)

    def show(self) -> None:
        """Show the sheet: in a notebook below the cell, elsewhere in the system's viewer."""
        try:
            shell: Any = get_ipython()  # type: ignore[name-defined]
        except NameError:
            shell = None
        if shell is not None and type(shell).__name__ == "ZMQInteractiveShell":
            importlib.import_module("IPython.display").display(self)
        else:
            self.image().show(title=self.explanation.caption)

    def __repr__(self) -> str:
        parts = ", ".join(f"{word} {value:+.3f}" for word, value in self.words.items())
        return f"<{self.path.name}: score {self.score:.3f} = {parts} and the rest>"

    def _repr_html_(self) -> str:
        page = io.BytesIO()
        self.image().save(page, "PNG")
        return f"<div>{_image(page.getvalue(), 'png', 'max-width:100%')}<br>{html.escape(repr(self))}</div>"


def _image(data: bytes, kind: str = "jpeg", style: str = "max-width:172px;max-height:172px") -> str:
    return f'<img style="{style}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'
