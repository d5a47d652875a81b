"""Several folders in one store: added, removed and brought back, away for a while; stores of one folder as before."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from messages import mentions, naming
from seps.cli.main import main
from seps.images.sources import DataError
from seps.photos.indexing.build import IndexOptions, IndexReport, index_folder, report_if_current
from seps.photos.indexing.maintenance import remove_root, status, verify
from seps.photos.search.explaining import find_image
from seps.photos.search.searcher import Searcher
from seps.photos.store.filters import Filters
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from stores import gallery, model, model_folder, paint


def index(folders: list[Path], store: Path, **options: object) -> IndexReport:
    settings = IndexOptions(**{"workers": 2, "bank": False, **options})  # type: ignore[arg-type]
    return index_folder(folders, store, model(), model_folder(), options=settings)


def two(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A store of the folders a, with pictures of the seeds 0 to 3, and b, with others; each has its descriptions."""
    a, b, store = gallery(tmp_path / "a", 4), tmp_path / "b", tmp_path / "s"
    for number in range(3):
        paint(b / f"q{number}.jpg", 40 + number)
    (b / "data.jsonl").write_text(json.dumps({"image": "q0.jpg", "dense": "The lighthouse of Peniche."}) + "\n")
    index([a, b], store)
    return a, b, store


def found_by(store: Path) -> set[str]:
    searcher = Searcher(store, model_folder())
    hits = searcher.search("a dog", k=50)
    assert {hit.path for hit in searcher.search("a dog", k=50, exact=True)} == {hit.path for hit in hits}
    return {str(searcher.image_source({"path": hit.path, "member": hit.member}).path) for hit in hits}


def files_of(*folders: Path) -> set[str]:
    return {str(path) for folder in folders for path in folder.rglob("*.jpg")}


def test_two_folders_are_found_together_with_the_scores_they_have_alone(tmp_path: Path) -> None:
    a, b, store = two(tmp_path)
    assert found_by(store) == files_of(a, b)
    assert verify(Store.open(store)) == []
    assert Store.open(store).settings.roots == (str(a), str(b))
    index([b], tmp_path / "alone")
    alone = {hit.sha256: hit.score for hit in Searcher(tmp_path / "alone", model_folder()).search("a dog", k=50)}
    together = {hit.sha256: hit.score for hit in Searcher(store, model_folder()).search("a dog", k=50)}
    assert {digest: together[digest] for digest in alone} == pytest.approx(alone, abs=1e-6)
    (best, *_) = Searcher(store, model_folder()).search("Peniche")  # the JSONL of the second folder is read, too
    assert best.path == str(b / "q0.jpg")


def test_each_folder_is_brought_up_to_date_alone_or_all_at_once(tmp_path: Path) -> None:
    a, b, store = two(tmp_path)
    paint(a / "new.jpg", 90)
    paint(b / "new.jpg", 91)
    report = index([a], store)
    assert (report.new, report.unchanged, report.deleted) == (1, 4, 0)
    report = index([], store)
    assert (report.new, report.unchanged) == (1, 8)
    (b / "new.jpg").unlink()
    assert index([b], store).deleted == 1
    assert found_by(store) == files_of(a, b)
    assert report_if_current([], store) is not None and report_if_current([b], store) is not None


def test_pictures_of_one_name_in_both_folders_are_two(tmp_path: Path) -> None:
    a, b = gallery(tmp_path / "a", 2), gallery(tmp_path / "b", 2)
    paint(b / "p00.jpg", 99)
    index([a, b], tmp_path / "s")
    assert len(Store.open(tmp_path / "s")) == 4
    searcher = Searcher(tmp_path / "s", model_folder())
    inside = searcher.search("a dog", k=9, filters=Filters(folder=str(b)))
    assert {hit.path for hit in inside} == {f"{b}/p00.jpg", f"{b}/sub/p01.jpg"}
    assert {hit.path for hit in searcher.search("a dog", k=9, filters=Filters(folder=str(a / "sub")))} == {
        "sub/p01.jpg"
    }
    for name in ("p00.jpg", str(a / "p00.jpg"), str(b / "p00.jpg")):
        assert find_image(searcher.store, name)
    assert find_image(searcher.store, str(b / "p00.jpg")) != find_image(searcher.store, str(a / "p00.jpg"))


