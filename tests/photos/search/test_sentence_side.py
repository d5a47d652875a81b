"""A search by a sentence loads as little as it can, and finds what the whole model finds."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import cast

import pytest
import torch

from seps.photos.indexing.build import index_folder
from seps.photos.indexing.opening import IndexOptions
from seps.photos.search.explaining import StoredExplainer
from seps.photos.search.searcher import Searcher
from seps.photos.store.store import Store
from seps.retrieval.embedded import EMBEDDED, FILE, describe, embedded_folder, sentence_side
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.patches import PatchEngine
from seps.retrieval.model import AbsentVision, RetrievalModel, model_hash, text_hash
from seps.retrieval.pretrained import from_pretrained

PHOTOS = ("tabby-cat.jpg", "black-dog-floor.jpg", "sandy-beach.jpg", "coffee-cup.jpg")


@pytest.fixture(scope="module")
def whole() -> RetrievalModel:
    return from_pretrained("mini")


@pytest.fixture(scope="module")
def store(whole: RetrievalModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    for name in PHOTOS:
        (folder / "g").mkdir(exist_ok=True)
        (folder / "g" / name).write_bytes((files("seps") / "assets" / "gallery" / name).read_bytes())
    index_folder(folder / "g", folder / "s", whole, "mini", options=IndexOptions(bank=False))
    return folder / "s"


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_files_beside_the_models_are_theirs(name: str, whole: RetrievalModel) -> None:
    model = whole if name == "mini" else from_pretrained(name)
    stated = json.loads((embedded_folder(name) / FILE).read_text())
    assert stated == describe(model, model_hash(model), text_hash(model)), "run tools/sentence_side.py"
    side = sentence_side(name)
    assert side is not None and side[1] == stated["model_hash"] and isinstance(side[0].vision, AbsentVision)
    assert text_hash(side[0]) == stated["text_hash"]
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("vision.")}
    own = side[0].state_dict()
    assert own.keys() == state.keys() and all(torch.equal(own[key], state[key]) for key in own)
    assert side[0].vision.grid == model.vision.grid and side[0].vision.width == model.vision.width


def test_it_finds_what_the_whole_model_finds(store: Path, whole: RetrievalModel) -> None:
    quick, slow = Searcher(store), Searcher(store, whole)
    explainer = StoredExplainer(quick)
    engine = cast(PatchEngine, quick.engine)
    kept = engine.model
    assert isinstance(kept, RetrievalModel) and isinstance(kept.vision, AbsentVision)
    for query in ("a dog", "a cup of coffee on a table", "the sea"):
        assert quick.search(query) == slow.search(query) and quick.note(query) == slow.note(query)
    assert quick.search("a dog", exact=True) == slow.search("a dog", exact=True)
    assert isinstance(kept.vision, AbsentVision)
    photo = files("seps") / "assets" / "gallery" / PHOTOS[0]
    assert quick.search_image(str(photo)) == slow.search_image(str(photo))
    # The vision encoder joins the model: what holds the model, as the explainer of the page does, holds the same one.
    assert engine.model is kept and not isinstance(kept.vision, AbsentVision)
    assert explainer.searcher.engine is engine
    assert quick.search("a dog") == slow.search("a dog")


@torch.no_grad()
def test_the_vision_encoder_goes_and_comes_back(whole: RetrievalModel) -> None:
    engine = cast(PatchEngine, load_engine("mini", sentences=True))
    height, width = engine.traits.image_size
    pixels = [torch.randint(256, (3, height, width), dtype=torch.uint8)]
    expected = whole.encode_pixels(torch.stack(pixels).float() / 255)
    assert torch.equal(engine.encode_pixels(pixels), expected)
    engine.drop_pixels()
    assert isinstance(engine.model.vision, AbsentVision)
    assert engine.model.vision.grid == whole.vision.grid
    assert torch.equal(engine.encode_pixels(pixels), expected)
    engine.drop_pixels()
    # A copy in another process has nothing that could read it.
    assert not isinstance(engine.__getstate__()["model"].vision, AbsentVision)
    engine.drop_pixels()
    engine.model.project_patches[1].weight.mul_(2)
    with pytest.raises(ValueError):
        engine.load_pixels()


@torch.no_grad()
def test_the_text_encoder_goes_and_comes_back(whole: RetrievalModel) -> None:
    engine = cast(PatchEngine, load_engine("mini", sentences=True))
    text, digests = engine.model.text, engine.digests()
    expected = PatchEngine(whole).encode_texts(["a dog on a beach"]).text_features.words
    tokens = torch.zeros(1, 49, engine.traits.width)

    def bytes_held() -> int:
        return sum(value.untyped_storage().nbytes() for value in text.parameters() if not value.is_meta)

    before = bytes_held()
    for use in (
        lambda: engine.encode_texts(["a dog on a beach"]).text_features.words,
        lambda: engine.pictures(tokens, ["a dog on a beach"]).features.dense,
        lambda: engine.with_grid((8, 8)).encode_texts(["a dog on a beach"]).text_features.words,
        lambda: copy.deepcopy(engine).encode_texts(["a dog on a beach"]).text_features.words,
    ):
        engine.drop_texts()
        assert bytes_held() == 0 and engine.digests() == digests and engine.model.text is text
        assert torch.equal(cast(torch.Tensor, use()), expected)
    assert bytes_held() == before
    with engine._texts():  # another thread reads a description
        engine.drop_texts()
    assert bytes_held() == before
    kept = PatchEngine(whole)
    kept.drop_texts()  # nothing could read it again
    assert torch.equal(kept.encode_texts(["a dog on a beach"]).text_features.words, expected)


def test_other_weights_in_a_package_are_loaded_whole_and_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seps.retrieval.embedded.checksum", lambda model: "other")
    assert sentence_side("mini") is None
    assert [hit.path for hit in Searcher(store).search("a dog", 1)] == ["black-dog-floor.jpg"]
    assert sentence_side("clip-b-32") is None


_CHILD = """
import sys
refused = {"transformers", "pandas", "scipy", "sklearn", "fastapi", "rich", "jsonargparse", "torch._dynamo"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in refused:
            raise AssertionError(f"a search by a sentence imports {name}")
sys.meta_path.insert(0, Refuse())
from pathlib import Path
import seps.encoders.mini as mini
def no_file():
    raise AssertionError("a search by a sentence reads the vision encoder")
mini.mini_vision_file = no_file
from seps.cli.main import main
sys.argv = ["seps", "search", "a dog", "--store", sys.argv[1], "--json"]
status = main()
assert refused.isdisjoint(sys.modules), refused & set(sys.modules)
sys.exit(status)
"""


def test_a_search_by_a_sentence_imports_and_writes_nothing_it_does_not_need(store: Path, whole: RetrievalModel) -> None:
    def listing() -> dict[str, tuple[int, int]]:
        found = sorted(path for path in store.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    before = listing()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(store)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [hit.as_dict() for hit in Searcher(store, whole).search("a dog")]
    assert listing() == before


def test_a_reader_sees_what_another_process_commits(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr("seps.photos.store.store._FRESH", timedelta(0))
    reader, writer = Store.open(store), Store.open(store)
    count = len(reader)
    gone = reader.known().popitem()[0]
    row = writer.rows([gone])[gone]
    writer.delete([gone])
    assert len(reader) == count - 1 and len(writer) == count - 1
    writer.put([row])
    assert len(reader) == count


@pytest.mark.parametrize("name", ["a:b", "with space", "per%20cent", "hash#tag"])
def test_a_store_opens_under_any_name(store: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(store, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for place in (name, f"{name}/", str(tmp_path / name)):
        assert len(Store.open(place)) == len(PHOTOS)
