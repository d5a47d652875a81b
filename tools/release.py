"""Build the archives of a release, check them, and test the wheel in empty environments. It uploads nothing.

    python tools/release.py                       build, check, and test with all Pythons of this machine
    python tools/release.py --pythons 3.11        the same with one
    python tools/release.py --lowest              also with the lowest versions that pyproject.toml allows, on the
                                                  lowest Python: later ones have no builds of them

Archives are built from the files that git tracks, into `dist`: the wheel is made of the source archive alone. A Python
that is not here is named and not tested. Environments are temporary. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LARGEST = 95_000_000
"""Bytes of an archive; the package index takes 100 MB."""


def call(*command: object, **options: object) -> str:
    """Standard output of a command. Raises ValueError with all that it printed where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The source archive of a tree, and the wheel made of that archive alone."""
    out.mkdir(parents=True, exist_ok=True)
    make = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    source = out / call(sys.executable, "-c", make, cwd=tree).split()[-1]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    call(*pip, "-w", out, source)
    return source, next(out.glob("*.whl"))


_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def portable(text: str, home: str | None) -> str:
    """A page of the repository for other places, such as a package index, where its relative links lead nowhere.

    They become addresses below `home`; without one links become their text, and pictures are left out.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if home:
            return f"{picture}[{words}]({home.rstrip('/')}/{target})"
        return "" if picture else words

    return _LINK.sub(replaced, re.sub(r"^<!--.*?-->\n+", "", text, flags=re.MULTILINE))


def home_of(tree: Path) -> str | None:
    """The address below which the files of the repository are public: the URL `Source` of pyproject.toml."""
    found = re.search(r'^Source = "(.+)"$', (tree / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    return found and found[1]


def tracked(tree: Path) -> None:
    """Copy the files that git tracks into a folder, README.md so that its links work on a package index."""
    for name in call("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    page = tree / "README.md"
    page.write_text(portable(page.read_text("utf-8"), home_of(tree)), "utf-8")


def problems(source: Path, wheel: Path) -> Iterator[str]:
    """What is wrong with the archives, in sentences."""
    version = wheel.name.split("-")[1]
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if changes is None or changes[1] != version:
        yield f"CHANGELOG.md begins with {changes and changes[1]}, and the wheel is of {version}."
    if f"version: {version}\n" not in (ROOT / "CITATION.cff").read_text("utf-8"):
        yield f"CITATION.cff is not of version {version}."
    for archive in (source, wheel):
        if archive.stat().st_size > LARGEST:
            yield f"{archive.name} has {archive.stat().st_size / 1e6:.0f} MB; the package index takes 100."
    with zipfile.ZipFile(wheel) as archive:
        if archive.testzip() is not None:
            yield f"{wheel.name} is damaged."
    try:
        call(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    except ValueError as error:
        yield str(error)


def interpreter(version: str) -> Path | None:
    """A Python of this version: on the path, or of pyenv."""
    found = shutil.which(f"python{version}")
    if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
        return Path(found)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next(iter(sorted(root.glob(f"versions/{version}.*/bin/python"))), None)


def lowest(wheel: Path, extra: str = "") -> list[str]:
    """The dependencies of a wheel without extras, or those of one extra, each at its lower bound."""
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    end = f'; extra == "{extra}"' if extra else ""
    found = re.findall(rf"^Requires-Dist: ([\w.-]+)[^;\n]*?>=([\w.]+)[^;\n]*{end}$", record, re.MULTILINE)
    return [f"{name}=={bound}" for name, bound in found]


def tried(python: Path, wheel: Path, pins: list[str]) -> str:
    """Install a wheel into an empty environment and search with it; what was installed. Raises ValueError."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "venv")
        call(python, "-m", "venv", place)
        pip = [place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check"]
        call(*pip, "install", "--no-cache-dir", wheel, *pins)
        call(*pip, "check")
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        options = {"cwd": folder, "env": {**clean, "HF_HUB_OFFLINE": "1", "XDG_DATA_HOME": folder, "HF_HOME": folder}}
        seps = place / "bin/seps"
        version = wheel.name.split("-")[1]
        if call(seps, "--version", **options).strip() != f"seps {version}":
            raise ValueError(f"seps --version does not print {version}")
        if not json.loads(call(seps, "doctor", "--json", **options))["ok"]:
            raise ValueError("seps doctor reports a problem")
        where = Path(call(place / "bin/python", "-c", "import seps; print(seps.__file__)", **options).strip())
        for model in ("base", "mini"):
            if model == "mini":  # the extra joins what is there
                more = lowest(wheel, "torch") if pins else []
                call(*pip, "install", "--no-cache-dir", f"{wheel}[torch]", *pins, *more)
                call(*pip, "check")
            command = [seps, "find", "a dog running in a field", where.parent / "assets/gallery", "--model", model]
            hits = json.loads(call(*command, "--json", "-k", "1", **options))
            first = (hits["hits"] if isinstance(hits, dict) else hits)[0]["path"]
            if Path(first).name != "dog-running-field.jpg":
                raise ValueError(f"{model} finds {first}")
        listed = json.loads(call(place / "bin/python", "-m", "pip", "list", "--format", "json"))
        named = {pin.partition("==")[0].lower() for pin in pins} or {"torch", "numpy", "pillow", "pylance", "pyarrow"}
        return ", ".join(f"{each['name']} {each['version']}" for each in listed if each["name"].lower() in named)


def main() -> int:
    """Build, check, test; print what to run next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="*", default=PYTHONS, help="versions to test with (default: %(default)s)")
    parser.add_argument("--lowest", action="store_true", help="test the lowest versions as well, on the lowest Python")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the archives (default: dist)")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as tree:
            tracked(Path(tree))
            source, wheel = build(Path(tree), options.out.resolve())
    except ValueError as error:
        sys.exit(f"The archives cannot be built: {error}")
    wrong = list(problems(source, wheel))
    for archive in (source, wheel):
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        print(f"{archive.name}  {archive.stat().st_size / 1e6:.1f} MB  sha256 {digest}", flush=True)
    for version in options.pythons:
        python = interpreter(version)
        if python is None:
            print(f"Python {version} is not on this machine: not tested.")
            continue
        for pins in ([], lowest(wheel)) if options.lowest and version == PYTHONS[0] else ([],):
            what = f"Python {version}, {'lowest' if pins else 'newest'} versions"
            try:
                print(f"{what}: works with {tried(python, wheel, pins)}", flush=True)
            except ValueError as error:
                wrong.append(f"{what}: {error}")
    if home_of(ROOT) is None:
        print("pyproject.toml has no URL `Source` yet: the README of the archives has no links into the repository.")
    print("\n".join(wrong) or f"All checks passed. To upload: python -m twine upload {source} {wheel}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
