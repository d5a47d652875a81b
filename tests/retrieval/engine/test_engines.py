"""Another kind of engine is one file and its row; another term of the ranking is a class and its place in `TERMS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.maintenance import verify
from seps.photos.search.explaining import StoredExplainer
from seps.photos.search.searcher import Searcher
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine import loading
from seps.retrieval.engine.engine import Digests, Photo, Traits, Unread
from seps.retrieval.engine.layout import Kept, VectorLayout
from seps.retrieval.engine.loading import EngineKind, engine_of
from seps.retrieval.engine.pictures import VectorPictures
from seps.retrieval.engine.queries import Array, Queries
from seps.retrieval.evaluate.protocol import view
from seps.retrieval.evaluate.run import evaluate, score_dataset
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.ranking import terms
from seps.retrieval.ranking.terms import GalleryFacts, ImageFacts, Matches
from stores import few_sentences, gallery, index, model

COLOURS = ("red", "green", "blue")


class ColourModel:
    """What `ColourEngine` wraps."""


class ColourEngine:
    """Pictures by their mean colour, sentences by the colours that they name: not one line of it is in the package."""

    device = torch.device("cpu")
    traits = Traits(
        kind="vectors",
        reads_pixels=True,
        reads_descriptions=False,
        selects_patches=False,
        explains="Colours are not explained.",
        pairs_queries="Colours take no descriptions.",
        guides=(),
        languages=(),
        width=3,
        score_unit=0.1,
        score_range=1.0,
        vector_slope=1.0,
        word_fit=1.0,
        short_background=None,
        background_weight=0.5,
        sizes=("vector",),
        default_size="vector",
        image_size=(8, 8),
        cpu_batch=4,
        settings="",
    )

    def decoding(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32)).mean(dim=(0, 1))

    def digests(self) -> Digests:
        return Digests("c" * 32)

    def encode_pixels(self, decoded: Sequence[Any]) -> Tensor:
        return F.normalize(torch.stack(list(decoded)), dim=-1)

    def pictures(self, encoded: Tensor, descriptions: object = None, **_: object) -> VectorPictures:
        none = encoded.new_zeros(len(encoded), 0, 1)
        return VectorPictures(encoded, none, none[..., 0].bool())

    def encode_texts(self, texts: Sequence[str], **_: object) -> Queries:
        named = torch.tensor([[1e-3 + text.lower().count(colour) for colour in COLOURS] for text in texts])
        return Queries(None, F.normalize(named, dim=-1))

    def vectors(self, encoded: VectorPictures | Queries) -> Tensor:
        assert encoded.vectors is not None
        return F.pad(encoded.vectors, (0, 2))

    def score(self, pictures: VectorPictures, queries: Queries, *, chosen: Array | None = None, **_: object) -> Tensor:
        assert queries.vectors is not None
        scores = pictures.vectors @ queries.vectors.T
        return scores if chosen is None else scores.gather(1, torch.from_numpy(chosen))

    def explain(self, caption: str, description: str | None, photo: Callable[[], Photo], **_: object) -> Explanation:
        raise ValueError(self.traits.explains)

    def layout(self, size: str) -> VectorLayout:
        return VectorLayout(3, 1)

    def keep(self, pictures: VectorPictures, layout: VectorLayout) -> Kept:
        return Kept(self.vectors(pictures))

    def unread(self, text: str) -> Unread:
        return Unread(None, False)


KIND = EngineKind(
    lambda found: ColourEngine() if isinstance(found, ColourModel) else None,  # type: ignore[return-value]
    lambda folder: False,
    lambda *_: ColourEngine(),  # type: ignore[return-value]
)


def test_another_kind_is_indexed_searched_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_sentences(monkeypatch)
    monkeypatch.setattr(loading, "KINDS", [KIND, *loading.KINDS])
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, colour in enumerate(COLOURS):
        Image.new("RGB", (40, 30), colour if colour != "green" else (0, 255, 0)).save(folder / f"{i}.png")
    (folder / "data.jsonl").write_text(
        "\n".join(f'{{"image": "{i}.png", "captions": ["a {colour} square"]}}' for i, colour in enumerate(COLOURS))
    )
    index_folder(folder, tmp_path / "s", ColourModel(), "colours", options=IndexOptions(workers=1))
    searcher = Searcher(tmp_path / "s", ColourModel())
    assert verify(searcher.store) == []
    for i, colour in enumerate(COLOURS):
        (hit,) = searcher.search(f"something {colour}", 1)
        assert hit.path == f"{i}.png" and hit.confidence is not None and "background" in hit.terms
    assert searcher.search_image(folder / "2.png", 1)[0].path == "2.png"
    assert evaluate(ColourModel(), load_jsonl(folder / "data.jsonl"), "none").metrics.rsum == 600
    with pytest.raises(ValueError, match="explained"):
        StoredExplainer(searcher)


class Favourites:
    """Pictures of a folder score higher."""

    name = "favourites"

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = set(ids)

    def of_images(self, images: ImageFacts, gallery: GalleryFacts) -> list[float]:
        return [10 * gallery.score_unit * (identity in self.ids) for identity in images.ids]

    def of_query(self, matches: Matches, gallery: GalleryFacts) -> Mapping[str, float]:
        return {}


def test_another_term_reaches_search_explanation_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gallery(tmp_path / "photos", 6, described=3)
    index(folder, tmp_path / "s")
    searcher = Searcher(tmp_path / "s", model())
    plain = {hit.id: hit for hit in searcher.search("a dog", 6)}
    last = list(plain)[-1]
    data = load_jsonl(folder / "data.jsonl")
    place = [record.id for record in data.records].index(plain[last].path)
    before = score_dataset(model(), data, view(data, "image"))
    monkeypatch.setattr(terms, "TERMS", (*terms.TERMS, Favourites([last, str(place)])))
    found = {hit.id: hit for hit in searcher.search("a dog", 6)}
    gain = 10 * engine_of(model()).traits.score_unit
    assert found[last].terms["favourites"] == pytest.approx(gain)
    assert found[last].score == pytest.approx(plain[last].score + gain, abs=1e-6)
    others = [replace(hit, rank=0, terms={}) for hit in found.values() if hit.id != last]
    assert [hit.score for hit in others] == [hit.score for hit in plain.values() if hit.id != last]
    answer = StoredExplainer(searcher).explain(last, "a dog")
    assert answer is not None and answer[0].terms["favourites"] == pytest.approx(gain)
    assert answer[0].score == pytest.approx(found[last].score, abs=1e-6)
    after = score_dataset(model(), data, view(data, "image"))
    assert (after - before)[place].tolist() == pytest.approx([gain] * before.shape[1], abs=1e-5)
