"""Texts of shots: read, guarded, guides of the selection, part of the feature; each side sees its own alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reid_toys import SENSORS, rgbnt201, toy_config, toy_model
from torch.nn import functional as F

from seps.cli.main import main
from seps.method.checks import InputError
from seps.method.config import ConfigError
from seps.method.sensors import MultiModalSDTPS
from seps.reid.config import ReidModelConfig, from_mapping
from seps.reid.data import ReidDataError, ReidDataset, load
from seps.reid.data.texts import copied_texts, refuse_copies, with_texts
from seps.reid.evaluate import Case, default_cases, distances, evaluate, extract
from seps.reid.network.text import ShotTexts, TextVectors, text_loss
from seps.reid.run import load_trained, shots_digest
from seps.reid.task import ReidTask, load_dataset, make_reader

COLOURS = ("red", "green", "blue", "white", "black", "grey", "brown", "orange")
THINGS = ("jacket", "shirt", "coat", "dress")


def text_of(pid: int, camera: int, shot: int) -> str:
    """What is seen, in other words for every shot."""
    return f"a {COLOURS[pid % 8]} {THINGS[pid % 4]} seen from side {'abcd'[camera]} at step {'klmn'[shot]}"


def write_texts(root: Path, file: Path, skip: tuple[str, ...] = ()) -> Path:
    lines = []
    for split in ("train_171", "test"):
        for path in sorted((root / split / "RGB").glob("*.jpg")):
            pid, camera, shot = int(path.name[:6]), int(path.name[10]), int(path.stem[-1])
            if path.stem not in skip:
                name = path.relative_to(root).as_posix()
                lines.append({"image": name, "dense": text_of(pid, camera, shot)})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return rgbnt201(tmp_path / "data")


def described(root: Path, **options: str) -> ReidDataset:
    return with_texts(load("rgbnt201", root), write_texts(root, root.parent / "texts.jsonl"), root)


def test_every_shot_has_its_own_text(root: Path) -> None:
    dataset = described(root)
    assert dataset.query == dataset.gallery
    for record in (*dataset.train, *dataset.query):
        assert record.text == text_of(record.pid, record.camid, int(record.name[-1]))
    plain = load("rgbnt201", root)
    assert shots_digest(dataset) != shots_digest(plain)
    refuse_copies(dataset)


def test_texts_of_several_sensors_are_joined_in_their_order(root: Path, tmp_path: Path) -> None:
    name = "000020_cam1_0_00.jpg"
    file = tmp_path / "some.jsonl"
    lines = [("TI", "a warm back"), ("RGB", "a red\n coat"), ("NI", None)]
    made = [{"image": f"./test/{sensor}/{name}", "text": text} for sensor, text in lines]
    file.write_text(
        "\n".join(
            map(json.dumps, [*made, {"image": f"test/NI/{name}", "reason": "empty"}, {"image": "x", "text": "y"}])
        )
    )
    dataset = with_texts(load("rgbnt201", root), file, root)
    assert [record.text for record in dataset.query if record.name == name[:-4]] == ["a red coat a warm back"]
    assert sum(record.text is not None for record in (*dataset.train, *dataset.query)) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ('{"dense": "x"}', "names no picture"),
        ('{"image": "a.jpg", "dense": 3}', "not a text"),
        ('{"image": "a.jpg", "colour": "red"}', "no text"),
        ('{"image": "a.jpg", "dense": "one"}\n{"image": "a.jpg", "dense": "two"}', "another text"),
        ('{"image": "a.jpg", "dense": "one"}', "no text of any shot"),
        (
            '{"image": "test/RGB/000020_cam1_0_00.jpg", "dense": "a coat, Identity 20"}',
            "names the shot or its identity",
        ),
        ('{"image": "test/RGB/000020_cam1_0_00.jpg", "dense": "000020_cam1_0_00"}', "names the shot or its identity"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(line)
    with pytest.raises(ReidDataError, match=words):
        with_texts(load("rgbnt201", root), file, root)


def test_a_text_of_the_identity_is_refused(root: Path) -> None:
    """One text for all shots of an identity tells each query what was written of the gallery."""
    dataset = described(root)
    of_identity = {20: "A red coat.", 21: "a blue coat", 22: "a green coat"}
    copied = tuple(replace(record, text=of_identity[record.pid]) for record in dataset.query)
    wrong = replace(dataset, query=copied, gallery=tuple(replace(r, text=str(r.text).lower()) for r in copied))
    assert len(copied_texts(wrong)) == len(wrong.query)
    with pytest.raises(ReidDataError, match="text_copies"):
        refuse_copies(wrong)
    # The same words of another identity, or of the same camera, do not tell whom to find.
    other = [replace(r, text=f"{r.camid} {of_identity[r.pid]}") for r in copied]
    refuse_copies(replace(dataset, query=tuple(other), gallery=tuple(other)))
    refuse_copies(replace(dataset, query=tuple(replace(r, text="a coat") for r in copied[:1]), gallery=dataset.gallery))


def test_the_settings_say_what_texts_can_do() -> None:
    assert ReidModelConfig(text="guide").text_width == 384
    for wrong in ({"fusion": "concat"}, {"selection": "gate"}, {"network": "demo"}):
        with pytest.raises(ConfigError, match="text"):
            ReidModelConfig(text="guide", **wrong)
    assert ReidModelConfig(text="join", fusion="concat").text == "join"
    with pytest.raises(ConfigError, match="text_dropout"):
        from_mapping({"loss": {"text_dropout": 2}})


# The guide of the selection


def sensors(
    samples: int = 4, patches: int = 12, width: int = 8
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return (
        {name: torch.randn(samples, patches, width) for name in ("rgb", "nir", "tir")},
        {name: torch.randn(samples, width) for name in ("rgb", "nir", "tir")},
    )


def test_a_further_guide_takes_its_share_of_the_weights() -> None:
    module = MultiModalSDTPS(8, 12, aggr_ratio=0.5, further_guide=1.5)
    patches, vectors = sensors()
    text, told = torch.randn(4, 8), torch.tensor([True, True, False, True])
    scores, keep = module.choose("nir", patches, vectors, None, (text, told))

    def scaled(a: torch.Tensor) -> torch.Tensor:
        return (a - a.min()) / (a.max() - a.min() + 1e-8)

    for sample in range(4):
        cosines = {n: F.cosine_similarity(patches["nir"][sample], v[sample][None]) for n, v in vectors.items()}
        total = sum((0.5 if n == "nir" else 0.25) * scaled(a) for n, a in cosines.items())
        if told[sample]:
            written = F.cosine_similarity(patches["nir"][sample], text[sample][None])
            total = (total + 1.5 * 0.25 * scaled(written)) * 1.0 / (1.0 + 1.5 * 0.25)
        predicted = module.nir_sparse.predict(patches["nir"])[sample]
        torch.testing.assert_close(scores[sample], 0.5 * predicted + total, atol=1e-5, rtol=1e-5)
    plain, plain_keep = module.choose("nir", patches, vectors)
    torch.testing.assert_close(scores[2], plain[2])
    assert torch.equal(keep[2], plain_keep[2]) and int(keep.sum()) == 4 * 6
    nan = torch.where(told[:, None], text, float("nan"))
    assert torch.equal(module.choose("nir", patches, vectors, None, (nan, told))[0], scores)
    for wrong in ((text[:2], told), (text, told[:2]), (text, told.float()), (text[:, :3], told)):
        with pytest.raises(InputError, match="further guide"):
            module.choose("nir", patches, vectors, None, wrong)


def test_a_text_moves_what_is_kept_towards_it() -> None:
    """With the text's own direction in half of the patches, more of these are kept."""
    module = MultiModalSDTPS(8, 12, aggr_ratio=0.5, further_guide=50.0)
    patches, vectors = sensors(samples=64)
    text = torch.randn(64, 8)
    for name in patches:
        patches[name][:, :6] += 3 * text[:, None]
    kept = [module.choose(n, patches, vectors, None, (text, torch.ones(64, dtype=torch.bool)))[1] for n in patches]
    plain = [module.choose(n, patches, vectors)[1] for n in patches]
    assert float(torch.stack(kept)[..., :6].mean()) > 0.95 > float(torch.stack(plain)[..., :6].mean()) + 0.1


