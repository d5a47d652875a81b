"""`seps reid` from synth to pictures, and its mistakes in one sentence."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from full_disk import full_disk
from messages import mentions, naming
from seps.cli.main import call, main, parser_of
from seps.training import find_checkpoint
from seps.training.checkpoint import CheckpointStore, load

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
    assert call("reid", ["synth", str(root / "data"), *small]) == 0
    words = ["train", "--out", str(root / "run"), "--device", "cpu", f"data.root={root / 'data'}", *SETTINGS]
    assert call("reid", words) == 0
    return root


def test_train_again_has_nothing_to_do(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--out", str(trained / "run"), "--device", "cpu", "--json", f"data.root={trained / 'data'}"]
    assert call("reid", [*words, *SETTINGS]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["step"] == state["total_steps"] and not state["interrupted"]


def test_an_encoder_of_ones_own_comes_as_a_plugin(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seps.registry._IDEAS", {})
    own = tmp_path / "own.py"
    own.write_text("import seps\nfrom reid_toys import ToyEncoder\nseps.register_encoder('toy')(ToyEncoder.of_size)\n")
    words = ["train", "--out", str(tmp_path / "run"), "--device", "cpu", f"data.root={trained / 'data'}", *SETTINGS]
    words += ["model.encoder=toy", "model.stride=null"]
    assert main(["reid", *words]) == 2
    assert mentions(capsys.readouterr().err, "@seps.register_encoder", "'toy'")
    assert main(["reid", *words, "--plugin", str(own)]) == 0
    monkeypatch.setattr("seps.registry._IDEAS", {})
    measured = ["reid", "eval", str(tmp_path / "run"), "--device", "cpu"]
    assert main(measured) == 2
    again = shutil.copy(own, tmp_path / "again.py")  # a process runs a file once
    assert main([*measured, "--plugin", str(again)]) == 0
    assert "mAP" in capsys.readouterr().out


def test_the_next_command_can_be_typed_as_it_is_printed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    shutil.copytree(trained / "run", run)
    words = ["train", "--out", str(run), "--device", "cpu", f"data.root={trained / 'data'}"]
    assert call("reid", [*words, *SETTINGS]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(line) == ["Next:", "seps", "reid", "eval", str(run), "--missing"]


def test_eval_table_and_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(trained / "run"), "--device", "cpu", "--missing", "--batch-size", "7"]
    assert call("reid", words) == 0
    table = capsys.readouterr().out
    assert "leave-out" in table and "zero" in table and "mAP" in table
    assert call("reid", [*words, "--json", "--pattern", "1", "--cost"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["results"]) == 13 and found["cost"]["gflops"] > 0
    assert {row["pattern"] for row in found["results"]} == {1}


def test_a_sensor_may_have_any_name(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder in brackets was taken for a colour, and one with control characters was obeyed by the terminal."""
    shutil.copytree(trained / "data", tmp_path / "data")
    for split in ("train", "query", "gallery"):
        (tmp_path / "data" / split / "TI").rename(tmp_path / "data" / split / "[red]\x1b[2J")
    words = ["--device", "cpu", f"data.root={tmp_path / 'data'}"]
    assert main(["reid", "train", "--out", str(tmp_path / "run"), *words, *SETTINGS]) == 0
    assert main(["reid", "eval", str(tmp_path / "run"), *words]) == 0
    assert "[red]\\x1b[2J" in capsys.readouterr().out


