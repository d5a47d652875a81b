"""The bank of background queries: levels by hand, in stores old and new, in scores, explanations and evaluations."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seps.cli.main import call, main
from seps.photos import Searcher
from seps.photos.search.explaining import StoredExplainer
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from seps.recent import Recent
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine.engine import BACKGROUND_STRENGTH
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.evaluate.protocol import ProtocolError, view
from seps.retrieval.evaluate.run import evaluate, score_dataset
from seps.retrieval.ranking import bank as bank_module
from seps.retrieval.ranking import text_cache
from seps.retrieval.ranking.bank import (
    ASKED,
    BEST,
    CAPTION_STRENGTH,
    PRIOR,
    background,
    bank_of,
    description_gap,
    level,
    sentences,
    strength_without_labels,
)
from stores import few_sentences, gallery, index, model, model_folder, paint


def levels_of(store: Store) -> dict[str, float]:
    return {row["path"]: row["bank"] for some in store.scan(["path", "bank"]) for row in some.rows()}


def test_every_shipped_sentence_is_composed_from_our_scenes() -> None:
    path = Path(__file__).parents[3] / "tools" / "bank.py"
    spec = importlib.util.spec_from_file_location("bank_tool", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert set(sentences()) <= set(tool.compose(tool.COMPOSED)) and len(sentences()) == tool.KEPT


def test_the_shipped_sentences() -> None:
    """Enough of them, each once, none blank, and those of the calibration apart."""
    found = sentences()
    assert len(found) == len(set(found)) == 1500 + ASKED and all(text.strip() == text != "" for text in found)


def test_levels_are_the_best_scores_of_all_sentences(photos: Path, searcher: Searcher) -> None:
    """The nearest sentences that are scored hold the best: the same level as from every sentence, by hand."""
    dataset = load_jsonl(photos / "data.jsonl")
    seen = view(dataset, "image")
    every = replace(seen, captions=list(sentences()[:-ASKED]))
    scores = score_dataset(model(), dataset, every)
    slow = [sum(sorted(row, reverse=True)[:BEST]) / BEST for row in scores.tolist()]
    stored = levels_of(searcher.store)
    # This model is untrained: its vectors say less about its scores than a trained model's.
    assert [stored[record.id] for record in dataset.records] == pytest.approx(slow, abs=5e-3)
    assert all(stored[record.id] <= high + 1e-4 for record, high in zip(dataset.records, slow, strict=True))


def test_levels_by_hand() -> None:
    assert level(torch.tensor([[1.0, 5, 3, 2], [0, 0, 4, 0]]), best=2).tolist() == [4.0, 2.0]
    assert background([2.0, None, 4.0]) == pytest.approx(
        [-BACKGROUND_STRENGTH * 2, -BACKGROUND_STRENGTH * 3, -BACKGROUND_STRENGTH * 4]
    )
    assert background([None]) == [0.0]


def test_what_descriptions_raise_levels_by_is_taken_off_whole() -> None:
    """Two groups of images whose levels differ by 0.6 on average: after the correction their means are the same."""
    told = [True, False, True, False]
    levels = [2.5, 1.9, 2.7, 2.1]
    found = background(levels, 0.5, told, 0.6)
    assert found == pytest.approx([-1.25 - 0.3, -0.95, -1.35 - 0.3, -1.05])
    many, few = torch.tensor([2.5, 2.7] * 500), torch.tensor([1.9, 2.1] * 500)
    assert description_gap(many, few) == pytest.approx(0.6 * 500 / (500 + PRIOR))
    # One described image among many says little; none says nothing.
    assert description_gap(many[:1], few) == pytest.approx(0.5 * (1000 / 1001) / (1000 / 1001 + PRIOR))
    assert description_gap(many, few[:0]) == description_gap(many[:0], few) == 0.0


@pytest.mark.parametrize("exact", [True, False])
def test_search_takes_off_the_level(searcher: Searcher, photos: Path, exact: bool) -> None:
    """The scores of the evaluation with the bank, up to the level of the caption, which is one number per query."""
    dataset = load_jsonl(photos / "data.jsonl")
    seen = view(dataset, "image")
    plain, with_bank = (score_dataset(model(), dataset, seen, bank=on)[:, 2] for on in (False, True))
    stored = levels_of(searcher.store)
    told = {record.id: record.dense is not None for record in dataset.records}
    half = [sum(stored[one] for one in told if told[one] == some) / 6 for some in (False, True)]
    gap = (half[1] - half[0]) * 3 / (3 + PRIOR)  # six images of each kind count as three pairs of many
    assert sum(told.values()) == 6 and searcher.store.settings.calibration["gap"] == pytest.approx(gap, abs=1e-6)
    hits = searcher.search(dataset.captions[2], k=12, exact=exact)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    got = {hit.path: hit.score for hit in hits}
    first = dataset.records[0]
    for i, record in enumerate(dataset.records):
        taken = BACKGROUND_STRENGTH * stored[record.id] + (1 - BACKGROUND_STRENGTH) * gap * told[record.id]
        assert got[record.id] == pytest.approx(float(plain[i]) - taken, abs=2e-5)
        assert got[record.id] - got[first.id] == pytest.approx(float(with_bank[i] - with_bank[0]), abs=1e-3)


def test_a_picture_to_search_by_needs_no_bank(searcher: Searcher, photos: Path, tmp_path: Path) -> None:
    index(photos, tmp_path / "s", precision="float32")
    plain = Searcher(tmp_path / "s", model())
    assert plain.search_image(photos / "p00.jpg") == searcher.search_image(photos / "p00.jpg")


@pytest.mark.parametrize("options", [{}, {"precision": "int4", "patches": 5, "words": 3}])
def test_a_store_of_the_last_release_gets_its_bank(photos: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """It opens and searches without; `seps index` fills in the levels of a new store, and changes nothing else."""
    index(photos, tmp_path / "new", bank=True, **options)
    new = Searcher(tmp_path / "new", model())
    index(photos, tmp_path / "old", **options)
    old = Searcher(tmp_path / "old", model())
    assert "bank" not in old.store.table.newest.schema.names and "seps index" in old.without_bank
    assert all(hit.confidence is None for hit in old.search("a dog"))
    with pytest.raises(StoreError, match="confidence"):
        old.search("a dog", min_confidence=0.5)
    index(photos, tmp_path / "old", **options)
    assert "bank" not in Store.open(tmp_path / "old").table.newest.schema.names
    report = index(photos, tmp_path / "old", bank=True, **options)
    assert (report.unchanged, report.changed) == (12, 0)
    after = Searcher(tmp_path / "old", model())
    assert levels_of(after.store) == pytest.approx(levels_of(new.store), abs=1e-6)
    assert after.without_bank == "" and after.store.known() == new.store.known()
    got, wanted = after.search("a dog", 12), new.search("a dog", 12)
    assert {hit.id: hit.score for hit in got} == pytest.approx({hit.id: hit.score for hit in wanted}, abs=1e-5)
    assert [hit.confidence for hit in got] == pytest.approx([hit.confidence for hit in wanted], abs=1e-3)


def test_levels_follow_the_pictures(tmp_path: Path) -> None:
    """A moved picture keeps its level, a new and a changed one get theirs, and the calibration knows the number."""
    folder = gallery(tmp_path / "g", 4, described=2)
    index(folder, tmp_path / "s", bank=True)
    before = levels_of(Store.open(tmp_path / "s"))
    (folder / "p00.jpg").rename(folder / "moved.jpg")
    paint(folder / "sub" / "p01.jpg", 77, (61, 44))
    paint(folder / "new.jpg", 78)
    index(folder, tmp_path / "s", bank=True, prune=True)
    store = Store.open(tmp_path / "s")
    after = levels_of(store)
    assert after["moved.jpg"] == before["p00.jpg"] and after["p02.jpg"] == before["p02.jpg"]
    assert after["sub/p01.jpg"] != before["sub/p01.jpg"] and after["new.jpg"] is not None
    assert store.settings.calibration["images"] == 5.0


def test_rows_of_a_writer_without_bank_are_filled_in(photos: Path, tmp_path: Path) -> None:
    """A release that knows no bank leaves rows without a level; another bank makes all levels anew."""
    index(photos, tmp_path / "s", bank=True)
    store = Store.open(tmp_path / "s")
    right = levels_of(store)
    store.table.newest.update({"bank": "NULL"}, where="path = 'p02.jpg'")
    assert len(Searcher(tmp_path / "s", model()).search("a dog", 12)) == 12
    index(photos, tmp_path / "s", bank=True)
    assert levels_of(Store.open(tmp_path / "s")) == pytest.approx(right, abs=1e-6)
    store = Store.open(tmp_path / "s")
    store.table.newest.update({"bank": "7.0"})
    store.set_settings(replace(store.settings, bank="another"))
    index(photos, tmp_path / "s", bank=True)
    assert levels_of(Store.open(tmp_path / "s")) == pytest.approx(right, abs=1e-6)


def test_explanations_have_it_as_their_own_term(searcher: Searcher) -> None:
    for hit in searcher.search("a dog, running", 12):
        answer = StoredExplainer(searcher).explain(hit.id, "a dog, running", hit.score)
        assert answer is not None
        found = answer[0]
        assert found.score == hit.score and found.background == found.terms["background"] < 0
        words = sum(part.contribution for part in found.words)
        assert words + found.rest + found.background == pytest.approx(hit.score, abs=1e-5)
        image = sum(found.patches) + found.elsewhere + sum(part.contribution for part in found.description)
        assert image + found.rest + found.background == pytest.approx(hit.score, abs=1e-5)
        assert sum(found.terms.values()) == pytest.approx(hit.score, abs=1e-5)


def test_strength_without_labels() -> None:
    """The slope of the levels of one half of the sentences on those of the other, by hand; few images count little."""
    torch.manual_seed(0)
    rise = torch.randn(40, 1)
    prior = PRIOR * BACKGROUND_STRENGTH
    # All scores of an image rise together: 1. The second half knows nothing of the first: 0. Two thirds of it: 2/3.
    assert strength_without_labels(rise + torch.zeros(40, 20)) == pytest.approx((40 + prior) / (40 + PRIOR))
    halves = torch.zeros(40, 20)
    halves[:, ::2] = rise
    assert strength_without_labels(halves) == pytest.approx(prior / (40 + PRIOR))
    halves[:, 1::2] = 2 / 3 * rise
    assert strength_without_labels(halves) == pytest.approx((40 * 2 / 3 + prior) / (40 + PRIOR))
    # The best scores alone make a level: what the other sentences score changes nothing.
    halves[:, 12:] -= 100 * torch.rand(40, 8)
    assert strength_without_labels(halves) == pytest.approx((40 * 2 / 3 + prior) / (40 + PRIOR))
    assert strength_without_labels(torch.ones(3, 4)) == BACKGROUND_STRENGTH == strength_without_labels(torch.rand(1, 4))
    with pytest.raises(ValueError, match="least"):
        strength_without_labels(torch.ones(4, 1))


def test_evaluation_names_the_bank(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Off by default; with it every figure says so, and which part is taken off on either side."""
    dataset = load_jsonl(photos / "data.jsonl")
    plain, corrected = evaluate(model(), dataset), evaluate(model(), dataset, bank=True)
    named = corrected.as_dict()["bank"]
    assert (
        "bank" not in plain.as_dict()
        and f"S - {BACKGROUND_STRENGTH:g} x" in named
        and f"- {CAPTION_STRENGTH:g} x" in named
    )
    data = ["--data", str(photos / "data.jsonl"), "--model", model_folder(), "--device", "cpu"]
    assert call("eval", [*data, "--bank", "--json", "-"]) == 0
    assert "background" in json.loads(capsys.readouterr().out)["bank"]
    described = replace(dataset, records=[replace(record, dense="x") for record in dataset.records])
    with pytest.raises(ProtocolError, match="does"):
        evaluate(model(), described, "published", bank=True)


