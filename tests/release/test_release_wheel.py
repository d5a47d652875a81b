"""The archives of a release: they hold what is needed and nothing else, and the wheel works in an empty environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

import seps

TREE = Path(__file__).parents[2]
sys.path.append(str(TREE / "tools"))
import release  # noqa: E402

pytest.importorskip("setuptools", minversion="77", reason="the archives are built with setuptools")


def call(*command: object, timeout: float = 170, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]
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
    return release.build(tree, tree / "dist")


@pytest.mark.slow
def test_the_release_tool_finds_nothing_wrong_and_reads_the_bounds(archives: tuple[Path, Path]) -> None:
    assert list(release.problems(*archives)) == []
    bounds = release.lowest(archives[1])
    assert {"numpy==1.26", "pillow==11.3"} <= set(bounds) and not [name for name in bounds if name.startswith("torch")]


def test_the_page_of_a_package_index_has_no_link_that_leads_nowhere() -> None:
    page = "<!-- a note -->\n\n[a](docs/a.md), [b](https://b.example/x), ![a picture](docs/p.jpg), [c](docs/c.md#d)"
    assert release.portable(page, None) == "a, [b](https://b.example/x), , c"
    home = "https://example.org/seps/blob/main/"
    assert f"[c]({home}docs/c.md#d)" in release.portable(page, home)
    readme = release.portable((TREE / "README.md").read_text("utf-8"), None)
    assert set(re.findall(r"\]\((.{8})", readme)) == {"https://"}


@pytest.mark.slow
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
    assert {"seps/py.typed", "seps/photos/serve/static/index.html", "seps/assets/gallery/gallery.jsonl"} <= expected
    assert sizes["seps/assets/mini/model.safetensors"] > 13e6
    assert 13e6 < sizes["seps/assets/base/model.safetensors"] < 35e6
    assert sizes["seps/assets/minilm/model.safetensors"] > 40e6
    assert archives[1].stat().st_size < 95e6  # the package index takes files of at most 100 MB
    assert re.search(rf"^Version: {re.escape(seps.__version__)}$", record, re.MULTILINE)


@pytest.mark.slow
def test_the_source_archive_leaves_runs_and_tests_at_home(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    tops = {name.split("/")[0] for name in names if name}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "configs/mini.yaml", "examples/custom_encoder.py"} <= names
    assert not tops & {"tests", "runs", "out", "carry", "docs", "benchmarks", "lab", "dist", "build", ".venv"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert archives[0].stat().st_size < 95e6


def test_the_licences_of_the_wheel_are_stated(archives: tuple[Path, Path]) -> None:
    """NOTICE names every asset; the expression has every licence that the photos' list names."""
    with zipfile.ZipFile(archives[1]) as wheel:
        names = [entry.filename for entry in wheel.infolist()]
        record = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
        notice = wheel.read(next(name for name in names if name.endswith("licenses/NOTICE"))).decode()
        photos = wheel.read("seps/assets/gallery/ATTRIBUTION.md").decode()
    assets = {"/".join(name.split("/")[:3]) for name in names if name.startswith("seps/assets/")}
    assert {asset for asset in assets if f"src/{asset}" not in notice} == set()
    expression = re.search(r"^License-Expression: (.*)$", record, re.MULTILINE)
    assert expression is not None
    stated = set(expression[1].split(" AND "))
    rows = [row.split("|")[4].strip() for row in photos.splitlines() if row.startswith("|") and ".jpg" in row]
    other = {"BSD 2-clause": "BSD-2-Clause", "public domain": "LicenseRef-Public-Domain"}
    assert stated == {"Apache-2.0", *(other.get(row, row.replace(" ", "-")) for row in rows)}
    for licence in set(rows):
        assert f"{rows.count(licence)} {licence}" in notice or f"{rows.count(licence)} photos {licence}" in notice
    share_alike = [row for row in rows if row.startswith("CC BY-SA")]
    assert f"the {len(share_alike)} CC BY-SA photos" in " ".join(notice.split())


def test_the_changelog_knows_this_version() -> None:
    heading = next(line for line in (TREE / "CHANGELOG.md").read_text("utf-8").splitlines() if line.startswith("## "))
    assert seps.__version__ in heading


def installed(wheel: str, place: Path) -> Path:
    """An empty virtual environment with the wheel and the dependencies that it declares, from the package index."""
    call(sys.executable, "-m", "venv", "--without-pip", place)
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "--disable-pip-version-check"]
    call(*pip, "install", "-q", "-c", TREE / "constraints.txt", wheel, timeout=1500)
    call(*pip, "check")
    return place


@pytest.fixture(scope="module")
def environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base: without torch."""
    return installed(str(archives[1]), tmp_path_factory.mktemp("base") / "venv")


@pytest.fixture(scope="module")
def with_torch(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the extra `torch`."""
    return installed(f"{archives[1]}[torch]", tmp_path_factory.mktemp("torch") / "venv")