# The network


def texts_for(count: int, absent: tuple[int, ...] = (), width: int = 6) -> ShotTexts:
    present = torch.tensor([i not in absent for i in range(count)])
    return ShotTexts(torch.randn(count, width) * present[:, None], present)


@pytest.mark.parametrize("fusion", ["sdtps", "concat"])
def test_a_joined_text_is_one_more_block_as_long_as_the_others(fusion: str) -> None:
    model = toy_model(text="join", text_width=6, fusion=fusion).eval()
    images, texts = torch.rand(4, 3, 3, 64, 32), texts_for(4, absent=(2,))
    with torch.no_grad():
        fused = model.embed(images, texts=texts)
        without = model.embed(images)
    for branch, plain in zip((fused.original, fused.sdtps), (without.original, without.sdtps), strict=True):
        if branch is None or plain is None:
            assert fusion == "concat"
            continue
        blocks, bare = branch.view(4, 4, 16), plain.view(4, 4, 16)
        lengths = blocks.norm(dim=2)
        torch.testing.assert_close(lengths[[0, 1, 3], 3], lengths[[0, 1, 3], :3].mean(dim=1))
        assert not bool(blocks[2, 3].any()) and not bool(bare[:, 3].any())
        # Norms stay alike: the blocks that are there are scaled by sqrt(4 / their number).
        torch.testing.assert_close(blocks[2], bare[2])
    assert model.classify(fused)[0].shape == (4, 5)
    with pytest.raises(InputError, match="at least one sensor"):
        model.embed(images, present=torch.zeros(4, 3, dtype=torch.bool), texts=texts)


