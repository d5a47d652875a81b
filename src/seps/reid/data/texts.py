"""Texts of shots: what was written of one shot, from its own pictures, as a JSONL file has it.

    {"image": "train/RGB/0001_c1_s1_001.jpg", "dense": "A person in a red jacket and dark trousers ..."}

`image` is a picture's path under the root of the data set, as `seps caption ROOT` writes it; `text` is read like
`dense`. A text may come from one sensor's picture or from several: those of a shot are joined in the sensors' order.

A text belongs to its shot (`ReidRecord.text`) and is found nowhere else, so that no code can give a query what was
written of a gallery shot. `refuse_copies` guards against files that do so themselves.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from seps.files import open_regular
from seps.parsing import as_object, has_words, parse_json
from seps.reid.data.records import ReidDataError, ReidDataset, ReidRecord

MAX_LINE = 1 << 20
_NO_TEXT = ("reason", "captions", "caption", "guides")
"""Keys of lines that rightly have no text, as of pictures that `seps caption` set aside."""


def with_texts(dataset: ReidDataset, file: Path | str, root: Path | str) -> ReidDataset:
    """The data set with the texts of a file. Shots without a line have none.

    Raises ReidDataError for a line that cannot be read, two texts of one picture, a text that names its shot or its
    identity, or a file without a text of any shot.
    """
    file, root = Path(file), Path(os.path.abspath(root))
    texts = read_texts(file)
    made: dict[int, ReidRecord] = {}
    used: set[str] = set()

    def written(record: ReidRecord) -> ReidRecord:
        if id(record) not in made:
            names = [relative(record, sensor, root) for sensor in dataset.modalities]
            # A picture of all sensors side by side is one name.
            hits = [name for name in dict.fromkeys(names) if name in texts]
            used.update(hits)
            text = " ".join(texts[name] for name in hits) or None
            if text is not None:
                refuse_naming(record, text, file)
            made[id(record)] = replace(record, text=text)
        return made[id(record)]

    train, query, gallery = (tuple(map(written, shots)) for shots in (dataset.train, dataset.query, dataset.gallery))
    if not used:
        example = relative(dataset.train[0], dataset.modalities[0], root) if dataset.train else "train/RGB/NAME.jpg"
        raise ReidDataError(
            f"{file} has no text of any shot of this data set: its lines name a picture by its path under {root}, such "
            f"as {example!r}"
        )
    return replace(dataset, train=train, query=query, gallery=gallery)


def relative(record: ReidRecord, sensor: str, root: Path) -> str:
    """The path of a sensor's picture under the root, with slashes; "" where the record lacks the sensor."""
    source = record.sources.get(sensor)
    return "" if source is None else Path(os.path.relpath(source.path, root)).as_posix()


def read_texts(file: Path) -> dict[str, str]:
    """Picture -> text of a JSONL file. Raises ReidDataError, with the line, for what cannot be read."""
    texts: dict[str, str] = {}
    for where, line in _lines(file):
        image, text = _entry(line, where)
        if text is None:
            continue
        if texts.setdefault(image, text) != text:
            raise ReidDataError(f"{where}: {image!r} has another text in an earlier line; leave one of them")
    return texts


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of each line that is not blank."""
    try:
        with open_regular(file) as opened:
            number = 0
            while line := opened.readline(MAX_LINE + 1):
                number += 1
                where = f"{file}, line {number}"
                if len(line) > MAX_LINE:
                    raise ReidDataError(f"{where} has more than {MAX_LINE:,} bytes; a text of a shot is shorter")
                if line.strip():
                    try:
                        yield where, parse_json(line.decode("utf-8"))
                    except ValueError as error:
                        raise ReidDataError(f"{where} is not valid JSON in UTF-8: {error}") from error
    except OSError as error:
        raise ReidDataError(f"{file} cannot be read: {error.strerror or error}") from error


def _entry(value: Any, where: str) -> tuple[str, str | None]:
    """(picture, text) of a line; no text where it rightly has none."""
    image = as_object(value).get("image")
    if not has_words(image):
        raise ReidDataError(f'{where} names no picture: write {{"image": "train/RGB/NAME.jpg", "dense": "..."}}')
    key = next((key for key in ("dense", "text") if value.get(key) is not None), None)
    if key is None:
        if any(name in value for name in (*_NO_TEXT, "dense", "text")):
            return image, None
        raise ReidDataError(f"{where} has no text under the key 'dense'")
    text = value[key]
    if not has_words(text):
        raise ReidDataError(f"{where}: its {key!r} is not a text with words in it")
    return Path(image).as_posix().removeprefix("./"), " ".join(text.split())


def refuse_naming(record: ReidRecord, text: str, file: Path) -> None:
    """Raise ReidDataError for a text that holds the shot's file name, or its identity as a number."""
    number = rf"\b(?:id|pid|identity|person|vehicle)\W{{0,3}}0*{record.pid}\b"
    if record.name.lower() in text.lower() or re.search(number, text, re.IGNORECASE):
        raise ReidDataError(
            f"{file}: the text of {record.name} names the shot or its identity ({text[:80]!r}): it would tell a query "
            "whom to find. Write texts from the pictures alone."
        )


def copied_texts(dataset: ReidDataset) -> list[tuple[ReidRecord, ReidRecord]]:
    """Each query whose text is word for word that of a gallery shot that it should find, with the first such shot.

    Shots that the data set's rule leaves out (the same camera or scene) are none that it should find.
    """
    holders: dict[tuple[int, str], list[ReidRecord]] = defaultdict(list)
    for record in dataset.gallery:
        if record.text is not None:
            holders[record.pid, _plain(record.text)].append(record)
    pairs = []
    for query in dataset.query:
        if query.text is None:
            continue
        others = (
            shot for shot in holders[query.pid, _plain(query.text)] if _view(dataset, shot) != _view(dataset, query)
        )
        first = next(others, None)
        if first is not None:
            pairs.append((query, first))
    return pairs


def refuse_copies(dataset: ReidDataset) -> None:
    """Raise ReidDataError for `copied_texts`: such a file has texts of identities, not of shots."""
    pairs = copied_texts(dataset)
    if pairs:
        query, shot = pairs[0]
        raise ReidDataError(
            f"{len(pairs)} of {len(dataset.query)} queries have, word for word, the text of a gallery shot that they "
            f"should find ({query.name} and {shot.name}: {str(query.text)[:80]!r}). A query must not see what was "
            "written of the gallery: write a text of each shot from its own pictures, or, where equal texts are honest "
            "(short lists of attributes), set data.text_copies to 'allow'."
        )


def _view(dataset: ReidDataset, record: ReidRecord) -> int:
    return record.sceneid if dataset.excludes == "scene" else record.camid


def _plain(text: str) -> str:
    """Without letter case, punctuation and spaces: a copy stays one."""
    return "".join(re.findall(r"\w+", text.lower()))
