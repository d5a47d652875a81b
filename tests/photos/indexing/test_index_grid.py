"""A store whose pictures were encoded at another size than the model takes now, as those of a former `base`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seps.cli.main import main
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.search.searcher import Searcher
from seps.photos.store.store import Store
from seps.retrieval.model import RetrievalModel, with_grid
from stores import custom_size, gallery, model, model_folder, paint

OPTIONS = IndexOptions(workers=1, bank=False)


def states(store: Path) -> dict[str, tuple[bytes, ...]]:
    """What is stored of each picture's patches, by path."""
    opened = Store.open(store)
    rows = opened.rows(sorted(opened.known()))
    return {row.path: (row.tokens, row.positions, row.mean) for row in rows.values()}


def test_the_same_grid_is_the_same_model() -> None:
    assert with_grid(model(), model().vision.grid) is model()


def test_another_grid_keeps_weights_and_the_number_of_merged_patches() -> None:
    made = with_grid(model(), (5, 4))
    assert made.image_size == (160, 128) and made.vision.num_patches == 20 and model().vision.grid == (3, 3)
    before, after = model().head.net, made.head.net  # type: ignore[union-attr]
    assert after.config.num_patches == 20 and after.config.num_merged == before.config.num_merged
    for name, tensor in model().state_dict().items():
        assert torch.equal(tensor, made.state_dict()[name])
    pixels = torch.rand(1, 3, 160, 128, generator=torch.Generator().manual_seed(0))
    assert made.encode_pixels(pixels).shape[1] == 20


@pytest.mark.parametrize("keep", [None, 8])
def test_pictures_that_come_later_are_encoded_as_those_that_are_there(tmp_path: Path, keep: int | None) -> None:
    """They were given places of the model's new grid, which the store's does not have."""
    folder, options = (
        gallery(tmp_path / "pictures", 3),
        IndexOptions(workers=1, bank=False, size=custom_size(patches=keep)),
    )
    former: RetrievalModel = with_grid(model(), (4, 4))
    index_folder(folder, tmp_path / "store", former, model_folder(), options=options)
    paint(folder / "later.jpg", 77)
    report = index_folder(folder, tmp_path / "store", model(), model_folder(), options=OPTIONS)
    assert report.former_size == (128, 128)
    index_folder(folder, tmp_path / "whole", former, model_folder(), options=options)
    assert Store.open(tmp_path / "store").settings.layout.grid == (4, 4)
    assert len(states(tmp_path / "store")) == 4 and states(tmp_path / "store") == states(tmp_path / "whole")
    sentence = "a red square on blue"
    found = [
        [(hit.path, hit.score) for hit in Searcher(tmp_path / place, some).search(sentence)]
        for place, some in (("store", model()), ("whole", former))
    ]
    assert found[0] == found[1]


def test_seps_index_says_that_a_new_store_would_find_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = str(gallery(tmp_path / "pictures", 2)), str(tmp_path / "store")
    index_folder(folder, store, with_grid(model(), (4, 4)), model_folder(), options=OPTIONS)
    assert main(["index", folder, "--store", store, "--no-bank"]) == 0
    assert "128 x 128" in (said := capsys.readouterr().err) and "96 x 96" in said
    assert main(["index", folder, "--store", f"{store}-new", "--model", model_folder(), "--no-bank"]) == 0
    assert "128 x 128" not in capsys.readouterr().err
