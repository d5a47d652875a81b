"""The archives of a release: they hold what is needed and nothing else, and the wheel works in an empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import seps

TREE = Path(__file__).parents[2]
pytest.importorskip("setuptools", minversion="77", reason="the archives are built with setuptools")


def call(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=170, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of this tree, and the wheel made from that archive alone."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(TREE / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("tests", "examples", "configs"):
        shutil.copytree(TREE / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in TREE.glob("*"):
        if path.is_file():
            shutil.copy(path, tree)
    # What a working tree also has, and what must stay at home.
    for name in ("runs/a/secret.json", "carry/b.py", "out/demo.png", "docs/x.md", "benchmarks/y.py", "lab/z/y.py"):
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text("left behind")
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    call(sys.executable, "-c", build, cwd=tree)
    source = next((tree / "dist").glob("*.tar.gz"))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    call(*pip, "-w", tree / "dist", source)
    return source, next((tree / "dist").glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        sizes = {entry.filename: entry.file_size for entry in wheel.infolist()}
        record = wheel.read(next(name for name in sizes if name.endswith("METADATA"))).decode()
    tops = {name.split("/")[0] for name in sizes}
    assert tops == {"seps", f"seps-{seps.__version__}.dist-info"}
    package = Path(seps.__file__).parent
    expected = {
        f"seps/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in sizes if name.startswith("seps/")} == expected
    assert {"seps/py.typed", "seps/serve/static/index.html", "seps/assets/gallery/gallery.jsonl"} <= expected
    assert sizes["seps/assets/mini/model.safetensors"] > 13e6
    assert 13e6 < sizes["seps/assets/base/model.safetensors"] < 35e6
    assert archives[1].stat().st_size < 50e6
    assert re.search(rf"^Version: {re.escape(seps.__version__)}$", record, re.MULTILINE)


def test_the_source_archive_leaves_runs_and_tests_at_home(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    tops = {name.split("/")[0] for name in names if name}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "configs/mini.yaml", "examples/custom_encoder.py"} <= names
    assert not tops & {"tests", "runs", "out", "carry", "docs", "benchmarks", "lab", "dist", "build", ".venv"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert archives[0].stat().st_size < 50e6


def test_the_changelog_knows_this_version() -> None:
    assert f"## {seps.__version__}" in (TREE / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty virtual environment with the wheel; the dependencies are those of the tests' own environment."""
    place = tmp_path_factory.mktemp("empty") / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", place)
    own = next((place / "lib").glob("python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
    call(*pip, "install", "-q", "--no-deps", "--no-index", archives[1])
    # Read after the environment's own packages; the .pth files in there, such as an editable seps, are not.
    (own / "dependencies.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))
    )
    return place


def clean() -> dict[str, str]:
    """The variables of this process without those that would let the tree shine through."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    options = {"cwd": tmp_path, "env": {**clean(), "HF_HUB_OFFLINE": "1"}}
    where = call(environment / "bin" / "python", "-c", "import seps; print(seps.__file__)", **options)
    assert Path(where.strip()).is_relative_to(environment)
    program = environment / "bin" / "seps"
    assert call(program, "--version", **options).strip() == f"seps {seps.__version__}"
    report = json.loads(call(program, "doctor", "--json", **options))
    found = {finding["check"]: finding["status"] for finding in report["findings"]}
    assert report["ok"] and report["version"] == seps.__version__
    for name in ("core", "scoring: factored", "embedded model", "demo gallery", "encoders", "store", "serve"):
        assert found[name] == "ok", report["findings"]
    gallery = Path(where.strip()).parent / "assets" / "gallery"
    indexed = json.loads(call(program, "index", gallery, "--store", "store", "--json", **options))
    assert indexed["new"] == 54 and not indexed["problems"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    options["cwd"] = elsewhere
    hits = json.loads(call(program, "search", "a dog", "--store", tmp_path / "store", "-k", "3", "--json", **options))
    names = [Path(hit["path"]).stem for hit in hits]
    assert len(names) == 3 and set(names) <= {
        "dachshund-grass",
        "shepherd-puppy",
        "black-dog-floor",
        "dog-running-field",
        "black-dog-woods",
        "dogs-window",
    }