def test_evaluation_takes_levels_off_images_and_captions(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a slow twin: of an image its best scores, of a caption its largest cosines with the bank, by hand."""
    few_sentences(monkeypatch)
    monkeypatch.setattr(bank_module, "_MADE", Recent(2))
    dataset = load_jsonl(photos / "data.jsonl")
    seen = view(dataset, "image")
    plain, corrected = (score_dataset(model(), dataset, seen, bank=bank) for bank in (False, True))
    every = score_dataset(model(), dataset, replace(seen, captions=list(bank_module.sentences()[:-ASKED])))

    def mean_word(text: str) -> list[float]:
        encoded = model().encode_texts([text])
        total = encoded.words[0, encoded.mask[0]].sum(dim=0).tolist()
        length = math.sqrt(sum(value * value for value in total))
        return [value / length for value in total]

    high = [sum(sorted(row)[-BEST:]) / BEST for row in every.tolist()]
    told = [record.dense is not None for record in dataset.records]
    half = [sum(value for value, own in zip(high, told, strict=True) if own == some) / 6 for some in (False, True)]
    gap = (half[1] - half[0]) * 3 / (3 + PRIOR)
    background_words = [mean_word(text) for text in bank_module.sentences()[:-ASKED]]
    for t, caption in enumerate(seen.captions):
        own = mean_word(caption)
        cosines = sorted(sum(a * b for a, b in zip(own, other, strict=True)) for other in background_words)
        ordinary = sum(cosines[-BEST:]) / BEST
        for i in range(len(high)):
            taken = BACKGROUND_STRENGTH * high[i] + (1 - BACKGROUND_STRENGTH) * gap * told[i]
            expected = float(plain[i, t]) - taken - CAPTION_STRENGTH * ordinary
            assert float(corrected[i, t]) == pytest.approx(expected, abs=1e-4)


def test_levels_of_loose_images_equal_those_of_the_store(photos: Path, searcher: Searcher) -> None:
    from seps.retrieval.evaluate.run import encode_images

    dataset = load_jsonl(photos / "data.jsonl")
    engine = engine_of(model())
    pictures = engine.pictures(encode_images(engine, dataset), dataset.dense)
    found = bank_of(engine).levels(engine, pictures, engine.vectors(pictures), 2**28)
    stored = levels_of(searcher.store)
    assert found.tolist() == pytest.approx([stored[record.id] for record in dataset.records], abs=1e-3)


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As in a new process: no bank in memory. The list grows by one with each encoding of the sentences."""
    few_sentences(monkeypatch)
    made: list[int] = []
    real = bank_module.encode_sentences
    monkeypatch.setattr(bank_module, "_MADE", Recent(2))
    monkeypatch.setattr(bank_module, "encode_sentences", lambda model: made.append(1) or real(model))
    return made


def test_encoded_once_per_process(searcher: Searcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cache, "cache_folder", lambda: tmp_path)
    made = fresh_process(monkeypatch)
    bank = bank_of(engine_of(model()))
    (tmp_path / os.listdir(tmp_path)[0]).unlink()
    assert bank_of(engine_of(model()), searcher.store.settings.digests) is bank and made == [1]


def test_encoded_once_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process reads what the first one encoded, bit by bit; a damaged or cut file is made anew."""
    monkeypatch.setattr(text_cache, "cache_folder", lambda: tmp_path)
    made = fresh_process(monkeypatch)
    first = bank_of(engine_of(model()))
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged, encoded in ((whole, 1), (whole[:-7], 2), (whole[:9], 3), (b"", 4), (flipped(whole), 5), (whole, 5)):
        kept.write_bytes(damaged)
        monkeypatch.setattr(bank_module, "_MADE", Recent(2))
        again = bank_of(engine_of(model()))
        assert len(made) == encoded and [path.name for path in tmp_path.iterdir()] == [kept.name]
        for name in ("texts", "asked"):
            one, other = (getattr(bank, name).text_features for bank in (first, again))
            assert torch.equal(one.mask, other.mask) and torch.equal(one.words[one.mask], other.words[other.mask])
        assert torch.equal(first.vectors, again.vectors)


def flipped(data: bytes) -> bytes:
    return data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]


def test_the_cache_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be written or another model's is there; old files go."""
    monkeypatch.setattr(text_cache, "cache_folder", lambda: tmp_path / "absent")
    made = fresh_process(monkeypatch)
    with pytest.warns(UserWarning, match="HF_HOME"):
        assert bank_of(engine_of(model())).vectors.shape[0] == 40 and made == [1] and not list(tmp_path.iterdir())
    monkeypatch.setattr(text_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(text_cache, "KEPT_FILES", 1)
    monkeypatch.setattr(bank_module, "_MADE", Recent(2))
    (tmp_path / "older.bank").write_bytes(b"of another model")
    os.utime(tmp_path / "older.bank", (1, 1))
    bank_of(engine_of(model()))
    assert made == [1, 1] and "older.bank" not in os.listdir(tmp_path)


def test_a_file_in_place_of_the_cache_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`HF_HOME` that leads to a file ended the command."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "file" / "assets"))
    made = fresh_process(monkeypatch)
    with pytest.warns(UserWarning, match="HF_HOME") as told:
        first = bank_of(engine_of(model()))
        assert bank_of(engine_of(model())) is first and made == [1]
    assert len(told) == 1


def test_command_line(photos: Path, searcher: Searcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--store", searcher.store.location]
    assert call("search", ["a dog", *store, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(0 <= hit["confidence"] <= 1 for hit in found)
    # One that is about nothing here: the untrained model's best score for it is below the usual one.
    text = min(sentences()[:40], key=lambda text: searcher.search(text, 1)[0].score)
    assert call("search", [text, *store, "-k", "12"]) == 0
    shown = capsys.readouterr()
    assert "confidence" in shown.out and "--- no good match" in shown.out and not shown.err
    assert call("search", ["a dog", *store, "--min-confidence", "1"]) == 0
    assert "confidence" in capsys.readouterr().err
    assert main(["search", "--image", str(photos / "p00.jpg"), *store, "--min-confidence", "0.5"]) == 2
    assert "--min-confidence" in capsys.readouterr().err
    place = str(tmp_path / "s")
    assert call("index", [str(photos), "--store", place, "--model", model_folder(), "--no-bank"]) == 0
    assert call("search", ["a dog", "--store", place]) == 0
    assert f"--store {place}" in capsys.readouterr().err
    assert main(["search", "a dog", "--store", place, "--min-confidence", "0.5"]) == 2
    assert "confidence" in capsys.readouterr().err
