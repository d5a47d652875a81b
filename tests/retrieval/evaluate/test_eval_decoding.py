"""`seps eval` decodes each picture once: with every protocol, --extended, dual encoders, and beside bad files."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from duals import dual_folder
from messages import mentions
from seps.cli.main import main
from seps.images import decoding as images_module
from seps.retrieval.config import ModelConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate import extended as extended_module
from seps.retrieval.evaluate.run import evaluate
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was decoded so far; every way to pixels goes through `decode_upright`."""
    seen: Counter[str] = Counter()
    plain = images_module.decode_upright

    def counting(data: bytes, source: Any, side: int) -> Any:
        seen[Path(source.path).name] += 1
        return plain(data, source, side)

    monkeypatch.setattr(images_module, "decode_upright", counting)
    return seen


@pytest.fixture(scope="module")
def model_folder(encoders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("eval") / "model"
    save_pretrained(RetrievalModel(ModelConfig(**encoders, embed_size=16)).eval(), folder)
    return folder


def once(dev_scenes: Path) -> dict[str, int]:
    return {Path(source.path).name: 1 for source in load_jsonl(dev_scenes).sources}


@pytest.mark.parametrize("more", [[], ["--protocol", "none"], ["--protocol", "published"], ["--bank", "--lexical"]])
def test_each_picture_is_decoded_once(
    model_folder: Path, dev_scenes: Path, decoded: Counter[str], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main(["eval", "--model", str(model_folder), "--data", str(dev_scenes), "--json", "-", *more]) == 0
    assert decoded == once(dev_scenes)
    shown = json.loads(capsys.readouterr().out)
    options = {"bank": "--bank" in more, "lexical": "--lexical" in more}
    report = evaluate(from_pretrained(model_folder), load_jsonl(dev_scenes), shown["protocol"], **options)
    assert shown == {"model": str(model_folder), **report.as_dict(), "images_left_out": 0}


def test_each_picture_is_decoded_once_for_the_extended_figures(
    model_folder: Path, dev_scenes: Path, decoded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def made(dataset: Any, answers: Any) -> Any:
        asked.append(len(dataset))
        return None

    monkeypatch.setattr(extended_module, "load_answers", lambda: object())
    monkeypatch.setattr(extended_module, "extended", made)
    words = ["eval", "--model", str(model_folder), "--data", str(dev_scenes), "--extended"]
    assert main(words) == 0
    assert decoded == once(dev_scenes) and asked == [24]


def test_a_dual_encoder_decodes_each_picture_once(dev_scenes: Path, decoded: Counter[str]) -> None:
    assert main(["eval", "--model", str(dual_folder("clip")), "--data", str(dev_scenes), "--protocol", "none"]) == 0
    assert decoded == once(dev_scenes)


def test_a_model_without_pixels_still_leaves_bad_pictures_out(
    encoders: dict[str, str],
    dev_scenes: Path,
    tmp_path: Path,
    decoded: Counter[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_pretrained(RetrievalModel(ModelConfig(**encoders, embed_size=16, head="description")), tmp_path / "model")
    data = spoiled(dev_scenes, tmp_path / "data")
    assert main(["eval", "--model", str(tmp_path / "model"), "--data", str(data), "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["images"] == 21
    assert set(decoded.values()) == {1}


def spoiled(dev_scenes: Path, folder: Path) -> Path:
    """The scenes with one file missing, two that are no pictures."""
    shutil.copytree(dev_scenes.parent, folder)
    (folder / "dev003.png").unlink()
    for name in ("dev000.png", "dev013.png"):
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    return folder / dev_scenes.name


def test_bad_pictures_are_named_and_left_out_without_a_second_decoding(
    model_folder: Path, dev_scenes: Path, tmp_path: Path, decoded: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = spoiled(dev_scenes, tmp_path / "data")
    words = ["eval", "--model", str(model_folder), "--data", str(data), "--json", "-"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert decoded == {name: 1 for name in once(dev_scenes) if name != "dev003.png"}
    assert mentions(shown.err, "24", "images") and "paths" in shown.err
    assert "dev000.png" in shown.err and "dev013.png" in shown.err and "decoded" in shown.err
    good = [k for k in range(24) if k not in (0, 3, 13)]
    expected = evaluate(from_pretrained(model_folder), load_jsonl(dev_scenes).subset(good))
    figures = json.loads(shown.out)
    assert (figures["images"], figures["rsum"]) == (21, expected.metrics.rsum)
    names = {kind: fault["images"] for kind, fault in figures["left_out"].items()}
    assert names == {"missing": ["dev003.png"], "unreadable": ["dev000.png", "dev013.png"]}
    assert figures["images_left_out"] == 3 == sum(fault["count"] for fault in figures["left_out"].values())
    assert main([*words[:4], str(dev_scenes), *words[5:]]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["images_left_out"] == 0 and "left_out" not in whole
    assert main([*words, "--strict"]) == 2
    assert "dev003.png" in capsys.readouterr().err
    first, *others = once(dev_scenes)
    for name in others:
        (data.parent / name).write_bytes(b"no picture")
    shutil.copy(dev_scenes.parent / first, data.parent)
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["images_left_out"] == 23 and len(figures["left_out"]["unreadable"]["images"]) == 10
    (data.parent / first).write_bytes(b"no picture")
    assert main(words) == 2
    assert "usable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--folds", "7"], "24"),
        (["--protocol", "published", "--bank"], "published"),
        (["--protocol", "published"], "description"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_a_picture_is_decoded(
    model_folder: Path,
    dev_scenes: Path,
    tmp_path: Path,
    decoded: Counter[str],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    told: str,
) -> None:
    data, lines = dev_scenes, map(json.loads, dev_scenes.read_text().splitlines())
    if told == "description":
        data = tmp_path / "undescribed.jsonl"
        data.write_text("".join(json.dumps({**line, "dense": None}) + "\n" for line in lines))
    words = ["eval", "--model", str(model_folder), "--data", str(data), "--images", str(dev_scenes.parent)]
    assert main([*words, *more]) == 2
    assert told in capsys.readouterr().err and not decoded


def test_folds_that_a_bad_picture_breaks_name_it(
    model_folder: Path, dev_scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = spoiled(dev_scenes, tmp_path / "data")
    assert main(["eval", "--model", str(model_folder), "--data", str(data), "--folds", "3"]) == 2
    assert mentions(capsys.readouterr().err, "23", "3", "divisor")
    shutil.copy(dev_scenes.parent / "dev003.png", data.parent)
    assert main(["eval", "--model", str(model_folder), "--data", str(data), "--folds", "3"]) == 2
    assert mentions(capsys.readouterr().err, "22", "3", "2", "divisor")


def test_a_compressed_shard_is_named_as_such(
    model_folder: Path, dev_scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pictures were "without their file", though it is there."""
    name = load_jsonl(dev_scenes).records[0].source.path.name
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as shard:
        shard.add(dev_scenes.parent / name, name)
    line = {"image": name, "shard": "s.tar.gz", "captions": ["a thing"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["eval", "--model", str(model_folder), "--data", str(tmp_path / "data.jsonl")]) == 2
    assert "uncompressed" in capsys.readouterr().err