def clean() -> dict[str, str]:
    """The variables of this process without those that would let the tree shine through."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}


def photos_of(environment: Path, place: Path, **options: object) -> Path:
    """A folder of five photos, one of them a copy."""
    where = call(environment / "bin" / "python", "-c", "import seps; print(seps.__file__)", **options)
    gallery = Path(where.strip()).parent / "assets" / "gallery"
    assert gallery.is_relative_to(environment)
    photos = place / "photos"
    photos.mkdir()
    for name in ("black-dog-floor", "coffee-cup", "tabby-cat", "tea-hills"):
        shutil.copy(gallery / f"{name}.jpg", photos)
    shutil.copy(photos / "tabby-cat.jpg", photos / "copy.jpg")
    return photos


@pytest.mark.slow
def test_the_base_searches_without_torch(environment: Path, tmp_path: Path) -> None:
    places = {name: str(tmp_path / name) for name in ("HF_HOME", "XDG_DATA_HOME")}
    options = {"cwd": tmp_path, "env": {**clean(), "HF_HUB_OFFLINE": "1", **places}}
    python, program = environment / "bin" / "python", environment / "bin" / "seps"
    photos = photos_of(environment, tmp_path, **options)
    report = json.loads(call(program, "doctor", "--json", **options))
    status = {finding["check"]: finding["status"] for finding in report["findings"]}
    assert report["ok"] and all(status[name] == "ok" for name in ("core", "search", "store", "serve")), report
    assert status["torch"] == status["patches"] == "missing"
    hits = json.loads(call(program, "find", "a dog", photos, "--json", **options))
    assert Path((hits["hits"] if isinstance(hits, dict) else hits)[0]["path"]).name == "black-dog-floor.jpg"
    call(program, "index", photos, "--store", "store", **options)
    hits = json.loads(
        call(program, "search", "a cat", "--store", "store", "--image", photos / "tabby-cat.jpg", "--json", **options)
    )
    assert Path(hits[0]["path"]).name in {"tabby-cat.jpg", "copy.jpg"}
    assert "tabby-cat.jpg" in call(program, "duplicates", "--store", "store", **options)
    assert page_of(program, "store", **options).startswith("<!doctype html>")
    for words in (
        ("index", photos, "--store", "other", "--size", "patches"),
        ("index", photos, "--store", "other", "--model", "mini"),
        ("explain", photos / "coffee-cup.jpg", "a cup", "--store", "store"),
        ("demo",),
        ("export", "base", "-o", "onnx"),
    ):
        assert "pip install 'seps[" in refused(program, *words, **options)
    told = subprocess.run([python, "-c", "import seps; seps.PatchSlimming"], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert told.stderr.splitlines()[-1].endswith("pip install 'seps[torch]'")


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(with_torch: Path, tmp_path: Path) -> None:
    options = {"cwd": tmp_path, "env": {**clean(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}}
    python, program = with_torch / "bin" / "python", with_torch / "bin" / "seps"
    call(python, "-c", "from seps import *", **options)
    photos = photos_of(with_torch, tmp_path, **options)
    assert call(program, "--version", **options).strip() == f"seps {seps.__version__}"

    report = json.loads(call(program, "doctor", "--json", **options))
    status = {finding["check"]: finding["status"] for finding in report["findings"]}
    assert report["ok"] and report["version"] == seps.__version__
    for name in ("core", "method", "patches", "scoring: factored", "search", "store", "serve"):
        assert status[name] == "ok", report["findings"]
    assert status["encoders"] == status["export"] == "missing"
    hits = json.loads(call(program, "find", "a dog", photos, "--json", **options))  # by `base`, the default
    assert Path((hits["hits"] if isinstance(hits, dict) else hits)[0]["path"]).name == "black-dog-floor.jpg"

    indexed = json.loads(call(program, "index", photos, "--store", "store", "--model", "mini", "--json", **options))
    assert indexed["new"] == 5 and not indexed["problems"]
    hits = json.loads(call(program, "search", "a cat", "--store", "store", "-k", "2", "--json", **options))
    # Copies are one hit.
    assert Path(hits[0]["path"]).name in {"tabby-cat.jpg", "copy.jpg"}
    assert Path(hits[1]["path"]).name not in {"tabby-cat.jpg", "copy.jpg"}
    call(program, "explain", photos / "coffee-cup.jpg", "a cup", "--store", "store", "-o", "why.png", **options)
    assert (tmp_path / "why.png").stat().st_size > 1000
    assert "tabby-cat.jpg" in call(program, "duplicates", "--store", "store", **options)
    assert "'seps[export]'" in refused(program, "export", "mini", "-o", "onnx", **options)
    assert "'seps[encoders]'" in refused(
        program, "index", photos, "--store", "other", "--model", "clip-b-32", **options
    )
    assert page_of(program, "store", **options).startswith("<!doctype html>")


@pytest.mark.slow
def test_the_environment_holds_what_is_needed_and_is_not_heavy(environment: Path) -> None:
    packages = next((environment / "lib").glob("python*/site-packages"))
    names = {path.name for path in packages.iterdir()}
    assert not names & {
        "torch",
        "lance",
        "pyarrow",
        "transformers",
        "sentence_transformers",
        "scipy",
        "sklearn",
        "lancedb",
        "pandas",
        "matplotlib",
    }
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < 450e6, f"{size / 1e6:.0f} MB"


def refused(*command: object, **options: object) -> str:
    """What a command prints that ends with a user's mistake."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=170, **options)  # type: ignore[call-overload]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return str(done.stderr)


def page_of(program: Path, store: str, **options: object) -> str:
    """The page of `seps serve` over a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "serve", "--store", store, "--port", str(port)]
    service = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    try:
        for _ in range(600):
            assert service.poll() is None, service.stderr.read()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
                return str(page.read().decode())
            time.sleep(0.1)
        raise AssertionError("the service does not answer")
    finally:
        service.terminate()
        service.communicate(timeout=30)
