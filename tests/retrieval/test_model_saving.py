"""Saving a model folder removes and overwrites nothing that saving did not write itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from messages import naming
from seps.hub import folder as model_folder
from seps.hub import saving as model_saving
from seps.hub.folder import ModelError, read_config, read_weights
from seps.hub.saving import write_folder

CARD = '---\nlibrary_name: "seps"\n---\n\n# card\n'


def encoders(folder: Path) -> dict[str, str]:
    for kind in ("vision", "text"):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(f'{{"kind": "{kind}"}}')
    return {"vision": "vision", "text": "text"}


def save(folder: Path, value: float = 0.0, card: str = CARD) -> None:
    write_folder(folder, {"form": "full"}, {"x": torch.full((4,), value)}, card, encoders)


def value(folder: Path) -> float:
    tensors, _ = read_weights(folder, read_config(folder))
    return float(tensors["x"][0])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FOREIGN = ["text/notes.txt", "vision/photo.jpg", "model.safetensors", "README.md", "config.json", "text"]


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_in_the_way_is_named_before_anything_is_written(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text('{"architectures": ["Mine"]}')
    before = content(folder)
    with pytest.raises(ModelError, match=naming(name.split("/")[0])):
        save(folder)
    assert content(folder) == before and sorted(os.listdir(folder)) == [name.split("/")[0]]


@pytest.mark.parametrize("name", ["text/notes.txt", "vision-2/mine.json", "model-7.safetensors", ".saving-x/photo.jpg"])
def test_files_added_to_a_saved_model_stay(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1.0)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for number in (2.0, 3.0):
        try:
            save(tmp_path, number)
        except ModelError as error:
            assert name in str(error) and value(tmp_path) == 1.0
        assert (tmp_path / name).read_text() == "mine"


def test_a_card_that_was_edited_is_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    (tmp_path / "README.md").write_text(CARD + "my own words")
    with pytest.raises(ModelError, match=r"README\.md"):
        save(tmp_path, 2.0)
    assert value(tmp_path) == 1.0 and (tmp_path / "README.md").read_text().endswith("my own words")


def test_saving_again_leaves_no_file_behind(tmp_path: Path) -> None:
    save(tmp_path, 0.0)
    count = len(content(tmp_path))
    for number in (1.0, 2.0, 3.0):
        save(tmp_path, number)
        assert value(tmp_path) == number and len(content(tmp_path)) == count


def test_a_folder_of_the_last_version_is_saved_again_without_loss(tmp_path: Path) -> None:
    """It names its weights and the folders of its encoders, and lists no files."""
    save(tmp_path, 1.0)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["files"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "README.md").write_text(CARD + "my own words")
    save(tmp_path, 2.0, CARD + "new")
    assert value(tmp_path) == 2.0 and (tmp_path / "README.md").read_text() == CARD + "new"
    assert [p.read_text() for p in tmp_path.glob("README-*.md")] == [CARD + "my own words"]
    save(tmp_path, 3.0)
    assert value(tmp_path) == 3.0 and len(list(tmp_path.glob("*.safetensors"))) == 1
    (tmp_path / "text-2" if (tmp_path / "text-2").exists() else tmp_path / "text").joinpath("mine.txt").write_text("x")
    (tmp_path / "config.json").write_text(json.dumps({**read_config(tmp_path), "files": None}))
    with pytest.raises(ModelError, match=r"mine\.txt"):
        save(tmp_path, 4.0)


@pytest.mark.parametrize("moment", range(1, 9))
@pytest.mark.parametrize("killed", [False, True])
def test_a_save_that_stops_anywhere_is_undone_or_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, killed: bool
) -> None:
    """At every move of a file: an error, or a kill, after which no handler runs."""
    save(tmp_path, 1.0)
    files = len(content(tmp_path))
    calls = [0]
    real = os.replace

    def broken(*arguments: str) -> None:
        calls[0] += 1
        if calls[0] == moment:
            raise KeyboardInterrupt if killed else OSError(28, "No space left on device")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(model_saving.os, "replace", broken)
        if killed:
            patch.setattr(model_saving, "_settle", lambda *_: None)
        try:
            save(tmp_path, 2.0, CARD + "new")
        except (ModelError, KeyboardInterrupt):
            assert value(tmp_path) == 1.0
        else:
            assert value(tmp_path) == 2.0 and calls[0] < moment
    if not killed:
        assert len(content(tmp_path)) == files
        card = CARD if value(tmp_path) == 1.0 else CARD + "new"
        assert (tmp_path / "README.md").read_text() == card
    save(tmp_path, 3.0)
    assert value(tmp_path) == 3.0 and len(content(tmp_path)) == files


KILL_EVERYWHERE = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from seps import files
from test_model_saving import content, save, value

files.sync = lambda path: None  # takes most of the time, and a killed process does not need it
STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}

def killed_at(moment, folder):
    steps = 0
    def count(event, arguments):
        nonlocal steps
        changes = event in STEPS or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        steps += bool(changes) and str(folder) in str(arguments[0])
        if steps == moment:
            os._exit(9)
    sys.addaudithook(count)
    save(folder, 2.0)
    os._exit(0)

moment, killed = 0, True
while killed:
    moment += 1
    folder = Path(sys.argv[1]) / str(moment)
    save(folder, 1.0)
    child = os.fork()
    if not child:
        killed_at(moment, folder)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert value(folder) in (1.0, 2.0), moment
    save(folder, 3.0)
    left = sorted(path.name for path in folder.iterdir())
    assert value(folder) == 3.0 and len(left) == 5 and len(content(folder)) == 5, (moment, left)
print(moment)
"""


def test_a_save_killed_at_any_step_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    """A process that ends at its nth operation on a file, for every n, the folder's making and removal among them."""
    source = [
        str(Path(model_saving.__file__).parents[2]),
        str(Path(__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, tmp_path, Path(__file__).parent],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 20


NAMED_LIKE_A_SAVE = f".saving-seps-{'0' * 32}"


@pytest.mark.parametrize("name", [".saving-x", ".saving-abcd1234", NAMED_LIKE_A_SAVE, f"{NAMED_LIKE_A_SAVE}-mine"])
def test_a_folder_without_a_plan_stays_unless_it_is_empty_and_of_a_save(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1.0)
    (tmp_path / name).mkdir()
    save(tmp_path, 2.0)
    assert (tmp_path / name).exists() == (name != NAMED_LIKE_A_SAVE)
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "photo.jpg").write_text("mine")
    save(tmp_path, 3.0)
    assert (tmp_path / name / "photo.jpg").read_text() == "mine"


def test_a_manifest_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "m", tmp_path / "secret.txt"
    save(folder)
    outside.write_text("mine")
    config = read_config(folder)
    config["files"]["../secret.txt"] = model_folder.describe_weights(outside)["sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        save(folder, 2.0)
    assert outside.read_text() == "mine"
