"""ECCV Caption's and CxC's figures: on the package's own lists with made-up scores, and against a slow twin."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from messages import mentions, naming
from seps.cli.main import main
from seps.images.sources import DataError, ImageSource
from seps.retrieval.config import ModelConfig
from seps.retrieval.data import ImageRecord, RetrievalDataset, load_jsonl
from seps.retrieval.evaluate import extended as module
from seps.retrieval.evaluate.extended import Extended, coco_image_id, extended, load_answers
from seps.retrieval.evaluate.protocol import view
from seps.retrieval.evaluate.run import score_dataset
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import save_pretrained

WAYS = ("i2t", "t2i")


@pytest.fixture(scope="module")
def answers() -> Any:
    return load_answers()


@pytest.fixture(scope="module")
def coco(answers: Any) -> RetrievalDataset:
    """COCO's test split as the published layout gives it: file names, no caption ids, in the order of the split."""
    images = dict.fromkeys(answers.coco_gts["t2i"][int(caption)][0] for caption in answers.coco_ids)
    return RetrievalDataset(
        tuple(
            ImageRecord(str(row), ImageSource(Path(f"val2014/COCO_val2014_{image:012d}.jpg")), ("a",) * 5)
            for row, image in enumerate(images)
        ),
        "coco",
        "testall",
    )


@pytest.fixture(scope="module")
def split(coco: RetrievalDataset, answers: Any) -> Extended:
    return extended(coco, answers)


def best_scores(split: Extended, way: str) -> Tensor:
    """(images, captions): 2 for ECCV Caption's answers of this direction and 1 more for CxC's."""
    scores = torch.zeros(len(split.image_ids), len(split.caption_ids), dtype=torch.float16)
    rows = {number: row for row, number in enumerate(split.image_ids)}
    columns = {number: column for column, number in enumerate(split.caption_ids)}
    for weight, right in ((2, split.answers.eccv_gts[way]), (1, split.answers.cxc_gts[way])):
        pairs = [(query, one) if way == "i2t" else (one, query) for query, found in right.items() for one in found]
        places = torch.tensor([(rows[i], columns[t]) for i, t in pairs if t in columns])
        scores[places[:, 0], places[:, 1]] += weight
    return scores


def test_the_whole_split_is_found_by_file_names_and_order(split: Extended, answers: Any) -> None:
    assert len(split.image_ids) == 5000 and len(split.caption_ids) == 25000 and split.source == "by order"
    assert split.image_ids[0] == 391895 and split.caption_ids[:2] == (770337, 771687)
    for row, image in enumerate(split.image_ids):
        assert sorted(split.caption_ids[5 * row : 5 * row + 5]) == sorted(answers.coco_gts["i2t"][image])


def test_perfect_rankings_are_perfect(split: Extended) -> None:
    texts = split.direction("t2i", best_scores(split, "t2i").T)
    assert set(vars(texts).values()) == {100.0}
    images = split.direction("i2t", best_scores(split, "i2t"))
    assert (images.eccv_r1, images.cxc_r1, images.cxc_r5, images.cxc_r10) == (100.0,) * 4
    # ECCV Caption names two captions that are not among the 25,000: one of 19 right answers and one of 13.
    attainable = 100 * (1 - (1 / 19 + 1 / 13) / 1261)
    assert images.eccv_map_at_r == pytest.approx(attainable) and images.eccv_rprecision == pytest.approx(attainable)


def test_rankings_that_know_nothing_are_near_zero(split: Extended) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(5000, 25000, generator=generator)
    for figures in (split.figures(noise), split.figures(torch.zeros(1).expand(5000, 25000))):
        for side in (figures.i2t, figures.t2i):
            assert max(side.eccv_map_at_r, side.eccv_r1, side.cxc_r1) < 1.0 and side.cxc_r10 < 2.0


