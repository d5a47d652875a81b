"""`seps reid` from synth to pictures, and its mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seps.cli import reid

SETTINGS = [
    "data.identities=2",
    "data.images=2",
    "data.holdout=2",
    "model.image_size=[64, 32]",
    "model.stride=16",
    "model.width=16",
    "model.aggr_ratio=0.5",
    "model.pretrained=false",
    "train.epochs=1",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reid")
    small = ["--identities", "8", "--images", "4", "--height", "64", "--width", "32", "--workers", "1"]
    assert reid.run(["synth", str(root / "data"), *small]) == 0
    assert (
        reid.run(["train", "--out", str(root / "run"), "--device", "cpu", f"data.root={root / 'data'}", *SETTINGS]) == 0
    )
    return root


def test_train_again_has_nothing_to_do(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--out", str(trained / "run"), "--device", "cpu", "--json", f"data.root={trained / 'data'}"]
    assert reid.run([*words, *SETTINGS]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["step"] == state["total_steps"] and not state["interrupted"]


def test_eval_table_and_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(trained / "run"), "--device", "cpu", "--missing", "--batch-size", "7"]
    assert reid.run(words) == 0
    table = capsys.readouterr().out
    assert "leave-out" in table and "zero" in table and "mAP" in table
    assert reid.run([*words, "--json", "--pattern", "1", "--cost"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["results"]) == 13 and found["cost"]["gflops"] > 0
    assert {row["pattern"] for row in found["results"]} == {1}


def test_show_writes_pictures(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reid.run(["show", str(trained / "run"), "--out", str(trained / "pictures"), "--queries", "2"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == ["ranked.png", "kept.png"] and all((trained / "pictures" / name).stat().st_size for name in names)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fly"], "invalid choice"),
        (["train", "--out", "{tmp}/run", "--sideways"], "--sideways"),
        (["train"], "--out"),
        (["train", "--out", "{tmp}/run"], "data.root is empty"),
        (["train", "--out", "{tmp}/run", "data.root={tmp}/none"], "none"),
        (["train", "--out", "{tmp}/run", "data.root={tmp}"], "train"),
        (["train", "--out", "{tmp}/run", "data.layout=market", "data.root={tmp}"], "unknown layout"),
        (["train", "--out", "{tmp}/run", "--config", "{tmp}/none.yaml"], "cannot be read"),
        (["train", "--out", "{tmp}/run", "data.root={data}", "--device", "abacus"], "abacus"),
        (["eval", "{tmp}"], "no best checkpoint"),
        (["eval", "{run}", "model.width=3"], "data settings alone"),
        (["eval", "{run}", "--batch-size", "0"], "--batch-size"),
        (["eval", "{run}", "--pattern", "9"], "invalid choice"),
        (["show", "{run}", "--out", "{tmp}/p", "--queries", "0"], "at least 1"),
        (["synth", "{tmp}/s", "--identities", "1"], "identities"),
        (["synth", "{run}"], "choose another folder"),
    ],
)
def test_mistakes_end_in_one_sentence(
    trained: Path, tmp_path: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"tmp": tmp_path, "run": trained / "run", "data": trained / "data"}
    with pytest.raises(ValueError, match=r".") as caught:
        reid.run([word.format(**places) for word in words])
    assert sentence in str(caught.value) and "Traceback" not in capsys.readouterr().err


def test_settings_are_taken_as_other_commands_take_them() -> None:
    words = ["eval", "RUN", "--data.root", "SET", "--rerank", "--data.verify_files=true", "data.threads=2"]
    assert reid._settings_last(words) == ["eval", "RUN", "--rerank", "data.threads=2", "data.root=SET",
                                     "data.verify_files=true"]  # fmt: skip
    assert reid._settings_last(["train", "--config", "a.b.yaml", "--train.epochs"])[-1] == "train.epochs="
