"""Search with published dual encoders: scores are transformers' own cosines; descriptions and words on one scale."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn import functional as F

from duals import FAMILIES, dual_folder
from messages import mentions, naming
from seps.cli.main import main
from seps.method.encoded import Texts
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.maintenance import status, verify
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from seps.recent import Recent
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine import vectors
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.vectors import VectorEngine
from seps.retrieval.evaluate.protocol import ProtocolError, view
from seps.retrieval.evaluate.run import evaluate, score_dataset
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking import bank
from stores import few_sentences, paint

pytestmark = pytest.mark.usefixtures("no_network")
ROUNDED = 5e-4
"""What float16 of the stored vectors changes at the widths of these models, 16 to 32."""
QUERIES = ["A red dog", "the cat runs on a blue square", "dots"]


@pytest.fixture(scope="module")
def mini() -> Any:
    return from_pretrained("mini")


@pytest.fixture(autouse=True)
def _mini_once(monkeypatch: pytest.MonkeyPatch, mini: Any) -> None:
    """The embedded model is read once: it takes most of a test's time."""
    real = vectors.from_pretrained
    monkeypatch.setattr(vectors, "from_pretrained", lambda name, **more: mini if name == "mini" else real(name, **more))


@pytest.fixture(autouse=True)
def _small_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    few_sentences(monkeypatch)


