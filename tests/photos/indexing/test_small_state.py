"""A small state: codes of 4 and 2 bits, grids of means, and stores of both."""

from __future__ import annotations

import json
import math
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F

from messages import naming
from seps.cli.main import call
from seps.images.sources import ImageSource
from seps.method.encoded import Texts
from seps.photos.indexing.embedding import ImageJob, Preparer
from seps.photos.indexing.maintenance import status, verify
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError, StoreSettings
from seps.photos.store.store import Store
from seps.retrieval.engine.layout import PatchLayout
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.packing import PackingError, Precision, pack, packed_shape, unpack
from seps.retrieval.engine.patches import fewer_patches
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.merging import mean_grid
from seps.retrieval.pretrained import from_pretrained
from stores import TEXTS, gallery, index, model, model_folder, paint

LEVELS = {
    "int4": [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326],
    "int2": [0.4528, 1.5104],
}
"""Of the least squared error for the normal distribution (Max 1960, table 1, N = 16 and 4)."""
KINDS = tuple(LEVELS)
SMALL: dict[str, Any] = {"precision": "int4", "means": 2, "words": 3}


def slowly(blob: bytes) -> list[list[float]]:
    """A packed matrix of codes, decoded value by value."""
    kind, count, width = struct.unpack_from("<BHH", blob)
    levels = LEVELS["int4" if kind == 3 else "int2"]
    levels = [-level for level in reversed(levels)] + levels
    bits = len(levels).bit_length() - 1
    per_byte = 8 // bits
    stride = math.ceil(width / per_byte)
    scales = struct.unpack_from(f"<{count}f", blob, 5)
    body = blob[5 + 4 * count :]
    return [
        [
            scales[row] * levels[(body[row * stride + i // per_byte] >> (bits * (i % per_byte))) % 2**bits]
            for i in range(width)
        ]
        for row in range(count)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(1, 21), st.floats(1e-4, 1e6), st.integers(0, 99), st.sampled_from(KINDS))
def test_codes_are_decoded_as_by_hand(rows: int, width: int, scale: float, seed: int, kind: Precision) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    blob = pack(values, kind)
    assert packed_shape(blob) == (rows, width)
    found = unpack(blob)
    assert found.shape == (rows, width)
    assert found.tolist() == [pytest.approx(row, rel=1e-6) for row in slowly(blob)]
    # A row keeps its length, and its codes depend on no other row.
    assert torch.allclose(torch.from_numpy(found).norm(dim=1), values.norm(dim=1), rtol=1e-5)
    each = [unpack(pack(row[None], kind))[0] for row in values]
    assert all(np.array_equal(one, row) for one, row in zip(each, found, strict=True))


@pytest.mark.parametrize(("kind", "error"), [("int4", 0.009497), ("int2", 0.1175)])
def test_the_error_is_the_least_for_normal_values(kind: Precision, error: float) -> None:
    """The squared error of Max's quantisers, per value of variance 1; also every value gets its nearest level."""
    values = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).double()
    values /= values.pow(2).mean(dim=1, keepdim=True).sqrt()
    found = torch.from_numpy(unpack(pack(values, kind))).double()
    cosine = F.cosine_similarity(found, values, dim=1).mean()
    assert 1 - float(cosine) ** 2 == pytest.approx(error, rel=0.01)
    levels = torch.tensor([sign * level for level in LEVELS[kind] for sign in (-1, 1)]).double()
    nearest = levels[(values[:, :, None] - levels).abs().argmin(dim=2)]
    assert F.cosine_similarity(found, nearest, dim=1).min() > 1 - 1e-9


def test_rows_of_zeros_stay_zeros() -> None:
    for kind in KINDS:
        assert unpack(pack(torch.zeros(2, 7), kind)).tolist() == [[0.0] * 7] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_are_not_whole_are_refused(kind: Precision) -> None:
    blob = pack(torch.randn(3, 9), kind)
    for broken in (blob[:-1], blob + b"\0", blob[:5], b"\x05" + blob[1:]):
        with pytest.raises(PackingError, match="bytes"):
            unpack(broken)


def test_means_of_cells_are_those_of_a_loop() -> None:
    patches = torch.randn(2, 6 * 4, 5, generator=torch.Generator().manual_seed(1))
    wanted = [
        torch.stack([patches[:, r * 4 + c] for r in range(3 * i, 3 * i + 3) for c in range(2 * j, 2 * j + 2)]).mean(0)
        for i in range(2)
        for j in range(2)
    ]
    assert torch.allclose(mean_grid(patches, (6, 4), (2, 2)), torch.stack(wanted, dim=1), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_scores_what_the_network_gives_on_decoded_tokens(tmp_path: Path, kind: Precision) -> None:
    """The readable network, caption by caption, on tokens that were decoded value by value."""
    folder = gallery(tmp_path / "g", 5, described=2)
    index(folder, tmp_path / "s", **{**SMALL, "precision": kind})
    searcher = Searcher(tmp_path / "s", model())
    net = fewer_patches(model().head.net, 4)  # type: ignore[arg-type]
    for text in TEXTS[:2]:
        words = model().encode_texts([text]).words[0]
        found = {hit.id: hit.score - sum(hit.terms.values()) for hit in searcher.search(text, k=5, exact=True)}
        for identity, row in searcher.store.rows(sorted(found)).items():
            dense = None if row.words is None else torch.tensor([slowly(row.words)])
            assert (dense is not None) == (row.dense is not None)
            assert dense is None or dense.shape[1] == 3
            side = net.encode_images(torch.tensor([slowly(row.tokens)]), dense=dense)
            assert row.mean is not None and row.positions is None
            side = replace(side, pooled=F.normalize(torch.tensor(slowly(row.mean)), dim=-1))
            with torch.no_grad():
                wanted = float(net.score(side, Texts.of(words[None])).similarity)
            assert found[identity] == pytest.approx(wanted, abs=2e-5)


def states(place: Path) -> dict[str, tuple[Any, ...]]:
    store = Store.open(place)
    return {
        row.path: (row.tokens, row.mean, row.words, np.asarray(row.vector).tobytes())
        for row in store.rows(sorted(store.known())).values()
    }


def test_states_depend_on_no_other_picture_and_runs_go_on(tmp_path: Path) -> None:
    """In one run, or in two and another order: the same bytes. The means need not be named again.

    One picture at a time: the encoders round differently in larger batches.
    """
    folder = gallery(tmp_path / "g", 6, described=3)
    index(folder, tmp_path / "once", **SMALL, batch_size=1)
    late = [folder / "p00.jpg", folder / "sub" / "p03.jpg"]
    for path in late:
        path.rename(tmp_path / path.name)
    index(folder, tmp_path / "twice", **SMALL, batch_size=1)
    for path in late:
        (tmp_path / path.name).rename(path)
    report = index(folder, tmp_path / "twice", workers=1, batch_size=1)
    assert (report.new, report.unchanged) == (2, 4)
    assert states(tmp_path / "once") == states(tmp_path / "twice")
    with pytest.raises(StoreError, match=naming("int4", "full", "--size")):
        index(folder, tmp_path / "twice", size="full")


def test_a_worker_elsewhere_makes_the_same_codes(tmp_path: Path) -> None:
    """Workers of a cluster get a pickled copy of the preparer, and nothing else."""
    folder = gallery(tmp_path / "g", 3, described=1)
    index(folder, tmp_path / "s", **SMALL, batch_size=1)
    here = Preparer(engine_of(model()), Store.open(tmp_path / "s").settings.layout, bank=False)
    there = pickle.loads(pickle.dumps(here))
    stored = states(tmp_path / "s")
    for name in ("p00.jpg", "sub/p01.jpg"):
        text = "A picture with number 0: a red square on blue." if name == "p00.jpg" else None
        (outcome,) = there([ImageJob(ImageSource(folder / name), text)]).outcomes
        assert (outcome.state["tokens"], outcome.state["mean"], outcome.state["words"]) == stored[name][:3]


def test_a_grid_of_means_as_fine_as_the_patches_is_all_patches(tmp_path: Path) -> None:
    index(gallery(tmp_path / "g", 2), tmp_path / "usual", means=9)
    usual = Store.open(tmp_path / "usual").settings.layout
    assert (usual.means, usual.stored) == (False, 9)


def test_verify_finds_damaged_codes(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 5)
    index(folder, tmp_path / "s", **SMALL)
    store = Store.open(tmp_path / "s")
    assert verify(store) == [] and status(store)["patches"] == 4 and status(store)["means"] is True
    first, second, third, fourth, _ = store.rows(sorted(store.known())).values()
    assert second.mean is not None
    store.put(
        [
            replace(first, tokens=first.tokens[:-1]),
            replace(second, mean=second.mean[:-1]),
            replace(third, mean=None),
            replace(fourth, mean=pack(torch.ones(1, 8), "int4")),
        ]
    )
    found = {problem.name: problem.why for problem in verify(store)}
    assert set(found) == {row.path for row in (first, second, third, fourth)}
    assert "damaged" in found[first.path] and "damaged" in found[second.path]
    assert "missing" in found[third.path]
    assert "width" in found[fourth.path]


def test_damaged_settings_are_a_sentence(tmp_path: Path) -> None:
    good = json.loads(StoreSettings("/x", "mini", "0" * 32, PatchLayout("small", 32, (2, 2), 0, None, True)).to_json())
    assert StoreSettings.from_json(json.dumps(good), "here").layout.stored == 4
    for wrong in ({"means": "yes"}, {"patches": 3}, {"size": "int3"}, {"kind": "pictures"}, {"grid": [0, 2]}, {"x": 1}):
        with pytest.raises(StoreError, match="damaged"):
            StoreSettings.from_json(json.dumps({**good, "layout": {**good["layout"], **wrong}}), "here")


@pytest.mark.parametrize(("name", "most"), [("small", 8000), ("tiny", 2000)])
def test_the_bytes_of_the_named_states(name: str, most: int) -> None:
    """All that scoring needs of a picture with a long description, at the width and grid of `base`."""
    engine = engine_of(from_pretrained("base"))
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(1, 180, dtype=torch.bool)
    images = ImageFeatures(
        torch.randn(1, 401, 384, generator=generator), torch.randn(1, 180, 384, generator=generator), mask
    )
    layout = engine.layout(name)
    (state,) = engine.keep(PatchPictures(images, 1), layout).packed(layout.precision)
    total = state["vector"].nbytes + sum(len(state[part]) for part in ("tokens", "mean", "words"))
    assert 0.9 * most < total <= most


def test_a_grid_that_is_no_square_keeps_all_its_patches() -> None:
    assert PatchLayout.of("full", 16, (2, 3), 1).stored == 6
    assert PatchLayout.of("tiny", 16, (1, 5), 1).stored == 2  # means of one row


def test_the_command_makes_and_continues_a_small_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, place = gallery(tmp_path / "g", 3), tmp_path / "s"
    command = [str(folder), "--store", str(place), "--model", model_folder(), "--no-bank", "--size", "tiny"]
    assert call("index", command) == 0
    kept = Store.open(place).settings.layout
    assert (kept.precision, kept.grid, kept.means, kept.keep_words) == ("int2", (2, 2), True, 5)
    paint(folder / "more.jpg", 77)
    assert call("index", command) == 0
    capsys.readouterr()
    assert call("index", ["--store", str(place), "--status"]) == 0
    shown = capsys.readouterr().out
    assert "means                      True" in shown and "images                     4" in shown
    assert call("index", ["--store", str(place), "--verify"]) == 0


def test_a_store_remembers_what_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--size` had to be given again with every run, and by whoever else adds pictures."""
    folder, store = gallery(tmp_path / "g", 3), tmp_path / "s"
    command = [str(folder), "--store", str(store), "--model", model_folder(), "--no-bank"]
    assert call("index", [*command, "--size", "small"]) == 0
    kept = Store.open(store).settings
    paint(folder / "later.jpg", 7)
    assert call("index", command) == 0
    assert Store.open(store).settings.layout == kept.layout and len(Store.open(store)) == 4
    index(folder, store)  # as seps.Library does
    with pytest.raises(StoreError, match=naming("small", "full", "--size")):
        index(folder, store, size="full")