def small_answers(answers: Any, images: int, captions: int, seed: int = 0) -> Any:
    """As the package's, with random right answers; images are 1001, ..., captions of image k are 10 k, 10 k + 1, ..."""
    draw = random.Random(seed)
    small = type(answers).__new__(type(answers))
    small.verbose = False
    own = {1001 + k: [10 * (1001 + k) + c for c in range(captions)] for k in range(images)}
    small.coco_gts = {"i2t": own, "t2i": {text: [image] for image, texts in own.items() for text in texts}}
    small.coco_ids = list(small.coco_gts["t2i"])
    for name in ("eccv_gts", "cxc_gts"):
        lists = {}
        for way, other in (("i2t", "t2i"), ("t2i", "i2t")):
            queries = sorted(draw.sample(sorted(small.coco_gts[way]), images - 2))
            candidates = sorted(small.coco_gts[other])
            lists[way] = {query: draw.sample(candidates, draw.randint(1, len(candidates) // 2)) for query in queries}
        setattr(small, name, lists)
    return small


def small_data(images: int, captions: int) -> RetrievalDataset:
    texts = ("a",) * captions
    return RetrievalDataset(
        tuple(ImageRecord(str(1001 + k), ImageSource(Path(f"{k}.jpg")), texts) for k in range(images)), "coco", "small"
    )


def with_ids(dataset: RetrievalDataset) -> RetrievalDataset:
    records = (
        replace(r, caption_ids=tuple(str(10 * int(r.id) + c) for c in range(len(r.captions)))) for r in dataset.records
    )
    return replace(dataset, records=tuple(records))


def slow_figures(answers: Any, way: str, scores: Tensor, queries: list[int], candidates: list[int]) -> dict[str, float]:
    """From scores (queries, candidates) by the definitions, one query at a time."""
    order = {
        query: [one for _, one in sorted(zip(row, candidates, strict=True), reverse=True)]
        for query, row in zip(queries, scores.tolist(), strict=True)
    }
    sums = dict.fromkeys(("eccv_map_at_r", "eccv_rprecision", "eccv_r1"), 0.0)
    for query, right in answers.eccv_gts[way].items():
        hits, precisions = 0, 0.0
        for place, one in enumerate(order[query][: len(right)], start=1):
            if one in right:
                hits += 1
                precisions += hits / place
        sums["eccv_map_at_r"] += precisions / len(right)
        sums["eccv_rprecision"] += hits / len(right)
        sums["eccv_r1"] += order[query][0] in right
    figures = {name: 100 * total / len(answers.eccv_gts[way]) for name, total in sums.items()}
    for k in (1, 5, 10):
        found = [any(one in right for one in order[query][:k]) for query, right in answers.cxc_gts[way].items()]
        figures[f"cxc_r{k}"] = 100 * sum(found) / len(found)
    return figures


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_a_slow_twin(answers: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 100)  # several blocks, the last one smaller
    small = small_answers(answers, 13, 3, seed)
    # The data's order is another than that of the split; ids are bound, not positions.
    data = with_ids(small_data(13, 3)).subset(
        torch.randperm(13, generator=torch.Generator().manual_seed(seed)).tolist()
    )
    scores = torch.randn(13, 39, generator=torch.Generator().manual_seed(seed))
    found = extended(data, small).figures(scores)
    images = [int(record.id) for record in data.records]
    captions = [int(number) for record in data.records for number in record.caption_ids]
    assert vars(found.i2t) == pytest.approx(slow_figures(small, "i2t", scores, images, captions))
    assert vars(found.t2i) == pytest.approx(slow_figures(small, "t2i", scores.T, captions, images))
    assert 0 < found.i2t.eccv_map_at_r < found.i2t.eccv_rprecision < 100 and found.caption_ids == "given"


def test_ranked_ids_hold_no_more_than_the_figures_need(answers: Any) -> None:
    small = small_answers(answers, 30, 2)
    small.eccv_gts = {way: {query: found[:3] for query, found in small.eccv_gts[way].items()} for way in WAYS}
    ranked = module.ranked_ids(torch.randn(30, 60), list(range(30)), list(range(60)), 10)
    assert {len(found) for found in ranked.values()} == {10}
    found = extended(small_data(30, 2), small)
    depths: list[int] = []
    seen = module.ranked_ids

    def watched(scores: Tensor, queries: Any, candidates: Any, depth: int) -> dict[int, list[int]]:
        depths.append(depth)
        return seen(scores, queries, candidates, depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ranked_ids", watched)
        found.figures(torch.randn(30, 60))
    assert depths == [10, 10]


def test_scores_without_ranks_are_refused(answers: Any) -> None:
    found = extended(small_data(12, 2), small_answers(answers, 12, 2))
    scores = torch.zeros(12, 24)
    with pytest.raises(ValueError, match=r"shape \(24, 12\)"):
        found.figures(scores.T)
    scores[3, 7] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        found.figures(scores)


@pytest.mark.parametrize(
    ("id", "file", "member", "number"),
    [
        ("51", "COCO_val2014_000000391895.jpg", None, 391895),
        ("x", "shard.tar", "val2014/COCO_train2014_000000000009.jpg", 9),
        ("x", "000000391895.jpg", None, 391895),
        ("391895", "photo.jpg", None, 391895),
        ("photo.jpg", "photo.jpg", None, None),
        ("9" * 5000, "photo.jpg", None, None),
        ("٣", "photo.jpg", None, None),
    ],
)
def test_image_ids_are_read_from_names_or_ids(id: str, file: str, member: str | None, number: int | None) -> None:
    assert coco_image_id(ImageRecord(id, ImageSource(Path(file), member), ("a",))) == number


def test_data_that_is_not_the_split_is_refused(answers: Any, coco: RetrievalDataset) -> None:
    with pytest.raises(DataError, match=naming("5000", "12")):
        extended(small_data(12, 2), answers)
    with pytest.raises(DataError, match="missing"):
        extended(coco.subset(range(4999)), answers)
    with pytest.raises(DataError, match="images"):
        extended(coco.subset([*range(5000), 7]), answers)


def test_missing_and_wrong_caption_ids_are_sentences(answers: Any) -> None:
    small, data = small_answers(answers, 12, 2), small_data(12, 2)
    given = with_ids(data)
    with pytest.raises(DataError, match=naming("caption_ids", "JSONL", "caption_ids.txt")):
        extended(data.subset(reversed(range(12))), small)
    fewer = replace(data, records=(*data.records[:-1], replace(data.records[-1], captions=("a",))))
    with pytest.raises(DataError, match="captions"):
        extended(fewer, small)
    with pytest.raises(DataError, match=naming("1012", "caption_ids")):
        extended(replace(given, records=(*given.records[:-1], data.records[-1])), small)
    for wrong in ("10010", "5", "first", "٣"):
        last = replace(given.records[-1], caption_ids=("10120", wrong))
        with pytest.raises(DataError, match=naming(f"'{wrong}'")):
            extended(replace(given, records=(*given.records[:-1], last)), small)
    for captions, ids, what in (
        (("a",), ("10120",), naming("23", "24", "captions")),
        (("a", "b"), ("10120", "10120"), naming("23", "24", "captions")),
    ):
        last = replace(given.records[-1], captions=captions, caption_ids=ids)
        with pytest.raises(DataError, match=what):
            extended(replace(given, records=(*given.records[:-1], last)), small)


@pytest.fixture
def command(
    answers: Any, encoders: dict[str, str], dev_scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Any, RetrievalModel]:
    """`seps eval` of 24 scenes whose images and captions have the ids of small lists of right answers."""
    torch.manual_seed(0)
    model = RetrievalModel(ModelConfig(**encoders, embed_size=16)).eval()
    save_pretrained(model, tmp_path / "model")
    small = small_answers(answers, 24, 2)
    monkeypatch.setattr(module, "load_answers", lambda: small)
    lines = [json.loads(line) for line in dev_scenes.read_text().splitlines()]
    for k, line in enumerate(lines):
        # Scenes share captions, and equal scores have no order: a few words more make each caption another.
        code = " ".join("red" if k >> bit & 1 else "blue" for bit in range(5))
        line["captions"] = [f"{caption} {code}" for caption in line["captions"]]
        line |= {"id": 1001 + k, "caption_ids": [10 * (1001 + k), str(10 * (1001 + k) + 1)]}
    for name, chosen in (("given", lines[::-1]), ("none", lines), ("other", lines[::-1])):
        kept = [{k: v for k, v in line.items() if name == "given" or k != "caption_ids"} for line in chosen]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    words = ["eval", "--model", str(tmp_path / "model"), "--images", str(dev_scenes.parent), "--extended", "--data"]
    return words, small, model


def test_the_command_prints_and_writes_the_figures(
    command: tuple[list[str], Any, RetrievalModel], tmp_path: Path, dev_scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, small, model = command
    out = tmp_path / "out.json"
    assert main([*words, str(tmp_path / "given.jsonl"), "--folds", "2", "--json", str(out)]) == 0
    shown = capsys.readouterr()
    figures = json.loads(out.read_text())["extended"]
    data = load_jsonl(tmp_path / "given.jsonl", images_root=dev_scenes.parent)
    scores = score_dataset(model, data, view(data, "image"))
    captions = [int(number) for record in data.records for number in record.caption_ids]
    images = [int(record.id) for record in data.records]
    assert figures["i2t"] == pytest.approx(slow_figures(small, "i2t", scores, images, captions))
    assert figures["t2i"] == pytest.approx(slow_figures(small, "t2i", scores.T, captions, images))
    assert figures["caption_ids"] == "given"
    assert mentions(shown.out, "ECCV", "mAP@R") and f"{figures['t2i']['eccv_map_at_r']:.1f}" in shown.out
    assert "Caption ids" not in shown.out and "it/s" not in shown.err and "100%" not in shown.err

    assert main([*words, str(tmp_path / "none.jsonl"), "--json", str(out)]) == 0
    assert "Caption" in capsys.readouterr().out
    by_order = json.loads(out.read_text())["extended"]
    assert by_order["caption_ids"] == "by order"
    for way in WAYS:
        assert by_order[way] == pytest.approx(figures[way])

    words.remove("--extended")
    assert main([*words, str(tmp_path / "given.jsonl"), "--json", "-"]) == 0
    assert "extended" not in json.loads(capsys.readouterr().out)


def test_the_command_says_what_is_missing(
    command: tuple[list[str], Any, RetrievalModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, _, _ = command
    assert main([*words, str(tmp_path / "other.jsonl")]) == 2
    assert mentions(capsys.readouterr().err, "COCO's", "caption_ids")
    monkeypatch.setattr(module, "load_answers", load_answers)
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    assert main([*words, str(tmp_path / "given.jsonl")]) == 2
    assert "seps[eccv]" in capsys.readouterr().err
    words.remove("--extended")
    assert main([*words, str(tmp_path / "given.jsonl")]) == 0
