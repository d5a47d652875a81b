"""What indexing with `base` saves: bfloat16 where the processor has it, and a quarter of the patches."""

from __future__ import annotations

import copy
import shutil
import threading
from pathlib import Path

import pytest
import torch

from seps.encoders import ViT
from seps.images.sources import ImageSource
from seps.photos.indexing import embedding
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.search.searcher import Searcher
from seps.photos.store.store import Store
from seps.retrieval.embedded import embedded_folder
from seps.retrieval.engine import faster, keeping, layout
from seps.retrieval.engine.layout import PatchLayout
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.pretrained import from_pretrained
from stores import gallery, index, model


def test_tokens_in_bfloat16_are_those_of_float32_within_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_pretrained("base")
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: True)
    vision = faster.half_copy(model)
    assert isinstance(vision, ViT) and vision.patch.weight.dtype == torch.bfloat16
    assert model.vision.patch.weight.dtype == torch.float32
    pixels = torch.rand(1, 3, *model.image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, half = model.encode_pixels(pixels), model.encode_pixels(pixels, vision)
    assert half.dtype == torch.float32
    cosines = torch.nn.functional.cosine_similarity(exact, half, dim=-1)
    assert cosines.min() > 0.99 and cosines.mean() > 0.999
    assert not torch.equal(exact, half)


def test_other_processors_and_encoders_keep_the_models_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: True)
    assert faster.half_copy(from_pretrained("mini")) is None
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: False)
    assert faster.half_copy(from_pretrained("base")) is None


def test_a_gpu_with_tensor_cores_of_bfloat16_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device, vision = torch.device("cuda"), from_pretrained("base").vision

    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: False)  # what the processor has is of no account
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    vision = faster.half_copy(OnGpu())  # type: ignore[arg-type]
    assert vision is not None and vision.patch.weight.dtype == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert faster.half_copy(OnGpu()) is None  # type: ignore[arg-type]


def test_a_worker_chooses_by_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's copy stayed on the driver's kind of device, so a worker with a GPU could not encode with it."""
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: True)
    prepare = embedding.Preparer(engine_of(from_pretrained("base")), PatchLayout("full", 384, (20, 20), 1))
    assert prepare.fast.vision is not None
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: False)
    assert embedding.on_worker(copy.copy(prepare), on_gpu=False).fast.vision is None  # pickled by Ray, it is a copy too
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: True)
    assert embedding.on_worker(copy.copy(prepare), on_gpu=False).fast.vision is not None


def test_the_gpu_is_free_while_a_batch_is_decoded_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(gallery(tmp_path / "g", 3), tmp_path / "s")
    prepare = embedding.Preparer(engine_of(model()), Store.open(tmp_path / "s").settings.layout, bank=False)
    lock = threading.Lock()
    prepare.gpu_lock = lock
    held: dict[str, set[bool]] = {}

    def noting(owner: object, name: str) -> None:
        work = getattr(owner, name)

        def noted(*args: object, **options: object) -> object:
            held.setdefault(name, set()).add(lock.locked())
            return work(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    noting(layout, "pack")
    noting(embedding, "decode_picture")
    noting(keeping, "image_vectors")
    noting(model(), "encode_pixels")
    paths = sorted((tmp_path / "g").rglob("*.jpg"))
    done = prepare([embedding.ImageJob(ImageSource(path), None) for path in paths])
    assert len(done.outcomes) == 3 and all(isinstance(one, embedding.PreparedImage) for one in done.outcomes)
    assert held == {"pack": {False}, "decode_picture": {False}, "image_vectors": {True}, "encode_pixels": {True}}
    assert not lock.locked()


def test_a_store_of_base_keeps_the_patches_that_matter(tmp_path: Path) -> None:
    """A sixth of them unless more are asked for; a store that is there keeps what it has."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("coffee-cup.jpg", "rabbit-lawn.jpg"):
        shutil.copy(embedded_folder("gallery") / name, photos)
    model = from_pretrained("base")
    index_folder(photos, tmp_path / "usual", model, "base", options=IndexOptions(bank=False))
    assert Store.open(tmp_path / "usual").settings.layout.patches == 64
    index_folder(photos, tmp_path / "all", model, "base", options=IndexOptions(size="full", bank=False))
    index_folder(photos, tmp_path / "all", model, "base", options=IndexOptions(bank=False))
    assert Store.open(tmp_path / "all").settings.layout.patches is None
    found = Searcher(tmp_path / "usual", model).search("a cup of coffee", 1)
    assert found[0].path == "coffee-cup.jpg"
    mini = from_pretrained("mini")
    index_folder(photos, tmp_path / "mini", mini, "mini", options=IndexOptions(bank=False))
    assert Store.open(tmp_path / "mini").settings.layout.patches is None