def test_folders_of_a_store_are_named_as_filters_take_them(tmp_path: Path) -> None:
    _, b, store = two(tmp_path)
    searcher = Searcher(store, model_folder())
    assert searcher.store.folders() == [str(b), "sub"]
    for folder in searcher.store.folders():
        assert searcher.search("a dog", filters=Filters(folder=folder))
    remove_root(store, str(b))
    assert Store.open(store).folders() == ["sub"]


def test_a_service_goes_on_when_folders_join_and_pictures_are_excluded(tmp_path: Path) -> None:
    from seps.photos.store.rows import fixed_settings

    a, b, store = gallery(tmp_path / "a", 2), tmp_path / "b", tmp_path / "s"
    index([a], store)
    before = fixed_settings(Store.open(store).settings)
    paint(b / "x.jpg", 70)
    (b / "bad.jpg").write_bytes(b"no picture")
    index([a, b], store)
    remove_root(store, str(b))
    assert fixed_settings(Store.open(store).settings) == before


def test_a_store_of_one_folder_is_what_it_was(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 2)
    index([folder], tmp_path / "s")
    settings = Store.open(tmp_path / "s").settings
    assert (settings.root, settings.more_roots) == (str(folder), ())
    assert {row.path for row in Store.open(tmp_path / "s").known().values()} == {"p00.jpg", "sub/p01.jpg"}


def test_a_folder_joins_where_it_is_asked_to(tmp_path: Path) -> None:
    a, b, store = gallery(tmp_path / "a", 2), tmp_path / "b", tmp_path / "s"
    paint(b / "x.jpg", 70)
    index([a], store)
    with pytest.raises(StoreError, match=naming("/a", "/b", "--add")):
        index([b], store)
    assert Store.open(store).settings.roots == (str(a),)
    assert index([b], store, add=True).new == 1
    paint(tmp_path / "c" / "y.jpg", 71)
    assert index([a, tmp_path / "c"], store).new == 1  # named beside one that the store has
    assert found_by(store) == files_of(a, b, tmp_path / "c")


def test_folders_inside_each_other_and_folders_that_are_not_there(tmp_path: Path) -> None:
    a, b, store = two(tmp_path)
    for inner, outer in ((a / "sub", a), (tmp_path, b)):
        with pytest.raises(StoreError, match="twice"):
            index([inner], store, add=True)
        with pytest.raises(StoreError, match="twice"):
            index([outer, inner], tmp_path / "t")
    with pytest.raises(DataError, match="folder"):
        index([a, tmp_path / "nowhere"], store)
    assert not (tmp_path / "t").exists() and len(Store.open(store)) == 7
    assert index([a, a, Path(f"{a}/.")], store).unchanged == 4


def test_a_folder_that_is_away_keeps_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, store = two(tmp_path)
    os.replace(b, tmp_path / "away")
    for prune in (False, True):
        report = index([], store, prune=prune)
        assert (report.away, report.deleted, report.unchanged) == ([str(b)], 0, 4)
    with pytest.raises(DataError, match="folder"):
        index([b], store)
    assert main(["index", "--store", str(store), "--model", model_folder()]) == 0
    assert f"{b}" in capsys.readouterr().err
    b.mkdir()  # an empty place to mount the disk at
    with pytest.raises(StoreError, match="--prune"):
        index([], store)
    assert len(Store.open(store)) == 7
    b.rmdir()
    os.replace(tmp_path / "away", b)
    assert index([], store).unchanged == 7
    shutil.rmtree(a)
    shutil.rmtree(b)
    with pytest.raises(DataError, match="folders"):
        index([], store)
    assert len(Store.open(store)) == 7


def test_a_picture_moved_from_one_folder_to_the_other_is_no_loss(tmp_path: Path) -> None:
    a, b, store = two(tmp_path)
    for name in ("q0.jpg", "q1.jpg", "q2.jpg"):
        os.replace(b / name, a / name)
    report = index([], store)
    assert (report.moved, report.deleted) == (3, 3) and found_by(store) == files_of(a)


