"""Files made to break their reader: pipes in the place of files, deep folders and deep JSON, numbers without bounds."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from seps.cli.main import main
from seps.encoders.bert import BertConfig
from seps.encoders.dual import is_dual
from seps.encoders.vision import read_preprocessing
from seps.encoders.vit.saved import load_vit
from seps.encoders.weights import EncoderUnavailable
from seps.hub.folder import ModelError, read_config
from seps.images.sources import DataError
from seps.method.config import ConfigError
from seps.photos.indexing.gallery import walk
from seps.photos.store.rows import StoreError, StoreSettings
from seps.retrieval.config import RunConfig
from seps.settings import load
from stores import gallery, index, paint

DEEP = '{"a":' * 100_000


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whoever waits for the writer of a pipe gets a TimeoutError."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_folder_of_1500_levels_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = gallery(tmp_path / "g", 2)
    monkeypatch.chdir(top)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    paint(Path("deep.jpg"), 1)
    try:
        found = walk(top)
        assert not found.problems and len(found.images) == 3
        assert [image.path for image in found.images if "deep" in image.path] == ["d/" * 1500 + "deep.jpg"]
        report = index(top, tmp_path / "s")
        assert report.new == 3 and not report.problems
        assert main(["search", "a dog", "--store", str(tmp_path / "s")]) == 0
    finally:  # what removes folders after a test goes into them by recursion
        subprocess.run(["rm", "-r", str(top / "d")], check=True)


@pytest.mark.parametrize("text", [DEEP, "[" * 100_000, '{"format": 1e999}', "{", "[]", '{"format": NaN}'])
def test_a_configuration_that_cannot_be_read_is_a_sentence(tmp_path: Path, text: str) -> None:
    for name in ("config.json", "preprocessor_config.json", "vit.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(EncoderUnavailable, match=r"vit\.json"):
        load_vit(tmp_path, None, prune=None)
    with pytest.raises(StoreError, match="settings"):
        StoreSettings.from_json(text, "here")
    assert not is_dual(tmp_path)


@pytest.mark.parametrize("text", [DEEP, "[" * 100_000, "{", "[]", '{"hidden_size": 1e999}'])
def test_an_encoder_that_cannot_be_read_is_a_sentence(tmp_path: Path, text: str) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(EncoderUnavailable, match=r"config\.json"):
        BertConfig.read(tmp_path)

    class Config:
        model_type = "vit"

    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        read_preprocessing(tmp_path, Config())


@pytest.mark.parametrize("text", [DEEP, "[" * 100_000, "&a [*a]", "train: &a {b: *a}", "a: [1", "x: 1e999"])
def test_settings_that_cannot_be_read_are_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(RunConfig, path)
    path.write_text("train:\n  epochs: 3\ndata: {}\ntrain:\n  batch_size: 8\n")
    with pytest.raises(ConfigError, match=r"run\.yaml.*lines 1 and 4.*train"):
        load(RunConfig, path)
    path.write_bytes(b"#" * 2**21)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(RunConfig, path)


@pytest.mark.parametrize("text", ["010", "  010"])
def test_a_whole_number_is_decimal(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"train:\n  epochs: {text}\n")
    assert load(RunConfig, tmp_path / "run.yaml").train.epochs == 10
    assert load(RunConfig, None, [f"train.epochs={text}"]).train.epochs == 10


@pytest.mark.parametrize("value", ["1:30", "'1:30'"])
def test_a_time_is_no_number(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.yaml").write_text(f"train:\n  epochs: {value}\n")
    for files, overrides in ((tmp_path / "run.yaml", []), (None, ["train.epochs=1:30"])):
        with pytest.raises(ConfigError, match=r"train\.epochs.*1:30"):
            load(RunConfig, files, overrides)
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        load(RunConfig, None, ["train.epochs=" + "[" * 100_000])


def test_lists_of_a_command_line_are_decimal_too() -> None:
    from dataclasses import dataclass

    @dataclass
    class Pair:
        size: tuple[int, int] = (1, 1)
        name: str = ""

    assert load(Pair, None, ["size=[010, 20]"]).size == (10, 20)
    assert load(Pair, None, ["name=[1:30]"]).name == "[1:30]"
    with pytest.raises(ConfigError, match="size"):
        load(Pair, None, ["size=[10, 1:30]"])


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: read_config(folder)),
        ("config.json", lambda folder: BertConfig.read(folder)),
        ("vit.json", lambda folder: load_vit(folder, None, prune=None)),
        ("run.yaml", lambda folder: load(RunConfig, folder / "run.yaml")),
        ("a.jsonl", lambda folder: main(["eval", "--data", str(folder / "a.jsonl")]) == 2 or 1 / 0),
        (".sepsignore", lambda folder: walk(folder)),
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / name)
    try:
        read(tmp_path)
    except (ModelError, EncoderUnavailable, ConfigError, DataError) as error:
        assert str(tmp_path) in str(error)


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_is_no_dual_encoder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert not is_dual(tmp_path)