def photos(folder: Path, count: int = 7, described: int = 0) -> Path:
    lines = []
    for i in range(count):
        paint(folder / f"p{i}.png", i, (60 + 9 * i, 44))
        dense = {"dense": f"a dog, picture {i} of Rufus{i}"} if i < described else {}
        lines.append(json.dumps({"image": f"p{i}.png", "captions": [f"{QUERIES[i % 3]} {i}"], **dense}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def indexed(folder: Path, store: Path, family: str = "clip", **options: Any) -> Searcher:
    """A store of plain scores, unless asked otherwise: without the bank, vectors as whole as the model makes them."""
    model = load_engine(dual_folder(family))
    settings = IndexOptions(**{"workers": 1, "bank": False, **options})
    index_folder(folder, store, model, str(dual_folder(family)), options=settings)
    return Searcher(store, model)


def own_cosines(family: str, folder: Path, query: str) -> dict[str, float]:
    """What transformers alone computes, picture by picture."""
    place = dual_folder(family)
    model = transformers.AutoModel.from_pretrained(place).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(place, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    if family.startswith("siglip"):
        length = model.config.text_config.max_position_embeddings
        tokens = {
            "input_ids": tokenizer([query], padding="max_length", max_length=length, return_tensors="pt").input_ids
        }
    else:
        tokens = dict(tokenizer([query], return_tensors="pt"))
        tokens.pop("token_type_ids", None)
    found = {}
    with torch.no_grad():
        text = F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)
        for path in sorted(folder.glob("*.png")):
            pixels = processor(images=Image.open(path).convert("RGB"), return_tensors="pt")
            image = F.normalize(model.get_image_features(**pixels).pooler_output, dim=-1)
            found[path.name] = float(image @ text.T)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_index_and_search_rank_as_transformers_does(family: str, tmp_path: Path) -> None:
    searcher = indexed(photos(tmp_path / "photos"), tmp_path / "s", family)
    for query in QUERIES:
        wanted = own_cosines(family, tmp_path / "photos", query)
        for exact in (False, True):
            hits = searcher.search(query, k=20, exact=exact)
            assert {hit.path: hit.score for hit in hits} == pytest.approx(wanted, abs=ROUNDED)
            assert [hit.path for hit in hits] == sorted(wanted, key=lambda path: -wanted[path])
    assert searcher.search_image(tmp_path / "photos" / "p3.png")[0].path == "p3.png"
    assert searcher.search_image(tmp_path / "photos" / "p3.png")[0].score == pytest.approx(1.0, abs=ROUNDED)


@pytest.mark.slow
def test_the_command_searches_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A short command leaves out what it does not need (`seps.cli.shared.startup`); transformers must still load."""
    searcher = indexed(photos(tmp_path / "photos"), tmp_path / "s")
    command = [sys.executable, "-m", "seps.cli.main", "search", QUERIES[0], "--store", str(tmp_path / "s"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = {hit.path: hit.score for hit in searcher.search(QUERIES[0])}
    assert {hit["path"]: hit["score"] for hit in json.loads(done.stdout)} == pytest.approx(wanted, abs=ROUNDED)


def test_a_description_adds_its_logarithm(tmp_path: Path, mini: Any) -> None:
    """S = cos + (D - CENTRE) / (TEMPERATURE scale), with D as the embedded model computes it; nothing without one."""
    folder = photos(tmp_path / "photos", described=4)
    searcher = indexed(folder, tmp_path / "s")
    query = "a dog on grass"
    wanted = own_cosines("clip", folder, query)
    words = mini.encode_texts([query], as_sentences=True).words[0]  # as dual encoders have their descriptions read
    net = mini.head.net
    scale = searcher.engine.embedder.scale  # type: ignore[union-attr]
    for i in range(4):
        dense = mini.encode_texts([f"a dog, picture {i} of Rufus{i}"], max_words=200).words
        patches = torch.randn(1, mini.vision.num_patches + mini.vision.num_prefix_tokens, mini.config.embed_size)
        with torch.no_grad():
            side = net.encode_images(patches, dense=dense, dense_lengths=torch.tensor([dense.shape[1]]))
            described = float(net.score(side, Texts.of(words[None])).description)
        wanted[f"p{i}.png"] += (described - vectors.CENTRE) / (vectors.TEMPERATURE * scale)
    hits = searcher.search(query, k=20)
    assert {hit.path: hit.score for hit in hits} == pytest.approx(wanted, abs=ROUNDED)
    assert {hit.path: hit.score for hit in searcher.search(query, k=20, exact=True)} == pytest.approx(
        wanted, abs=ROUNDED
    )


@pytest.mark.parametrize("family", ["clip", "siglip2-free"])
def test_the_bank_of_a_dual_encoder(family: str, tmp_path: Path) -> None:
    """Levels from every sentence by hand, a strength without labels, and a confidence; --no-bank has none of them."""
    folder = photos(tmp_path / "photos", described=3)
    plain = indexed(folder, tmp_path / "plain", family)
    searcher = indexed(folder, tmp_path / "s", family, bank=True)
    model = searcher.engine
    assert isinstance(model, VectorEngine)
    # Without what rare words of a description add: levels have none of that.
    every = [plain.search(text, 20) for text in bank.sentences()[: -bank.ASKED]]
    found = [{hit.path: hit.score - sum(hit.terms.values()) for hit in hits} for hits in every]
    scores = {path: [one[path] for one in found] for path in found[0]}
    stored = {row["path"]: row["bank"] for some in searcher.store.scan(["path", "bank"]) for row in some.rows()}
    for path, own in scores.items():
        assert stored[path] == pytest.approx(sum(sorted(own)[-bank.BEST :]) / bank.BEST, abs=ROUNDED)
    table = torch.tensor([scores[path] for path in sorted(scores)])
    # Of descriptions the strength sees the vectors alone.
    assert searcher.strength == pytest.approx(bank.strength_without_labels(table), abs=0.1)
    assert searcher.calibration is not None and 0 < searcher.strength == searcher.calibration.strength <= 1
    told = {
        row["path"]: row["dense"] is not None for some in plain.store.scan(["path", "dense"]) for row in some.rows()
    }
    levels = [torch.tensor([stored[path] for path in stored if told[path] == some]) for some in (True, False)]
    assert len(levels[0]) == 3 and searcher.calibration.gap == pytest.approx(bank.description_gap(*levels), abs=1e-6)
    wanted = {hit.path: hit.score for hit in plain.search("a big red dog", 20)}
    for exact in (False, True):
        for hit in searcher.search("a big red dog", 20, exact=exact):
            rest = (1 - searcher.strength) * searcher.calibration.gap * told[hit.path]
            assert hit.terms["background"] == pytest.approx(-searcher.strength * stored[hit.path] - rest, abs=1e-6)
            assert hit.score == pytest.approx(wanted[hit.path] + hit.terms["background"], abs=ROUNDED)
            assert hit.confidence == searcher.calibration.confidence(hit.score)
    assert "seps index" in plain.without_bank and not searcher.without_bank
    assert all(hit.confidence is None for hit in plain.search("dots"))
    sure = [hit.confidence or 0 for hit in searcher.search("dots", 20)]
    assert sure == sorted(sure, reverse=True)
    assert len(searcher.search("dots", 20, min_confidence=sure[2])) == sum(value >= sure[2] for value in sure) >= 3
    with pytest.raises(StoreError, match="confidence"):
        plain.search("dots", min_confidence=0.1)


def test_a_plain_store_of_a_dual_encoder_gets_its_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of the last release, by another run of seps index; the sentences are encoded once per user."""
    folder = photos(tmp_path / "photos", described=3)
    before = indexed(folder, tmp_path / "s").store.known()
    new = indexed(folder, tmp_path / "new", bank=True)
    monkeypatch.setattr(bank, "_MADE", Recent(2))
    monkeypatch.setattr(bank, "encode_sentences", lambda model: pytest.fail("encoded again"))
    after = indexed(folder, tmp_path / "s", bank=True)
    assert after.store.known() == before and after.strength == pytest.approx(new.strength, abs=1e-6)
    for one, other in zip(after.search("dots", 20), new.search("dots", 20), strict=True):
        assert (one.path, one.score) == (other.path, pytest.approx(other.score, abs=1e-6))
        assert one.confidence == pytest.approx(other.confidence, abs=1e-5)


def test_the_bank_may_come_later(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", described=3)
    usual = indexed(folder, tmp_path / "usual", bank=True)
    indexed(folder, tmp_path / "later")
    later = indexed(folder, tmp_path / "later", bank=True)
    assert verify(later.store) == []
    for query in QUERIES:
        wanted = {hit.path: hit.score for hit in usual.search(query, 20)}
        assert {hit.path: hit.score for hit in later.search(query, 20)} == pytest.approx(wanted, abs=1e-6)
    assert later.search_image(folder / "p3.png")[0].path == "p3.png"


def test_vectors_are_stored_as_float16_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Natively, so that the vector index finds them; with many rows, nothing is compared one by one."""
    folder = photos(tmp_path / "photos", described=3)
    monkeypatch.setattr("seps.photos.store.lance.table.INDEX_ABOVE", 5)
    store = indexed(folder, tmp_path / "s").store
    assert store.indexed("vector") and store.table.dataset.schema.field("vector").type.value_type == "halffloat"
    rows = store.select(sorted(store.known()), ["id", "vector"])
    stored = rows.vectors()
    query = stored[2] + 0.01
    order = [rows.values("id")[place] for place in np.argsort(-(stored @ query), kind="stable")]
    assert store.nearest(query, 4, ["id"]).values("id") == order[:4]


def test_padding_of_descriptions_changes_nothing(mini: Any) -> None:
    words, mask = mini.encode_descriptions(["a dog", None, "a very long description of a red square on green grass"])
    query = mini.encode_texts(["a red square"]).words[0]
    engine = load_engine(dual_folder("clip"))
    together = engine.description_scores(words, mask, query)  # type: ignore[attr-defined]
    alone = engine.description_scores(words[:1, : int(mask[0].sum())], mask[:1, : int(mask[0].sum())], query)  # type: ignore[attr-defined]
    assert torch.allclose(together[:1], alone, atol=1e-6) and torch.isfinite(together).all()


def test_names_win_in_a_store_of_a_dual_encoder(tmp_path: Path) -> None:
    searcher = indexed(photos(tmp_path / "photos", described=5), tmp_path / "s")
    # Cosines of random weights spread over all of [-1, 1]; those of trained ones over about 20 nats.
    searcher.engine.embedder.scale = 10.0  # type: ignore[union-attr]
    for i in range(5):
        hit = searcher.search(f"Rufus{i}", k=1, candidates=1)[0]
        assert hit.path == f"p{i}.png"
        assert hit.terms["lexical"] == pytest.approx(16 / 10, rel=1e-6)


def test_the_store_is_whole_and_goes_on(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", described=2)
    searcher = indexed(folder, tmp_path / "s")
    assert verify(Store.open(tmp_path / "s")) == []
    told = status(Store.open(tmp_path / "s"))
    assert (told["kind"], told["patches"], told["described"]) == ("vectors", 0, 2)
    shutil.copy(folder / "p0.png", folder / "copy.png")
    (folder / "p6.png").unlink()
    report = index_folder(folder, tmp_path / "s", searcher.engine, str(dual_folder("clip")))
    assert (report.moved, report.deleted, report.unchanged) == (1, 1, 6)
    assert len(Searcher(tmp_path / "s", searcher.engine).search("dog", k=20)) == 7


def test_another_model_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    indexed(folder, tmp_path / "s")
    with pytest.raises(StoreError, match="model"):
        indexed(folder, tmp_path / "s", "altclip")
    with pytest.raises(StoreError, match="weights"):
        Searcher(tmp_path / "s", load_engine(dual_folder("altclip")))
    with pytest.raises(StoreError, match=naming("small", "vector")):
        indexed(folder, tmp_path / "t", size="small")
    assert not (tmp_path / "t").exists()
    assert len(Searcher(tmp_path / "s").search("dog", k=20)) == 7


def test_eval_scores_as_the_search_does(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", described=3)
    searcher = indexed(folder, tmp_path / "s")
    model = searcher.engine
    assert isinstance(model, VectorEngine)
    data = load_jsonl(folder / "data.jsonl")
    scores = score_dataset(model, data, view(data, "image"))
    for column, caption in enumerate(data.captions[:3]):
        hits = searcher.search(caption, k=20)
        found = {hit.path: hit.score - sum(hit.terms.values()) for hit in hits}
        assert found == pytest.approx({f"p{i}.png": float(scores[i, column]) for i in range(7)}, abs=ROUNDED)
    banked = indexed(folder, tmp_path / "t", bank=True)
    corrected = score_dataset(model, data, view(data, "image"), bank=True)
    for column, caption in enumerate(data.captions[:3]):
        found = {hit.path: hit.score - hit.terms.get("lexical", 0) for hit in banked.search(caption, k=20)}
        assert found == pytest.approx({f"p{i}.png": float(corrected[i, column]) for i in range(7)}, abs=ROUNDED)
    assert "strength" in evaluate(model, data, bank=True).as_dict()["bank"]
    plain = score_dataset(model, data, view(data, "none"))
    assert plain.abs().max() <= 1 and not torch.allclose(plain[:3], scores[:3])
    assert torch.allclose(plain[3:], scores[3:], atol=1e-6)
    assert evaluate(model, data).images_with_description == 3
    whole = photos(tmp_path / "whole", described=7)
    with pytest.raises(ProtocolError, match="encoder"):
        evaluate(model, load_jsonl(whole / "data.jsonl"), "published")


def test_commands_take_a_dual_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = photos(tmp_path / "photos", described=2), str(tmp_path / "s")
    clip = str(dual_folder("clip"))
    assert main(["index", str(folder), "--store", store, "--model", clip, "--workers", "1"]) == 0
    assert "Stronger models" not in capsys.readouterr().out
    assert main(["search", "a red dog " * 20, "--store", store, "--json"]) == 0
    out = capsys.readouterr()
    assert len(json.loads(out.out)) == 7 and mentions(out.err, "16", "tokens")
    assert all("background" in hit["terms"] and 0 <= hit["confidence"] <= 1 for hit in json.loads(out.out))
    assert main(["search", "many red dots on a picture", "--store", store, "--min-confidence", "1"]) == 0
    assert "nothing" in capsys.readouterr().err
    assert main(["eval", "--model", clip, "--data", str(folder / "data.jsonl"), "--lexical", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["lexical"] is True


def test_the_service_serves_a_store_of_a_dual_encoder(tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    from seps.photos.library import Library
    from seps.photos.serve.app import create_app

    searcher = indexed(photos(tmp_path / "photos", described=3), tmp_path / "s", bank=True)
    with TestClient(create_app(Library.over(searcher), hosts=None)) as client:
        answer = client.get("/api/search", params={"q": "Rufus1 " + "dog " * 30}).json()
        assert len(answer["results"]) == 7 and "end" in answer["note"]
        assert any(result["terms"].get("lexical") for result in answer["results"])
        assert all(result["terms"]["background"] and result["confidence"] is not None for result in answer["results"])
        assert answer["good"] is not None
        assert client.get("/api/status").json()["explains"] is True
        told = client.get(f"/api/explain/{answer['results'][0]['id']}", params={"q": answer["query"]}).json()
        assert told["score"] == answer["results"][0]["score"] and len(told["words"]) == 1
        image = sum(told["patches"]) + told["elsewhere"] + sum(part["contribution"] for part in told["description"])
        assert image + told["rest"] + told["added"] == pytest.approx(told["score"], abs=1e-5)
        assert len(client.get(f"/api/similar/{answer['results'][0]['id']}").json()["results"]) == 7


def test_the_first_store_is_told_of_stronger_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = photos(tmp_path / "photos", 2)
    for told in (True, False):
        assert main(["index", str(folder), "--store", str(tmp_path / "s"), "--workers", "1"]) == 0
        assert ("siglip2-b-16" in capsys.readouterr().out) is told


class Colours:
    """An embedder of one's own: the mean colour of a picture, and colours by their names."""

    width, side, scale = 3, 32, 100.0
    device = torch.device("cpu")

    def prepare(self, image: Any) -> Any:
        return torch.tensor(np.asarray(image), dtype=torch.float32).mean(dim=(0, 1)) - 100

    def image_vectors(self, prepared: Any) -> torch.Tensor:
        return F.normalize(torch.stack(list(prepared)), dim=-1)

    def text_vectors(self, texts: Any) -> torch.Tensor:
        return F.normalize(torch.tensor([[name in text for name in ("red", "green", "blue")] for text in texts]) + 1e-3)

    def cut(self, text: str) -> None:
        return None

    def digest(self) -> str:
        return "colours"


def test_an_embedder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, colour in (("r.png", (250, 9, 9)), ("g.png", (9, 250, 9)), ("b.png", (9, 9, 250))):
        Image.new("RGB", (20, 20), colour).save(folder / name)
    model = VectorEngine(Colours())
    index_folder(folder, tmp_path / "s", model, "colours")
    searcher = Searcher(tmp_path / "s", model)
    for query, path in (("a red thing", "r.png"), ("green", "g.png"), ("blue", "b.png")):
        assert searcher.search(query)[0].path == path


def test_many_threads_may_ask(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    embedder = load_engine(dual_folder("clip")).embedder  # type: ignore[union-attr]
    texts = [" ".join(["a dog"] * (1 + i % 9)) for i in range(60)]
    wanted = [embedder.text_vectors([text]) for text in texts]
    with ThreadPoolExecutor(6) as pool:
        cuts = pool.map(embedder.cut, texts * 2)
        found = list(pool.map(lambda text: embedder.text_vectors([text]), texts))
        assert [cut is None for cut in cuts] == [len(text.split()) + 2 <= 16 for text in texts * 2]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def test_strips_and_large_photos_are_indexed(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    paint(folder / "strip.png", 1, (3000, 1))
    paint(folder / "tall.png", 2, (2, 4000))
    paint(folder / "large.jpg", 3, (900, 700))
    searcher = indexed(folder, tmp_path / "s")
    assert len(searcher.search("dog")) == 3
    # A large JPEG is decoded smaller first; what the model sees is nearly the same.
    with Image.open(folder / "large.jpg") as picture:
        embedder = searcher.engine.embedder  # type: ignore[union-attr]
        whole = embedder.image_vectors([embedder.prepare(picture.convert("RGB"))])[0].numpy()
    row = searcher.store.get(next(hit.id for hit in searcher.search("dog") if hit.path == "large.jpg"), ["vector"])
    assert row is not None and float(np.dot(whole, row["vector"][: len(whole)])) > 0.99
