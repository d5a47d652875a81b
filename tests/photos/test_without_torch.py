"""The search of a store of the size "vector" needs no torch, and finds what the torch model finds."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from seps.images.decoding import decode_image
from seps.images.sources import ImageSource
from seps.photos.indexing.build import index_folder
from seps.photos.indexing.opening import IndexOptions
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.retrieval.embedded import embedded_folder
from seps.retrieval.engine.light import LightEngine
from seps.retrieval.engine.loading import engine_of, load_engine, torch_pixels
from seps.retrieval.engine.queries import as_array
from seps.retrieval.pretrained import from_pretrained

BLOCKED = 'import sys; sys.modules["torch"] = None\n'
"""Begins a process in which torch cannot be imported."""
BARE = BLOCKED + 'sys.modules["lance"] = sys.modules["pyarrow"] = None\n'
"""Nor what the base installation lacks beside it: stores are of SQLite."""
TEXTS = [
    "a dog",
    "two children play football on green grass",
    "Cafés, naïve façades & 3 umbrellas!",
    "...",
    "sunset over the sea " * 60,
]


def run(code: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", BARE + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stderr
    return done.stdout


def pictures(count: int) -> list[Path]:
    return sorted(embedded_folder("gallery").glob("*.jpg"))[:count]


@pytest.fixture(scope="module")
def light() -> LightEngine:
    return LightEngine("base")


@pytest.mark.parametrize("as_sentences", [False, True])
def test_sentences_are_those_of_torch(light: LightEngine, as_sentences: bool) -> None:
    engine = load_engine("base", sentences=True)
    ours = light.vectors(light.encode_texts(TEXTS, as_sentences=as_sentences))
    theirs = as_array(engine.vectors(engine.encode_texts(TEXTS, as_sentences=as_sentences)))
    assert np.abs(ours - theirs).max() < 2e-5
    short = light.vectors(light.encode_texts(["a dog"], as_sentences=not as_sentences))
    assert np.abs(short - ours[0]).max() > 1e-2  # its own projection


def test_what_is_not_read(light: LightEngine) -> None:
    assert light.unread("word " * 60).cut == (62, 48) and light.unread("a dog").cut is None
    assert light.unread("ein Hund auf der Wiese").foreign and not light.unread("a dog on the grass").foreign


def test_another_size_is_refused_by_the_sizes(light: LightEngine) -> None:
    with pytest.raises(ValueError, match=r"'vector'.*'tiny'"):
        light.layout("tiny")


def test_pictures_and_descriptions_are_those_of_torch(light: LightEngine) -> None:
    sources = [ImageSource(path) for path in pictures(2)]
    engine = engine_of(from_pretrained("base"))
    texts = ["a dog lies on the grass", None]
    pixels = [decode_image(one.path.read_bytes(), one, (280, 280), "array") for one in sources]
    ours = light.pictures(light.encode_pixels(pixels), texts)
    encoded = engine.encode_pixels([torch.from_numpy(one) for one in pixels])
    kept = engine.keep(engine.pictures(encoded, texts), engine.layout("vector"))
    assert light.layout("vector") == engine.layout("vector")
    assert np.abs(light.keep(ours, None).vectors - as_array(kept.vectors)).max() < 2e-5
    assert light.keep(ours, None).means[1] is None and kept.means[1] is None
    assert np.abs(light.keep(ours, None).means[0] - kept.means[0]).max() < 2e-5
    assert light.digests()[:3] == engine.digests()[:3]


def test_modules_of_the_search_import_no_torch() -> None:
    names = ["photos.library", "photos.indexing.build", "photos.duplicates.duplicates", "photos.serve.app"]
    code = "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)"
    run(code, *(f"seps.{name}" for name in [*names, "cli.main", "photos.search.explaining"]))


SEARCH = """
from seps.cli.main import main
folder, store = sys.argv[1:]
for call in (
    ["index", folder, "--store", store, "--size", "vector", "--no-bank"],
    ["search", "a dog", "--store", store, "--json"],
):
    assert main(call) == 0, call
