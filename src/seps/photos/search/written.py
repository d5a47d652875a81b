"""Results as files: copies of the pictures, and a page with their thumbnails."""

from __future__ import annotations

import base64
import html
import os
from pathlib import Path, PurePosixPath

from seps.files import numbered, write_text
from seps.images.shards import UnreadableImage, read_source
from seps.photos.search.results import Results

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="generator" content="seps find">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; color-scheme: light dark; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 1rem; }}
figure {{ margin: 0; overflow-wrap: anywhere; }}
img {{ max-width: 100%; height: 160px; object-fit: contain; }}
figcaption {{ font-size: 12px; }}
</style></head><body><h1>{title}</h1><main>
{pictures}
</main></body></html>
"""
_FIGURE = (
    '<figure><a href="{link}"><img alt="" src="data:image/jpeg;base64,{thumbnail}"></a>'
    "<figcaption>{rank}. {score:.3f}, {date}<br>{name}</figcaption></figure>"
)


def write_page(path: Path, results: Results) -> None:
    """Write a page that needs no other file: thumbnails, each a link to its picture."""
    thumbnails = results.thumbnails()
    pictures = [
        _FIGURE.format(
            link=html.escape(picture.source.path.as_uri()),
            thumbnail=base64.b64encode(thumbnails.get(picture.hit.id, b"")).decode(),
            rank=picture.hit.rank,
            score=picture.hit.score,
            date=picture.hit.date[:10],
            name=html.escape(picture.name.encode("utf-8", "backslashreplace").decode()),
        )
        for picture in results
    ]
    write_text(path, _PAGE.format(title=html.escape(str(results.query)), pictures="\n".join(pictures)))


def copy_to(folder: Path, results: Results) -> tuple[list[Path], list[str]]:
    """Copy the files into `folder`, which is made: the copies, and sentences on files that could not be read.

    Nothing is overwritten: a name that is taken gets a number, `beach (2).jpg`. The copies keep their file times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies, problems = [], []
    for picture in results:
        source = picture.source
        try:
            data = read_source(source)
        except UnreadableImage as error:
            problems.append(f"{picture.name}: {error.why}")
            continue
        name = source.path.name if source.member is None else PurePosixPath(source.member).name
        copy = _write_new(folder, name, data)
        os.utime(copy, ns=(picture.hit.mtime, picture.hit.mtime))
        copies.append(copy)
    return copies, problems


def _write_new(folder: Path, name: str, data: bytes) -> Path:
    for path in numbered(folder / name, " ({})"):
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            continue
        except BaseException:  # half of a picture is none
            path.unlink(missing_ok=True)
            raise
        return path
    raise AssertionError("there is always another number")