@pytest.mark.parametrize("text", ["guide", "join"])
def test_a_feature_follows_from_its_own_text_alone(text: str) -> None:
    """Whatever was written of the other shots of a batch, a shot's feature stays bit for bit the same."""
    torch.manual_seed(4)
    model = toy_model(text=text, text_width=6, text_guide=8.0).eval()
    images, texts = torch.rand(4, 3, 3, 64, 32), texts_for(4)
    changed = ShotTexts(texts.vectors.clone(), texts.present.clone())
    changed.vectors[1:] = torch.randn(3, 6)
    changed.present[2] = False
    with torch.no_grad():
        first, second = (model.embed(images, texts=each).pattern(3) for each in (texts, changed))
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def test_a_model_without_texts_is_the_same_as_before() -> None:
    torch.manual_seed(1)
    plain = toy_model().eval()
    torch.manual_seed(1)
    reading = toy_model(text="guide", text_width=6).eval()
    images = torch.rand(2, 3, 3, 64, 32)
    with torch.no_grad():
        assert torch.equal(plain.embed(images).pattern(3), reading.embed(images).pattern(3))
        absent = ShotTexts(torch.zeros(2, 6), torch.zeros(2, dtype=torch.bool))
        torch.testing.assert_close(plain.embed(images).pattern(3), reading.embed(images, texts=absent).pattern(3))
    assert plain.text_head is None and "text_head" not in " ".join(plain.state_dict())


def test_the_loss_asks_each_text_for_its_own_shot() -> None:
    texts, shots = torch.randn(5, 4), torch.randn(5, 4)
    labels, told = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([True, True, True, False, True])
    z = F.normalize(texts, dim=1) @ F.normalize(shots, dim=1).T / 0.07
    sums = 0.0
    for matrix in (z, z.T):
        losses = []
        for i in range(5):
            others = [j for j in range(5) if labels[j] != labels[i] and told[j]]
            if told[i] and others:
                top = math.exp(matrix[i, i])
                losses.append(-math.log(top / (top + sum(math.exp(matrix[i, j]) for j in others))))
        sums += sum(losses) / len(losses) / 2
    assert text_loss((texts, texts), (shots, shots), labels, told).item() == pytest.approx(sums, rel=1e-4)
    nobody = torch.zeros(5, dtype=torch.bool)
    assert text_loss((texts, texts), (shots, shots), labels, nobody).item() == 0
    parts = [text_loss((texts[i : i + 1], texts), (shots[i : i + 1], shots), labels, told, i) for i in (0, 1, 2, 4)]
    assert torch.stack(parts).mean().item() == pytest.approx(sums, rel=1e-4)


# Training and evaluation


def settings(root: Path, **model: object) -> dict[str, dict[str, object]]:
    file = write_texts(root, root.parent / "texts.jsonl", skip=("000020_cam1_0_00", "000001_cam1_0_00"))
    return {"data": {"texts": str(file)}, "model": {"text": "join", **model}}


def test_the_query_is_encoded_without_what_was_written_of_the_gallery(root: Path) -> None:
    config = toy_config(root, "rgbnt201", **settings(root))
    dataset = load_dataset(config.data)
    model = toy_model(text="join", cameras=2).eval()
    told = replace(
        dataset,
        gallery=tuple(
            replace(record, text=f"{record.text} and a note about {record.camid}") for record in dataset.gallery
        ),
    )
    records = (*dataset.query, *dataset.gallery)
    changed = (*dataset.query, *told.gallery)
    count = len(dataset.query)
    with make_reader(config, dataset) as reader:
        for side in ("own", "gallery", "none"):
            case = Case(SENSORS, "leave-out", 3, side)
            found = [
                extract(model, dataset, part, [case], reader, batch_size=5, queries=count)[0]
                for part in (records, changed)
            ]
            assert torch.equal(found[0][:count].vectors, found[1][:count].vectors)
            assert torch.equal(found[0][count:].vectors, found[1][count:].vectors) == (side == "none")
            has = torch.tensor([record.text is not None for record in records])
            expected = {"own": has, "gallery": has & (torch.arange(len(records)) >= count), "none": has & False}[side]
            assert torch.equal(found[0].present[:, 3], expected) and bool(found[0].present[:, :3].all())
        # A shot without a text is compared by its sensors alone: the norms of both sides are those of three blocks.
        own = extract(model, dataset, dataset.query, default_cases(model), reader)[0]
        lacking = next(i for i, record in enumerate(dataset.query) if record.text is None)
        bare = [torch.cat([part[:3].flatten() for part in row[None]]) for row in own.vectors[:, 0]]
        cosine = F.cosine_similarity(bare[lacking], bare[5], dim=0)
        bare = [row[:3].flatten() for row in own.vectors[:, 1]]
        cosine = (cosine + F.cosine_similarity(bare[lacking], bare[5], dim=0)) / 2
        assert float(1 - distances(own, own)[lacking, 5]) == pytest.approx(float(cosine), abs=1e-5)
        results = {
            side: evaluate(model, dataset, reader, [Case(SENSORS, "leave-out", 3, side)])[0]
            for side in ("own", "gallery", "none")
        }
    assert len({result.metrics.mAP for result in results.values()}) > 1
    assert results["gallery"].row()["texts"] == "gallery"


