"""What a library finds, as objects that show themselves: in a notebook with thumbnails, elsewhere as text."""

from __future__ import annotations

import base64
import html
import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from seps.photos.search.searcher import Hit

if TYPE_CHECKING:
    from PIL import Image

    from seps.photos.library import Library
    from seps.retrieval.explain.explanation import Explanation

_CELL = "display:inline-block;vertical-align:top;width:180px;margin:4px;font:12px sans-serif;overflow-wrap:anywhere"


@dataclass(frozen=True, repr=False)
class Found:
    """One picture of a library that was found."""

    library: Library
    hit: Hit
    query: str
    """The sentence that found it; empty where a picture was searched by."""

    @property
    def path(self) -> Path:
        """Its file, absolute; of a picture in a tar shard the shard."""
        return self.library.file(self.hit.path)

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

    def thumbnail(self) -> bytes:
        """A small JPEG of it, kept in the store. Raises StoreError where the picture was taken out meanwhile."""
        return self.library.thumbnail(self.id)

    def image(self) -> Image.Image:
        """The picture, upright; the thumbnail where its file cannot be read."""
        return self.library.image(self.id)

    def explain(self) -> Explained:
        """Why it has its score for the sentence. Raises ValueError where a picture was searched by."""
        if not self.query:
            raise ValueError("This picture was found by a picture; only a sentence can be explained. Use search().")
        return self.library.explain(self.id, self.query, self.score)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the path absolute."""
        return {**self.hit.as_dict(), "path": str(self.path)}

    def __repr__(self) -> str:
        sure = "" if self.confidence is None else f", confidence {self.confidence:.2f}"
        return f"<{self.rank}: {self.path}{f':{self.member}' if self.member else ''}, score {self.score:.3f}{sure}>"

    def _repr_html_(self) -> str:
        sure = "" if self.confidence is None else f" &middot; confidence {self.confidence:.2f}"
        name = html.escape(self.member or self.hit.path)
        return (
            f'<div style="{_CELL}">{_image(self.thumbnail())}<br><b>{self.rank}</b> {name}<br>'
            f"score {self.score:.3f}{sure}</div>"
        )


class Hits(Sequence[Found]):
    """Pictures that were found, the best first."""

    def __init__(self, found: Sequence[Found], query: str = "", note: str = "") -> None:
        self._found = tuple(found)
        self.query = query
        self.note = note
        """A sentence where the model did not read the whole query; else empty."""

    @overload
    def __getitem__(self, place: int) -> Found: ...
    @overload
    def __getitem__(self, place: slice) -> Hits: ...
    def __getitem__(self, place: int | slice) -> Found | Hits:
        if isinstance(place, slice):
            return Hits(self._found[place], self.query, self.note)
        return self._found[place]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Found]:
        return iter(self._found)

    @property
    def paths(self) -> list[Path]:
        """Their files."""
        return [one.path for one in self]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "<nothing found>"

    def _repr_html_(self) -> str:
        title = f"<p>{html.escape(self.query)}</p>" if self.query else ""
        note = f"<p><i>{html.escape(self.note)}</i></p>" if self.note else ""
        return f"<div>{title}{note}{''.join(one._repr_html_() for one in self) or 'nothing found'}</div>"


@dataclass(frozen=True, repr=False)
class Explained:
    """Why a picture has its score for a sentence."""

    explanation: Explanation
    photo: Image.Image
    path: Path

    @property
    def score(self) -> float:
        """The score that the search gave it; words and patches add up to it."""
        return self.explanation.score

    @property
    def words(self) -> dict[str, float]:
        """What each word of the sentence adds; a word that occurs twice adds up."""
        found: dict[str, float] = {}
        for part in self.explanation.words:
            found[part.word] = found.get(part.word, 0.0) + part.contribution
        return found

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
