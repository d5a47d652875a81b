"""What patterns leave out: as git reads them, counted by reason, kept in the store and not found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import mentions, naming
from seps.cli.main import main
from seps.images.sources import DataError
from seps.photos.indexing.gallery import HIDDEN, walk
from seps.photos.indexing.ignoring import BY_FILE, BY_OPTION, IGNORE_FILE, option_rules, why_excluded
from seps.photos.indexing.maintenance import verify
from seps.photos.search.searcher import Searcher
from seps.photos.store.store import Store
from stores import gallery, index, model, model_folder, paint

CASES = json.loads((Path(__file__).parents[2] / "golden" / "gitignore.json").read_text())
"""Files and folders, and lines of an ignore file in one of the folders with the files that git then leaves out."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for place in CASES["files"]:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(b"")
    return root


def test_patterns_mean_what_git_says(tree: Path) -> None:
    assert len(CASES["cases"]) == 400
    for inner, lines, left_out in CASES["cases"]:
        file = tree / inner / IGNORE_FILE
        file.write_text("\n".join(lines) + "\n")
        found = {image.path for image in walk(tree).images}
        file.unlink()
        assert sorted(set(CASES["files"]) - found) == left_out, (inner, lines)


def test_bad_patterns_are_sentences(tmp_path: Path) -> None:
    for bad in ("", "# a comment", "/", "   "):
        with pytest.raises(DataError, match="nothing"):
            option_rules([bad])
    with pytest.raises(DataError, match=naming("[z-a]")):
        option_rules(["[z-a]"])
    folder = gallery(tmp_path / "g", 2)
    (folder / IGNORE_FILE).write_text("[z-a]\nsub/\n")
    found = walk(folder)
    assert [problem.name for problem in found.problems] == [IGNORE_FILE] and "line 1" in found.problems[0].why
    assert [image.path for image in found.images] == ["p00.jpg"]


@given(st.text(max_size=12), st.text("ab/.", min_size=1, max_size=8))
def test_any_pattern_is_read_or_refused(pattern: str, place: str) -> None:
    try:
        rules = option_rules([pattern])
    except DataError:
        return
    assert why_excluded(rules, place, False) in (None, BY_OPTION)