"""
DEFAULTS = """
import warnings
import seps
from seps.cli.main import main
from seps.cli.shared.commands import COMMANDS, parser_of
from seps.photos.indexing.opening import IndexOptions
folder, store = sys.argv[1:]
for name in COMMANDS:
    assert "usage" in parser_of(name).format_help(), name
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    library = seps.Library(folder, store=store, options=IndexOptions(bank=False))
assert [str(one.message).count("pip install 'seps[torch]'") for one in told] == [1], told
assert library.store.settings.layout.size == "vector" and len(library) == 2
for words in (
    ["index", folder, "--store", store + "2", "--size", "patches"],
    ["index", folder, "--store", store + "2", "--model", "mini"],
    ["index", folder, "--store", store + "2", "--device", "cuda"],
    ["explain", "copy.jpg", "a dog", "--store", store],
    ["explain", folder + "/copy.jpg", "a dog"],
    ["demo"],
    ["train", "--out", store + "3"],
    ["export", "base", "-o", store + "4"],
):
    print("refused", main(words), file=sys.stderr)
on_gpu = lambda: seps.Library(folder, device="cuda")
for ask in (lambda: seps.PatchSlimming, lambda: library.word_vectors("a dog"), on_gpu):
    try:
        ask()
    except (ImportError, ValueError) as error:
        print("refused 2", error, file=sys.stderr)
"""
REST = """
from seps.cli.main import main
folder, store = sys.argv[1:]
for call in (
    ["index", folder, "--store", store, "--size", "vector"],
    ["search", "a dog", "--store", store, "--json"],
    ["search", "a dog", "--image", folder + "/copy.jpg", "--store", store, "--json"],
    ["find", "a dog", folder, "--store", store, "--json"],
    ["duplicates", "--store", store],
):
    assert main(call) == 0, call
from fastapi.testclient import TestClient
from seps.photos.library import Library
from seps.photos.serve.app import create_app
with TestClient(create_app(Library(store=store)), base_url="http://127.0.0.1") as page:
    answer = page.get("/api/search", params={"q": "a dog"})
    assert answer.status_code == 200, answer.text
    assert page.get("/").status_code == 200
