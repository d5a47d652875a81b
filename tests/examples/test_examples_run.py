"""Every example runs, alone and from another folder, and shows what its first lines promise."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import seps

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path) -> str:
    """What the example prints, in a process of its own."""
    paths = [str(Path(seps.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "an example leaves nothing behind"
    return done.stdout


def test_the_selection_module(tmp_path: Path) -> None:
    shown = run("take_the_selection_module", tmp_path)
    assert "kept 49 of 196" in shown and "gradients reach 392 of 392 patches" in shown


@pytest.mark.slow
def test_a_fourth_modality(tmp_path: Path) -> None:
    shown = run("fourth_modality", tmp_path)
    assert shown.count("128 patches -> 26 tokens") == 4
    guided, alone = (int(number) for number in re.findall(r"(\d+) of 64", shown))
    assert alone < guided <= 64


@pytest.mark.slow
def test_a_drop_in_for_demo(tmp_path: Path) -> None:
    shown = run("drop_in_for_demo", tmp_path)
    assert shown.count("training returns [(4, 10), (4, 192), (4, 10), (4, 192)]") == 2
    assert len(re.findall(r"pattern [12]: \(4, 192\)|pattern 3: \(4, 384\)", shown)) == 6
    assert all(float(apart) < 1e-5 for apart in re.findall(r"apart by (\S+)", shown))
    theirs, ours, theirs_gumbel, ours_gumbel = map(float, re.findall(r"predictors (\S+)", shown))
    assert theirs == ours > 0
    assert theirs_gumbel > 1e4 and ours_gumbel < 1


@pytest.mark.slow
def test_a_custom_encoder(tmp_path: Path) -> None:
    shown = run("custom_encoder", tmp_path)
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", shown))
    assert last < 0.5 * first
    assert len(re.findall(r"'a (\w+) corner' finds the picture with the \1 corner", shown)) == 4
    assert "scores" in shown


@pytest.mark.slow
def test_ideas_of_ones_own(tmp_path: Path) -> None:
    assert "factored" in run("my_ideas", tmp_path)


@pytest.mark.slow
def test_a_custom_data_set(tmp_path: Path) -> None:
    shown = run("custom_data_set", tmp_path)
    assert "images" in shown and "the same: True" in shown
    recalls = dict(re.findall(r"protocol +(\w+): text -> image R@1 (\d+) %", shown))
    assert int(recalls["image"]) >= int(recalls["none"]) > 100 / 6


@pytest.mark.slow
def test_a_million_pairs(tmp_path: Path) -> None:
    shown = run("score_a_million_pairs", tmp_path)
    assert "1000 pictures, 1,000,000 pairs" in shown
    found = re.search(r"comes first for (\d+)%", shown)
    difference = re.search(r"readable loop: (\S+)", shown)
    assert found and int(found[1]) > 60
    assert difference and float(difference[1]) < 1e-5


@pytest.mark.slow
def test_a_published_checkpoint(tmp_path: Path) -> None:
    shown = run("load_a_published_checkpoint", tmp_path)
    assert "saved: README.md, config.json, model.safetensors, text, vision" in shown
    assert "a hostile file:" in shown and "read" in shown
    assert "a careless reader would have run this" not in shown


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_short_explained_and_tested(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "It prints" in " ".join(docstring.split())
    assert text.count("\n") <= 120
    assert f'run("{path.stem}"' in Path(__file__).read_text(encoding="utf-8")