def test_an_ignore_file_that_cannot_be_read_shows_nothing_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = gallery(tmp_path / "g", 12), tmp_path / "s"
    index(folder, store)
    (folder / "sub" / IGNORE_FILE).mkdir()  # a folder of that name cannot be read as a file, whoever the user is
    found = walk(folder)
    assert {image.path for image in found.images} >= {"sub/p01.jpg"}  # a folder is no ignore file
    (folder / "sub" / IGNORE_FILE).rmdir()
    (folder / "sub" / IGNORE_FILE).write_text("private/\n")

    def read(path: Path) -> bytes:
        if path.exists():
            raise PermissionError(13, "Permission denied", str(path))
        raise FileNotFoundError(2, "No such file", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("seps.photos.indexing.ignoring.read_regular", read)
        report = index(folder, store)
    assert (report.deleted, report.kept, report.excluded) == (0, 6, 0)
    assert [problem.name for problem in report.problems] == [f"sub/{IGNORE_FILE}"]


def test_hidden_and_system_folders_are_skipped_by_default(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    places = (".git", "@eaDir", ".thumbnails", "$RECYCLE.BIN", "System Volume Information", "__MACOSX", "node_modules")
    for number, name in enumerate(places):
        paint(folder / "sub" / name / "x.jpg", 60 + number)
    found = walk(folder)
    assert [image.path for image in found.images] == ["p00.jpg", "sub/p01.jpg"]
    assert found.skipped[HIDDEN] == sorted(f"sub/{name}" for name in places)


def found_by(store: Path) -> set[str]:
    searcher = Searcher(store, model_folder())
    found = {hit.path for hit in searcher.search("a dog", k=50)}
    assert found == {hit.path for hit in searcher.search("a dog", k=50, exact=True)}
    return found


def test_what_is_excluded_later_is_not_found_and_comes_back(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 8, described=8), tmp_path / "s"
    index(folder, store)
    everything = found_by(store)
    report = index(folder, store, exclude=("sub/",))
    assert (report.excluded, report.deleted, report.unchanged) == (4, 0, 4)
    assert report.skipped[BY_OPTION] == ["sub"]
    assert found_by(store) == {name for name in everything if not name.startswith("sub/")}
    # words of descriptions find nothing of it either
    assert not any(
        hit.path.startswith("sub/") for hit in Searcher(store, model_folder()).search("number 1 3 5 7", k=50)
    )
    assert len(Store.open(store)) == 8 and verify(Store.open(store)) == []
    report = index(folder, store, exclude=("sub/",))  # again: the same
    assert (report.excluded, report.unchanged) == (4, 4)
    report = index(folder, store)
    assert (report.new, report.changed, report.unchanged, report.excluded) == (0, 0, 8, 0)
    assert found_by(store) == everything


def test_prune_deletes_what_is_excluded(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 8), tmp_path / "s"
    index(folder, store)
    index(folder, store, exclude=("sub/",))
    assert index(folder, store, exclude=("sub/",), prune=True).deleted == 4
    assert len(Store.open(store)) == 4 and Store.open(store).settings.excluded == 0


def test_an_ignore_file_that_ignores_everything_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = gallery(tmp_path / "g", 6), tmp_path / "s"
    call = ["index", str(folder), "--store", str(store), "--model", model_folder()]
    assert main(call) == 0
    everything = found_by(store)
    (folder / IGNORE_FILE).write_text("*\n")
    capsys.readouterr()
    assert main(call) == 0
    told = capsys.readouterr()
    assert mentions(told.err, "6", "pictures")
    assert f"{BY_FILE} (p00.jpg" in told.err and "pictures" in told.err
    assert "Search it" not in told.out
    assert found_by(store) == set() and len(Store.open(store)) == 6
    (folder / IGNORE_FILE).unlink()
    assert main(call) == 0
    assert found_by(store) == everything


def test_descriptions_of_what_is_excluded_are_no_fault(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 6, described=6)
    report = index(folder, tmp_path / "s", exclude=("sub/",), strict=True)
    assert (report.new, report.described, report.description_problems) == (3, 3, [])


def test_a_new_store_of_a_folder_that_is_all_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gallery(tmp_path / "g", 2)
    call = ["index", str(folder), "--store", str(tmp_path / "s"), "--model", model_folder(), "--exclude", "*.jpg"]
    assert main([*call, "--exclude", "sub"]) == 0
    assert "pictures" in capsys.readouterr().err


def test_the_confidence_is_that_of_what_can_be_found(tmp_path: Path) -> None:
    """Leaving pictures out calibrates anew, and leaving out all of them does not fail."""
    folder, store = gallery(tmp_path / "g", 3), tmp_path / "s"
    index(folder, store, bank=True)
    index(folder, store, bank=True, exclude=("*",))
    assert Searcher(store, model_folder()).search("a dog") == []
    index(folder, store, bank=True, exclude=("sub",))
    left = Store.open(store).settings.calibration
    shutil.rmtree(folder / "sub")
    index(folder, tmp_path / "t", bank=True)
    alone = Store.open(tmp_path / "t").settings.calibration
    assert {**left, "images": 0} == {**alone, "images": 0}


def test_a_picture_that_moves_out_of_an_excluded_folder_is_found(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 4), tmp_path / "s"
    index(folder, store)
    (folder / IGNORE_FILE).write_text("/sub/\n")
    index(folder, store)
    os.replace(folder / "sub" / "p01.jpg", folder / "moved.jpg")
    report = index(folder, store)
    assert report.moved == 1 and "moved.jpg" in found_by(store)


def test_an_open_searcher_follows_what_others_exclude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings were those of the start: a service went on finding pictures that had been excluded, and could not open
    those of a folder that had been added."""
    from datetime import timedelta

    monkeypatch.setattr("seps.photos.store.store._FRESH", timedelta(0))
    folder, place = gallery(tmp_path / "g", 6), tmp_path / "s"
    index(folder, place)
    searcher = Searcher(place, model())
    assert len(searcher.search("a dog", 20)) == 6
    index(folder, place, exclude=["sub/*"])
    kept = {hit.path for hit in searcher.search("a dog", 20)}
    assert kept and not any(path.startswith("sub/") for path in kept)
    assert searcher.store.settings.excluded == 6 - len(kept)
    assert searcher.calibration == Searcher(place, model()).calibration
    further = gallery(tmp_path / "h", 2)
    index(further, place, exclude=["sub/*"], add=True)
    new = [hit for hit in searcher.search("a dog", 20) if hit.path.startswith("/")]
    assert new and all(searcher.image_source({"path": hit.path, "member": None}).path.is_file() for hit in new)
    searcher.close()
