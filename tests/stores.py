"""What the tests of the store, the search and the service share: a tiny model and made-up pictures."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from seps.images.sources import ImageSource
from seps.photos.indexing.build import IndexOptions, IndexReport, index_folder
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreSettings
from seps.retrieval.config import SIZES, ModelConfig, PatchSize, StoredPrecision
from seps.retrieval.engine import loading, patches
from seps.retrieval.engine.engine import Photo
from seps.retrieval.engine.layout import PatchLayout
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.ranking import bank

TEXTS = ("a red square on blue", "green noise", "a photo of a dog", "stripes and dots", "a very dark picture")


@functools.cache
def model_folder() -> str:
    """A saved, untrained model: 96 px, 3 x 3 patches, width 32."""
    folder = tempfile.mkdtemp(prefix="seps-test-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(5)
    config = ModelConfig(image_size=(96, 96), embed_size=32, slimming={"sparse_ratio": 0.5, "aggr_ratio": 0.5})
    save_pretrained(RetrievalModel(config), folder, form="delta")
    return folder


@functools.cache
def model() -> RetrievalModel:
    """That model, loaded."""
    return from_pretrained(model_folder())


def _share_model() -> None:
    """Load that folder once per run for all commands, and read its weights once for their digests.

    Both take more time than most tests. Models of other folders, and changed copies of this one, are loaded and read.
    """

    def load(name: str | Path, **options: Any) -> RetrievalModel:
        return model() if str(name) == model_folder() else from_pretrained(name, **options)

    def once(digest: Callable[[RetrievalModel], str]) -> Callable[[RetrievalModel], str]:
        shared = functools.cache(lambda: digest(model()))
        return lambda of: shared() if model.cache_info().currsize and of is model() else digest(of)

    loading.from_pretrained = load  # type: ignore[assignment]
    for name in ("model_hash", "text_hash", "short_hash"):
        setattr(patches, name, once(getattr(patches, name)))


_share_model()


def paint(path: Path, seed: int, size: tuple[int, int] = (60, 44)) -> Path:
    """A picture of random blocks of colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).save(path)
    return path


def gallery(folder: Path, count: int = 8, described: int = 4) -> Path:
    """`count` pictures, the first of them with descriptions in `data.jsonl`; captions for all."""
    lines = []
    for i in range(count):
        name = f"{'sub/' if i % 2 else ''}p{i:02}.jpg"
        paint(folder / name, i)
        dense = {"dense": f"A picture with number {i}: {TEXTS[i % len(TEXTS)]}."} if i < described else {}
        lines.append(json.dumps({"image": name, "captions": [TEXTS[i % len(TEXTS)]], **dense}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def few_sentences(monkeypatch: pytest.MonkeyPatch, count: int = 40) -> None:
    """A bank of `count` sentences and those of the calibration: encoding all of them takes seconds."""
    some = bank.sentences()[:count] + bank.sentences()[-bank.ASKED :]
    monkeypatch.setattr(bank, "sentences", lambda: some)
    monkeypatch.setattr(bank, "bank_name", lambda: f"first {count}")


def always_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open store looks for a newer version at each reading, not only after two seconds."""
    monkeypatch.setattr("seps.photos.store.store._FRESH", timedelta(0))


def explain_file(
    model: object, path: str | Path, caption: str, description: str | None = None, **guides: Any
) -> Explanation:
    """Why a picture has its score for a caption, by its file alone."""
    photo = Photo(Path(path).read_bytes(), ImageSource(Path(path)))
    return engine_of(model).explain(caption, description, lambda: photo, **guides)


def explain_row(searcher: Searcher, identity: str, caption: str) -> Explanation:
    """Why a stored picture has its score for a caption, without what the search adds."""
    images = searcher.store.select([identity], [*searcher.columns, "dense"])
    (text,) = images.values("dense")
    return searcher.engine.explain(
        caption, text, lambda: pytest.fail("no file is needed"), stored=searcher.pictures(images)
    )


def plain_settings(width: int, grid: tuple[int, int] = (1, 1)) -> StoreSettings:
    """Settings of a store whose rows a test makes by itself."""
    return StoreSettings("/x", "mini", "0" * 32, PatchLayout("full", width, grid, 0))


def custom_size(precision: StoredPrecision = "float16", **spec: int | None) -> str:
    """The name of a size that only tests have: `PatchSize` with these values."""
    name = f"test {precision} {sorted(spec.items())}"
    SIZES[name] = PatchSize(precision, **spec)
    return name


def index(folder: Path, store: Path, **options: Any) -> IndexReport:
    """Index with the tiny model; without the bank of background queries unless asked: plain scores, and faster.

    `precision`, `patches`, `means` and `words` make a size of their own.
    """
    spec = {name: options.pop(name) for name in ("precision", "patches", "means", "words") if name in options}
    if spec:
        options["size"] = custom_size(**spec)
    settings = IndexOptions(**{"workers": 2, "bank": False, **options})
    return index_folder(folder, store, model(), model_folder(), options=settings)