def test_texts_are_encoded_once_and_by_themselves() -> None:
    class Record:
        def __init__(self, text: str | None) -> None:
            self.text = text

    vectors = TextVectors("mini")
    both = vectors.of([Record("a red coat"), Record(None), Record("a very long blue dress with a white belt")])  # type: ignore[list-item]
    alone = TextVectors("mini").of([Record("a red coat")])  # type: ignore[list-item]
    assert both is not None and alone is not None
    torch.testing.assert_close(both.vectors[0], alone.vectors[0], atol=1e-5, rtol=0)
    assert both.present.tolist() == [True, False, True] and not bool(both.vectors[1].any())
    assert vectors.of([Record(None)]) is None  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="text_width"):
        TextVectors("mini", 100).of([Record("a")])  # type: ignore[list-item]


def test_training_brings_texts_near_their_shots_and_drops_them_on_request(root: Path) -> None:
    config = toy_config(root, "rgbnt201", **settings(root))
    task = ReidTask(config, load_dataset(config.data))
    batch = task.batch(0, 0, 0, 1)
    assert batch.texts is not None
    total, figures = task.loss(batch, 0)
    total.backward()
    assert task.model.text_head is not None
    assert float(task.model.text_head.projection.weight.grad.abs().sum()) > 0  # type: ignore[union-attr]
    assert float(figures["text"]) > 0
    dropped = toy_config(root, "rgbnt201", loss={"text_dropout": 1.0, "shared": 0.5}, **settings(root))
    without = ReidTask(dropped, task.dataset)
    assert without.batch(0, 0, 0, 1).texts is None
    _, figures = without.loss(without.batch(0, 0, 0, 1), 0)
    assert "text" not in figures and "shared" in figures
    with pytest.raises(ConfigError, match=r"data\.texts"):
        ReidTask(config, load("rgbnt201", root))


def test_the_commands_train_measure_and_show(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_texts(root, tmp_path / "texts.jsonl")
    small = {"data.layout": "rgbnt201", "data.root": root, "data.identities": 2, "data.images": 2, "data.texts": file}
    small |= {"data.holdout": 1, "model.image_size": "[64,32]", "model.width": 16, "model.stride": 16}
    small |= {"model.pretrained": "false", "model.aggr_ratio": 0.5, "train.epochs": 1, "model.text": "join"}
    run = str(tmp_path / "run")
    words = ["reid", "train", "--out", run, "--device", "cpu"]
    assert main([*words, *(word for name, value in small.items() for word in (f"--{name}", str(value)))]) == 0
    capsys.readouterr()
    for side in ("own", "gallery", "none"):
        assert main(["reid", "eval", run, "--texts", side, "--json", "--device", "cpu"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["results"][0]["texts"] == side and found["copied_texts"] == 0
    assert main(["reid", "eval", run, "--device", "cpu", "--missing"]) == 0
    assert "texts" in capsys.readouterr().out
    assert main(["reid", "eval", run, "--device", "cpu", "--any"]) == 0
    show = ["reid", "show", run, "--out", str(tmp_path / "pictures"), "--queries", "2", "--features", "--device", "cpu"]
    assert main(show) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["dense"] = " ".join(str(line["dense"]).split()[:3])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main(["reid", "eval", run, "--device", "cpu"]) == 2
    assert "text_copies" in capsys.readouterr().err
    assert main(["reid", "eval", run, "--device", "cpu", "--data.text_copies", "allow"]) == 0
    assert "word for word" in capsys.readouterr().out
    assert load_trained(run).model.text_head is not None
