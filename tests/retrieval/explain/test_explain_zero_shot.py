"""Explanations of dual encoders: every sum is the score, from a file and from a store, by command, API and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from duals import FAMILIES, dual_folder
from messages import mentions
from seps.cli.main import main
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.search.explaining import StoredExplainer, find_image
from seps.photos.search.searcher import Searcher
from seps.retrieval.engine import vectors
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.vectors import VectorEngine
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.explain.picture import draw
from seps.retrieval.explain.vectors import cells_of
from seps.retrieval.pretrained import from_pretrained
from stores import few_sentences, paint

QUERY = "a red dog of Rufus1"


@pytest.fixture(scope="module")
def mini() -> Any:
    return from_pretrained("mini")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, mini: Any) -> None:
    few_sentences(monkeypatch)
    monkeypatch.setattr(vectors, "from_pretrained", lambda name, **more: mini)


def photos(folder: Path, count: int = 4, described: int = 2) -> Path:
    lines = []
    for i in range(count):
        paint(folder / f"p{i}.png", i, (90 + 9 * i, 44))
        if i < described:
            lines.append(json.dumps({"image": f"p{i}.png", "dense": f"a dog, picture {i} of Rufus{i}, on green grass"}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def indexed(folder: Path, store: Path, family: str = "clip", **options: Any) -> Searcher:
    model = load_engine(dual_folder(family))
    index_folder(folder, store, model, str(dual_folder(family)), options=IndexOptions(workers=1, **options))
    return Searcher(store, model)


def check_sums(found: Explanation, score: float) -> None:
    assert found.score == score
    words = sum(part.contribution for part in found.words)
    assert words + found.rest + found.added == pytest.approx(score, abs=1e-5)
    image = sum(found.patches) + found.elsewhere + sum(part.contribution for part in found.description)
    assert image + found.rest + found.added == pytest.approx(score, abs=1e-5)
    assert sum(found.terms.values()) == pytest.approx(score, abs=1e-5)
    assert len(found.patches) == len(found.kept) == len(found.words[0].heat) == found.grid[0] * found.grid[1]
    assert all(seen or not value for seen, value in zip(found.stored, found.patches, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_explanations_of_a_store_sum_to_the_score(family: str, tmp_path: Path) -> None:
    searcher = indexed(photos(tmp_path / "photos"), tmp_path / "s", family)
    explainer, embedder = StoredExplainer(searcher), searcher.engine.embedder  # type: ignore[union-attr]
    text = embedder.text_vectors([QUERY])[0]
    off = 1e-3  # what the rounding of the stored vector changes counts as elsewhere
    for hit in searcher.search(QUERY, 4):
        answer = explainer.explain(hit.id, QUERY, hit.score)
        assert answer is not None
        found = answer[0]
        check_sums(found, hit.score)
        assert found.terms["background"] == found.background == hit.terms["background"]
        assert found.terms.get("lexical", 0.0) == hit.terms.get("lexical", 0.0)
        with Image.open(tmp_path / "photos" / hit.path) as image:
            parts = embedder.patch_parts(embedder.prepare(image.convert("RGB")))  # type: ignore[attr-defined]
        cells = torch.tensor(found.patches)[torch.tensor(found.stored)]
        assert torch.allclose(cells, parts.patches @ text, atol=1e-5)
        assert found.elsewhere == pytest.approx(float(parts.elsewhere @ text), abs=off)
        described = hit.path in ("p0.png", "p1.png")
        assert ("description" in found.terms) == described == bool(found.description) != bool(found.note)
        told = " ".join(part.word for part in found.description if not part.special)
        assert told.startswith("a dog , picture") == described
        assert draw(found, Image.new("RGB", (90, 44))).width > 100


def test_the_grid_covers_the_whole_picture() -> None:
    """CLIP sees the middle of a wide picture: its cells are there, and those beside it add nothing."""
    assert cells_of((4, 4), 1.0, 1.0) == ((4, 4), pytest.approx(torch.arange(16)))
    grid, places = cells_of((2, 2), 1.0, 0.5)
    assert grid == (2, 4) and places.tolist() == [1, 2, 5, 6]
    grid, places = cells_of((2, 2), 0.5, 1.0)
    assert grid == (4, 2) and places.tolist() == [2, 3, 4, 5]
    assert cells_of((7, 7), 1.0, 2 / 3)[0] == (7, 11)


def test_a_file_that_is_gone_or_changed(tmp_path: Path) -> None:
    """The thumbnail's patches stand in, the note says so, and the sum is still the stored score."""
    folder = photos(tmp_path / "photos")
    searcher = indexed(folder, tmp_path / "s")
    (folder / "p0.png").unlink()
    paint(folder / "p2.png", 77, (120, 44))
    hits = {hit.path: hit for hit in searcher.search(QUERY, 4)}
    for path, why in (("p0.png", "used"), ("p2.png", "written again"), ("p1.png", "")):
        answer = StoredExplainer(searcher).explain(find_image(searcher.store, path), QUERY, hits[path].score)
        assert answer is not None
        check_sums(answer[0], hits[path].score)
        assert why in answer[0].note and bool(answer[0].note) == bool(why)
        assert any(answer[0].patches)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = photos(tmp_path / "photos"), str(tmp_path / "s")
    searcher = indexed(folder, tmp_path / "s")
    clip, out = str(dual_folder("clip")), str(tmp_path / "out.png")
    assert main(["explain", "p1.png", QUERY, "--store", store, "--out", out]) == 0
    shown = capsys.readouterr().out
    for word in ("patches", "elsewhere", "description", "(any sentence)", "rufus1", "one vector"):
        assert word in shown
    assert Image.open(out).width > 400
    assert main(["explain", "p1.png", QUERY, "--store", store, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (score,) = [hit.score for hit in searcher.search(QUERY, 4) if hit.path == "p1.png"]
    assert told["score"] == pytest.approx(score, abs=1e-6) and told["grid"][1] > told["grid"][0]
    file = str(folder / "p1.png")
    assert main(["explain", file, QUERY, "--model", clip, "--dense", "a dog", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    image = sum(told["patches"]) + told["elsewhere"] + sum(part["contribution"] for part in told["description"])
    assert image + told["rest"] == pytest.approx(told["score"], abs=1e-5)
    assert main(["explain", file, QUERY, "--model", clip]) == 0
    assert mentions(capsys.readouterr().out, "--dense", "TEXT")
    assert main(["explain", file, " ", "--model", clip]) == 2
    assert main(["explain", file, QUERY, "--model", clip, "--guide", f"audio={file}"]) == 2
    assert "--guide" in capsys.readouterr().err


def test_an_embedder_without_parts_is_a_sentence() -> None:
    class Bare:
        width, side, scale, device = 3, 32, 100.0, torch.device("cpu")

    engine = VectorEngine(Bare())  # type: ignore[arg-type]
    assert "Bare" in engine.traits.explains
    with pytest.raises(ValueError, match="Bare"):
        engine.explain("a dog", None, lambda: pytest.fail("not read"))