"""


def photos(folder: Path, count: int) -> str:
    """A folder with some pictures, and a copy of the first one."""
    folder.mkdir()
    for path in pictures(count):
        shutil.copy(path, folder)
    (folder / "copy.jpg").write_bytes(pictures(1)[0].read_bytes())
    return str(folder)


def test_index_and_search_run_without_torch(tmp_path: Path) -> None:
    found = run(SEARCH, photos(tmp_path / "photos", 1), str(tmp_path / "store"))
    assert found.count('"rank": 1,') == 1 and found.count('"rank": 2,') == 1


def test_the_default_is_what_runs_without_torch_and_the_rest_is_told_with_the_command(tmp_path: Path) -> None:
    code = BARE + DEFAULTS
    command = [sys.executable, "-c", code, photos(tmp_path / "photos", 1), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    refusals = [line for line in lines if line.startswith("refused 2")]
    assert len(refusals) == 11 and done.stderr.count("pip install 'seps[torch]'") == 11, done.stderr


def test_a_store_of_patches_is_told_with_the_command(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    options = IndexOptions(size="tiny", bank=False)
    index_folder(photos(tmp_path / "photos", 1), store, load_engine("base"), "base", options=options)
    code = "from seps.cli.main import main\nassert main(['search', 'a dog', '--store', sys.argv[1]]) == 2"
    command = [sys.executable, "-c", BLOCKED + code, store]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "'tiny'" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.rstrip().endswith("pip install 'seps[torch]'")


@pytest.mark.slow
def test_all_commands_run_without_torch(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 8)
    found = run(REST, folder, str(tmp_path / "store"), env={"HF_HOME": str(tmp_path / "cache")})
    assert found.count('"rank": 1,') == 3 and "1 group" in found


@pytest.mark.slow
@pytest.mark.parametrize("by", ["light", "torch"])
def test_order_and_scores_are_those_of_torch(tmp_path: Path, by: str) -> None:
    """Both engines read and write the same store: the gallery with its descriptions and its bank, made by one of them.

    Confidences are part of it: they are of the bank and of the nouns.
    """
    folder, engines = (
        embedded_folder("gallery"),
        {"light": LightEngine("base"), "torch": engine_of(from_pretrained("base"))},
    )
    index_folder(folder, tmp_path / by, engines[by], "base", options=IndexOptions(size="vector"))
    assert Searcher(tmp_path / by).engine.traits.kind == "light"
    texts = ["a dog", "children on a beach", "something to eat", "a red car on a street", "an animal in the snow"]
    ours, theirs = ([Searcher(tmp_path / by, engine).search(text, 10) for text in texts] for engine in engines.values())
    for some, others in zip(ours, theirs, strict=True):
        assert [hit.id for hit in some] == [hit.id for hit in others] and len(some) == 10
        for found, other in zip(some, others, strict=True):
            assert (found.score, found.confidence) == pytest.approx((other.score, other.confidence), abs=1e-3)


@pytest.mark.slow
def test_a_picture_as_query_finds_what_it_finds_with_torch(tmp_path: Path) -> None:
    folder, engines = embedded_folder("gallery"), (LightEngine("base"), engine_of(from_pretrained("base")))
    index_folder(folder, tmp_path / "store", engines[0], "base", options=IndexOptions(size="vector", bank=False))
    ours, theirs = (Searcher(tmp_path / "store", engine).search_image(pictures(1)[0], 10) for engine in engines)
    assert [hit.id for hit in ours] == [hit.id for hit in theirs]
    assert [hit.score for hit in ours] == pytest.approx([hit.score for hit in theirs], abs=1e-3)


@pytest.mark.parametrize(
    ("size", "device", "kind"), [("vector", "cpu", "light"), ("patches", "cpu", "patches"), (None, "cpu", "patches")]
)
def test_the_engine_of_a_size(size: str | None, device: str, kind: str) -> None:
    assert load_engine("base", size=size, device=device, sentences=True).traits.kind == kind


def test_torch_computes_where_onnx_runtime_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert load_engine("base", size="vector", sentences=True).traits.kind == "patches"


@pytest.mark.slow
def test_traits_are_those_of_torch(light: LightEngine) -> None:
    theirs = load_engine("base", sentences=True)
    others = {"kind", "pairs_queries", "settings", "vector_slope", "sizes", "default_size", "cpu_batch"}
    for field in dataclasses.fields(light.traits):
        if field.name not in others:
            assert getattr(light.traits, field.name) == getattr(theirs.traits, field.name), field.name


@pytest.mark.slow
def test_many_pictures_are_encoded_by_torch_as_by_the_engine_without(light: LightEngine) -> None:
    pixels = [decode_image(path.read_bytes(), ImageSource(path), (280, 280), "array") for path in pictures(3)]
    pixels_of = torch_pixels(light)
    assert pixels_of is not None and torch_pixels(light.with_torch()) is None
    ours, theirs = light.encode_pixels(pixels), pixels_of.encode_pixels(pixels)
    assert theirs.shape == ours.shape and (ours * theirs).sum(axis=1).min() > 0.99  # products may be of 8 or 16 bits


@pytest.mark.slow
def test_the_library_over_a_store_of_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explanations and words of a query, which torch computes, and many pictures at once."""
    monkeypatch.setattr("seps.photos.indexing.embedding.MANY", 3)
    folder, store = photos(tmp_path / "photos", 3), str(tmp_path / "store")
    library = Library(folder, store=store, options=IndexOptions(size="vector", bank=False))
    library.update()
    assert library.engine.traits.kind == "light"
    hit = library.search("a woman in an orange space suit", k=1)[0]
    assert hit.path.name == pictures(1)[0].name
    words = library.word_vectors("a woman in an orange space suit")
    assert words.shape[1] == 384 and np.linalg.norm(words, axis=1) == pytest.approx(1, abs=1e-5)
    assert library.explain(hit.id, "a woman in an orange space suit", hit.score).explanation.score == pytest.approx(
        hit.score, abs=1e-2
    )


def test_options_of_the_vector_export_are_refused_before_anything_is_loaded() -> None:
    """Without torch the refusal names the option, and not torch."""
    code = "from seps.cli.main import main\nassert main(['export', 'base', '--bits', '32', '-o', 'x']) == 2"
    done = subprocess.run([sys.executable, "-c", BARE + code], capture_output=True, text=True)
    assert done.returncode == 0 and "--vector" in done.stderr and "torch" not in done.stderr, done.stderr