def test_show_writes_pictures(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("reid", ["show", str(trained / "run"), "--out", str(trained / "pictures"), "--queries", "2"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == ["ranked.png", "kept.png"] and all((trained / "pictures" / name).stat().st_size for name in names)


def test_show_and_features_on_a_full_disk_and_beside_others_pictures(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture of that name in the folder was replaced, whosever it was."""
    for name in ("ranked.png", "kept.png"):
        mine = tmp_path / name
        Image.new("RGB", (4, 4), "red").save(mine)
        before = mine.read_bytes()
        assert main(["reid", "show", str(trained / "run"), "--out", str(tmp_path), "--queries", "1"]) == 2
        assert f"{mine}" in capsys.readouterr().err
        assert mine.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [name]
        mine.unlink()
    show = ["reid", "show", str(trained / "run"), "--out", str(tmp_path), "--queries", "1", "--device", "cpu"]
    features = ["reid", "features", str(trained / "run"), str(trained / "data" / "gallery"), "--device", "cpu"]
    with full_disk(2000):
        assert main(show) == 2
        assert f"{tmp_path}/ranked.png: " in capsys.readouterr().err
        assert main([*features, "--out", str(tmp_path / "features.npz")]) == 2
        assert f"{tmp_path}/features.npz: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(show) == 0 and main(show) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fly"], "invalid choice"),
        (["train", "--out", "{tmp}/run", "--sideways"], "--sideways"),
        (["train"], "--out"),
        (["train", "--out", "{tmp}/run"], naming("data.root")),
        (["train", "--out", "{tmp}/run", "data.root={tmp}/none"], "none"),
        (["train", "--out", "{tmp}/run", "data.root={tmp}"], "train"),
        (["train", "--out", "{tmp}/run", "data.layout=market", "data.root={tmp}"], "unknown"),
        (["train", "--out", "{tmp}/run", "--config", "{tmp}/none.yaml"], "read"),
        (["train", "--out", "{tmp}/run", "data.root={data}", "--device", "abacus"], "abacus"),
        (["eval", "{tmp}"], "checkpoint"),
        (["eval", "{run}", "model.width=3"], "settings"),
        # The pictures were resized to it, and the features were others than those of the run.
        (["features", "{run}", "{data}", "--out", "{tmp}/f.npz", "model.image_size=[32, 32]"], "settings"),
        (["eval", "{run}", "--batch-size", "0"], "--batch-size"),
        (["eval", "{run}", "--pattern", "9"], "invalid choice"),
        (["show", "{run}", "--out", "{tmp}/p", "--queries", "0"], "1"),
        (["synth", "{tmp}/s", "--identities", "1"], "identities"),
        (["synth", "{run}"], "folder"),
    ],
)
def test_mistakes_end_in_one_sentence(
    trained: Path, tmp_path: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"tmp": tmp_path, "run": trained / "run", "data": trained / "data"}
    with pytest.raises(ValueError, match=sentence):
        call("reid", [word.format(**places) for word in words])
    assert "Traceback" not in capsys.readouterr().err


def test_help_tells_the_settings_that_a_trained_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """It gave the defaults of training, such as an empty data.root, where those of the run hold."""
    for command, there, absent in (
        ("eval", ["--data.root", "--data.rerank"], ["--data.flip", "--data.holdout", '""']),
        ("show", ["--data.root"], ["--data.rerank"]),
        ("threshold", ["--data.root"], ["--data.layout", "--data.holdout"]),
        ("features", ["--data.pattern"], ["--data.root", "--data.layout"]),
    ):
        with pytest.raises(SystemExit):
            main(["reid", command, "--help"])
        told = capsys.readouterr().out
        assert "run" in told and all(name in told for name in there)
        assert not [name for name in absent if name in told]


def test_settings_are_taken_from_any_place(tmp_path: Path) -> None:
    here = tmp_path / "a.b.yaml"
    here.touch()
    given = ["data.root=SET", "data.verify_files=true", "data.threads=2"]
    for words in (
        ["eval", "RUN", "--data.root", "SET", "--rerank", "--data.verify_files=true", "data.threads=2"],
        ["eval", "--rerank", "RUN", *given],
        ["eval", "RUN", "--batch-size", "64", *given, "--rerank"],
        ["eval", *given, "RUN", "--rerank"],
    ):
        options = parser_of("reid").parse_args(words)
        assert (str(options.run), options.rerank, options.batch_size) == ("RUN", True, 64)
        assert options.settings == dict(word.split("=") for word in given)
    parser = parser_of("reid")
    named = parser.parse_args(["train", "--config", str(here), "--out", str(tmp_path / "c.d=e")])
    assert named.out == str(tmp_path / "c.d=e") and named.settings == {}
    for words in (["--train.epochs"], ["--train.epochs", "--fresh"]):
        with pytest.raises(ValueError, match=naming("--train.epochs")):
            parser.parse_args(["train", "--out", "R", *words])
    with pytest.raises(ValueError, match=naming("data.root=SET")):
        parser.parse_args(["synth", "OUT", "data.root=SET"])


def test_what_was_left_out_and_not_counted_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    shutil.copytree(trained / "data", root)
    gone = sorted((root / "gallery" / "NI").iterdir())[0]
    gone.unlink()
    query = sorted((root / "query" / "RGB").iterdir())[0].stem
    for folder in root.glob("gallery/*"):
        for path in folder.glob(f"{query[:4]}_*"):
            path.unlink()
    for sensor in ("RGB", "NI", "TI"):
        shot = sorted((root / "train" / sensor).iterdir())[0]
        shutil.copy(shot, root / "gallery" / sensor / shot.name)
    words = ["eval", str(trained / "run"), "--device", "cpu", f"data.root={root}", "data.on_problem=skip"]
    assert call("reid", words) == 0
    said = capsys.readouterr()
    lone = len([path for path in (root / "query" / "RGB").iterdir() if path.name.startswith(query[:4])])
    assert f"{lone}" in said.out
    assert "identities" in said.err


def test_a_damaged_state_and_places_that_cannot_be_written_are_sentences(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for words, sentence in (
        (
            ["show", str(trained / "run"), "--out", str(tmp_path / "file"), "--device", "cpu"],
            "folder",
        ),
        (["synth", str(tmp_path / "file" / "s"), "--identities", "8"], "folder"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call("reid", words)
    assert (tmp_path / "file").read_text() == "mine"
    whole = find_checkpoint(trained / "run", "best")
    about = load(whole, optimizer=False).state["about"]
    for part in ("reid", "modalities", "identities", "cameras"):
        state = load(whole)
        less = {name: value for name, value in about.items() if name != part}
        store = CheckpointStore(tmp_path / part, 1, lambda _: None)
        store.save(replace(state, state={**state.state, "about": less}))
        with pytest.raises(ValueError, match=naming(f"'{part}'")):
            call("reid", ["eval", str(tmp_path / part), "--which", "last", "--device", "cpu"])


def test_synth_leaves_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    mine = tmp_path / "set.partial" / "photo.jpg"
    mine.parent.mkdir()
    mine.write_bytes(b"mine")
    small = ["--identities", "4", "--images", "4", "--height", "16", "--width", "16", "--workers", "1"]
    with pytest.raises(ValueError, match=naming("set.partial")):
        call("reid", ["synth", str(tmp_path / "set"), *small])
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    (mine.parent / ".seps-unfinished").touch()
    assert call("reid", ["synth", str(tmp_path / "set"), *small]) == 0
    assert {path.name for path in (tmp_path / "set").iterdir()} == {"train", "query", "gallery", "manifest.json"}
    assert not mine.parent.exists()