@pytest.mark.parametrize("first", [True, False])
def test_a_root_removed_by_mistake_comes_back_as_it_was(
    tmp_path: Path, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, store = two(tmp_path)
    before = {hit.path: hit.score for hit in Searcher(store, model_folder()).search("a dog", k=50)}
    gone, left, count = (a, b, 4) if first else (b, a, 3)
    command = ["index", "--store", str(store), "--model", model_folder()]
    assert main([*command, "--remove-root", str(gone)]) == 0
    said = capsys.readouterr().out
    assert mentions(said, count, gone)
    assert mentions(said, "seps index", gone, "--store", store, "--add")
    assert found_by(store) == files_of(left) and len(files_of(gone)) == count
    assert verify(Store.open(store)) == []
    assert index([], store).unchanged == 7 - count  # a run does not bring it back
    assert found_by(store) == files_of(left)
    (gone / "data.jsonl").unlink()  # what the store knew stays with it
    report = index([gone], store, add=True)
    assert (report.new, report.changed, report.unchanged) == (0, 0, count)
    assert {hit.path: hit.score for hit in Searcher(store, model_folder()).search("a dog", k=50)} == before
    assert status(Store.open(store))["folders"] == [str(a), str(b)]


def test_removing_asks_for_the_exact_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, store = two(tmp_path)
    for wrong in (a / "sub", tmp_path, "b"):
        assert main(["index", "--store", str(store), "--remove-root", str(wrong)]) == 2
        assert f"exactly: {a}, {b}" in capsys.readouterr().err
    assert len(Store.open(store)) == 7 and Store.open(store).settings.excluded == 0
    remove_root(store, str(a))
    with pytest.raises(StoreError, match="folder"):
        remove_root(store, str(b))
    assert main(["index", "--store", str(tmp_path / "none"), "--remove-root", str(a)]) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("first", [True, False])
def test_with_prune_a_removed_root_is_deleted_and_can_be_indexed_again(tmp_path: Path, first: bool) -> None:
    a, b, store = two(tmp_path)
    gone, left, count = (a, b, 4) if first else (b, a, 3)
    assert remove_root(store, str(gone), prune=True) == (str(gone), count)
    assert len(Store.open(store)) == 7 - count and Store.open(store).settings.roots == (str(left),)
    assert found_by(store) == files_of(left)
    assert index([gone], store, add=True).new == count and found_by(store) == files_of(a, b)


def test_moved_needs_one_folder(tmp_path: Path) -> None:
    a, b, store = two(tmp_path)
    os.replace(b, tmp_path / "c")
    with pytest.raises(StoreError, match="several"):
        index([tmp_path / "c"], store, moved=True)
    report = index([tmp_path / "c"], store, add=True)
    assert (report.moved, report.new) == (3, 0)
    remove_root(store, str(b), prune=True)
    assert found_by(store) == files_of(a, tmp_path / "c")


def test_a_path_out_of_the_folders_is_not_read(tmp_path: Path) -> None:
    *_, store = two(tmp_path)
    searcher = Searcher(store, model_folder())
    for bad in ("/etc/passwd", "../x.jpg", f"{tmp_path}/b/../s/writer.lock", f"{tmp_path}/bb/x.jpg"):
        with pytest.raises(StoreError, match="leads"):
            searcher.image_source({"path": bad, "member": None})


def test_descriptions_of_a_named_file_may_be_of_any_folder(tmp_path: Path) -> None:
    a, b, store = two(tmp_path)
    lines = [{"image": "p02.jpg", "dense": "A red kite."}, {"image": "q1.jpg", "dense": "A blue kite."}]
    lines.append({"image": "nowhere.jpg", "dense": "Nothing."})
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = IndexOptions(workers=2, bank=False, dense=[tmp_path / "more.jsonl"])
    report = index_folder([a, b], store, model(), model_folder(), options=settings)
    assert report.changed == 2
    assert [problem.name for problem in report.description_problems] == ["more.jsonl, line 3"]
