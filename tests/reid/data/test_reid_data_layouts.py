"""Each published folder tree in miniature, the generic layout, and what is wrong with files."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from messages import mentions, naming
from seps.reid.data import ReidDataError, ReidDataset, ReidRecord, Source, holdout, load, read_record


def picture(path: Path, value: int, size: tuple[int, int] = (8, 16), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(path)


def rgbnt201(root: Path, names: dict[str, Iterable[str]] | None = None) -> Path:
    names = names or {
        "train_171": [f"{pid:06d}_cam{cam}_0_0{shot}" for pid in (7, 3, 12) for cam in (1, 2) for shot in (0, 1)],
        "test": [f"{pid:06d}_cam{cam}_0_00" for pid in (20, 21) for cam in (1, 4)],
    }
    for split, stems in names.items():
        for stem in stems:
            for modality in ("RGB", "NI", "TI"):
                picture(root / split / modality / f"{stem}.jpg", int(stem[:6]))
    return root


def rgbnt100(root: Path) -> Path:
    for split, pids in (("bounding_box_train", (1, 2)), ("query", (5, 6)), ("bounding_box_test", (5, 6))):
        for pid in pids:
            for camera in (1, 2):
                strip = np.zeros((128, 768, 3), dtype=np.uint8)
                strip[:, :256], strip[:, 256:512], strip[:, 512:] = 40, 120, 200
                path = root / "rgbir" / split / f"{pid:04d}_c{camera}_000{camera}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(strip).save(path)
    return root


def msvr310(root: Path) -> Path:
    for split, pids in (("bounding_box_train", (1, 2)), ("query3", (9,)), ("bounding_box_test", (9, 10))):
        for pid in pids:
            for scene in (3, 45):
                for folder in ("vis", "ni", "th"):
                    name = f"{pid:04d}_s{scene:03d}_v{pid % 8}_001.jpg"
                    picture(root / split / f"{pid:04d}" / folder / name, pid * 9)
    return root


def generic(root: Path, modalities: tuple[str, ...] = ("RGB", "NI", "TI")) -> Path:
    for split, pids in (("train", (4, 1, 2, 3)), ("query", (8,)), ("gallery", (8, 9))):
        for pid in pids:
            for camera in (1, 2, 3):
                for modality in modalities:
                    picture(root / split / modality / f"{pid:04d}_c{camera}_s{pid % 2}_001.jpg", pid)
    return root


def facts(records: tuple[ReidRecord, ...]) -> list[tuple[int, int, int]]:
    return [(record.pid, record.camid, record.sceneid) for record in records]


def test_rgbnt201_reads_both_splits_and_sorts_labels(tmp_path: Path) -> None:
    dataset = load("RGBNT201", rgbnt201(tmp_path))
    assert dataset.modalities == ("RGB", "NI", "TI") and dataset.excludes == "camera"
    assert dataset.identities == (3, 7, 12)
    assert dataset.train_labels == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert dataset.query is dataset.gallery or dataset.query == dataset.gallery
    assert facts(dataset.query) == [(20, 1, -1), (20, 4, -1), (21, 1, -1), (21, 4, -1)]
    assert dataset.cameras == (1, 2, 4)
    assert dataset.camera_indices(dataset.query) == [0, 2, 0, 2]
    assert dataset.report.counts == {} and dataset.report.shots == {"train": 12, "query": 4, "gallery": 4}


def test_labels_do_not_depend_on_the_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = rgbnt201(tmp_path)
    expected = load("rgbnt201", root)
    listing = Path.iterdir

    def shuffled(self: Path) -> Iterable[Path]:
        paths = sorted(listing(self))
        random.Random(3).shuffle(paths)
        return iter(paths)

    monkeypatch.setattr(Path, "iterdir", shuffled)
    again = load("rgbnt201", root)
    assert again.train == expected.train and again.train_labels == expected.train_labels


def test_rgbnt100_splits_the_strip_into_thirds(tmp_path: Path) -> None:
    dataset = load("rgbnt100", rgbnt100(tmp_path), verify_files=True)
    assert facts(dataset.query) == [(5, 1, -1), (5, 2, -1), (6, 1, -1), (6, 2, -1)]
    pixels = read_record(dataset.train[0], dataset.modalities, (128, 256))
    assert pixels.shape == (3, 3, 128, 256)
    assert [plane.unique().tolist() for plane in pixels] == [[40], [120], [200]]
    swapped = read_record(dataset.train[0], ("TI", "RGB"), (16, 8))
    assert [plane.unique().tolist() for plane in swapped] == [[200], [40]]


def test_rgbnt100_leaves_junk_out_and_reports_a_strip_that_does_not_split(tmp_path: Path) -> None:
    root = rgbnt100(tmp_path)
    picture(root / "rgbir/bounding_box_test/-1_c1_0001.jpg", 3, (768, 128))
    picture(root / "rgbir/bounding_box_test/0005_c3_0001.jpg", 3, (700, 128))
    dataset = load("rgbnt100", root, verify_files=True, on_problem="skip")
    assert dataset.report.junk == 1 and dataset.report.counts == {"wrong_shape": 1}
    assert len(dataset.gallery) == 4
    # Without that check, reading refuses it: a picture of one sensor among the strips was cut into three.
    everything = load("rgbnt100", root)
    odd = next(shot for shot in everything.gallery if shot.camid == 3)
    for modalities in (everything.modalities, ("NI", "TI")):
        with pytest.raises(ReidDataError, match=naming("0005_c3_0001.jpg", "700", "verify_files")):
            read_record(odd, modalities, (16, 8))


def test_msvr310_reads_scene_and_view(tmp_path: Path) -> None:
    dataset = load("msvr310", msvr310(tmp_path))
    assert dataset.excludes == "scene" and dataset.identities == (1, 2)
    assert facts(dataset.query) == [(9, 1, 3), (9, 1, 45)]
    assert facts(dataset.gallery) == [(9, 1, 3), (9, 1, 45), (10, 2, 3), (10, 2, 45)]
    assert dataset.query[0].sources["TI"].path.parent.name == "th"


def test_generic_layout_by_pattern_discovers_modalities(tmp_path: Path) -> None:
    dataset = load("generic", generic(tmp_path, ("depth", "TI", "RGB")))
    assert dataset.modalities == ("RGB", "TI", "depth")
    assert facts(dataset.query) == [(8, 1, 0), (8, 2, 0), (8, 3, 0)]
    two = load("generic", tmp_path, modalities=("TI", "RGB"), pattern=r"(?P<pid>\d+)_c(?P<camid>\d)")
    assert two.modalities == ("TI", "RGB") and two.query[0].sceneid == -1


def test_generic_layout_with_one_test_folder(tmp_path: Path) -> None:
    generic(tmp_path)
    (tmp_path / "query").rename(tmp_path / "test")
    dataset = load("generic", tmp_path)
    assert facts(dataset.query) == facts(dataset.gallery) == [(8, 1, 0), (8, 2, 0), (8, 3, 0)]


def test_generic_layout_by_table(tmp_path: Path) -> None:
    for split in ("train", "query", "gallery"):
        for name in ("a", "b"):
            for modality in ("RGB", "TI"):
                picture(tmp_path / split / modality / f"{name}.png", 9)
    (tmp_path / "labels.csv").write_text(
        "name,pid,camid,sceneid,split\na.png,5,1,2,train\na,6,1,2,query\na,6,1,,gallery\nb.png,6,2,,\n"
    )
    dataset = load("generic", tmp_path, labels="labels.csv")
    assert facts(dataset.train) == [(5, 1, 2), (6, 2, -1)]
    assert facts(dataset.gallery) == [(6, 1, -1), (6, 2, -1)]
    assert dataset.report.shared_identities == 1


def test_rows_without_an_image_are_named(tmp_path: Path) -> None:
    """A shot whose files are gone in every modality leaves no trace in the folders, only in the table."""
    for split in ("train", "query", "gallery"):
        for modality in ("RGB", "TI"):
            picture(tmp_path / split / modality / "a.png", 9)
    rows = ["a,5,1,", "b.png,5,2,train", "c,6,2,", "a,5,1,trian"]
    (tmp_path / "labels.csv").write_text("\n".join(["name,pid,camid,split", *rows]))
    dataset = load("generic", tmp_path, labels="labels.csv", on_problem="skip")
    assert dataset.report.counts == {"missing_file": 3}
    told = [str(problem) for problem in dataset.report.problems]
    assert ["line 3" in told[0], "line 4" in told[1], "line 5" in told[2], "trian" in told[2]] == [True] * 4
    with pytest.raises(ReidDataError, match="train"):
        load("generic", tmp_path, labels="labels.csv")
    # A split that does not exist was told of only where no image had the name; the images were said to have bad names.
    (tmp_path / "labels.csv").write_text("name,pid,camid,split\na,5,1,Train\na,5,1,query\na,5,1,gallery\n")
    with pytest.raises(ReidDataError) as caught:
        load("generic", tmp_path, labels="labels.csv")
    assert mentions(str(caught.value), "2", "Train")
    assert mentions(str(caught.value), "train/RGB/a.png", "labels.csv")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, listing = generic(tmp_path), Path.iterdir

    def failing(self: Path) -> Iterable[Path]:
        if self.name == "NI" and self.parent.name == "gallery":
            raise OSError(5, "Input/output error")
        return listing(self)

    monkeypatch.setattr(Path, "iterdir", failing)
    with pytest.raises(ReidDataError, match=naming("gallery/NI", "Input/output")):
        load("generic", root, on_problem="skip")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("name,pid\na,1\n", "columns"),
        ("name,pid,camid\na,x,1\n", naming("2", "numbers")),
        ("name,pid,camid\na,1,1\na.jpg,2,1\n", "line 3.*twice"),
        ("name,pid,camid\na\n", naming("2", "numbers")),
        ("name,pid,camid\n\udcff,1,1\n", "UTF-8"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, table: str, message: str) -> None:
    generic(tmp_path)
    (tmp_path / "labels.csv").write_bytes(table.encode("utf-8", "surrogateescape"))
    with pytest.raises(ReidDataError, match=message):
        load("generic", tmp_path, labels="labels.csv", on_problem="skip")


def test_every_problem_is_named_counted_and_skipped_or_refused(tmp_path: Path) -> None:
    root = generic(tmp_path)
    (root / "train/NI/0004_c1_s0_001.jpg").unlink()
    picture(root / "train/RGB/holiday.jpg", 1)
    picture(root / "train/NI/holiday.jpg", 1)
    picture(root / "train/TI/holiday.jpg", 1)
    picture(root / "train/TI/0003_c1_s1_001.png", 1)
    cut = root / "gallery/TI/0009_c2_s1_001.jpg"
    cut.write_bytes(cut.read_bytes()[:-40])
    (root / "gallery/TI/0009_c3_s1_001.jpg").write_bytes(b"")
    (root / "train/RGB/.DS_Store").write_bytes(b"x")
    with pytest.raises(ReidDataError, match="no NI image") as refused:
        load("generic", root, verify_files=True)
    assert "0004_c1_s0_001" in str(refused.value) and "on_problem='skip'" in str(refused.value)
    dataset = load("generic", root, verify_files=True, on_problem="skip")
    assert dataset.report.counts == {
        "missing_modality": 1,
        "unparsable_name": 1,
        "duplicate_name": 1,
        "undecodable": 2,
    }
    paths = {problem.path for problem in dataset.report.problems}
    assert "gallery/TI/0009_c2_s1_001.jpg" in paths and "train/RGB/holiday.jpg" in paths
    assert len(dataset.train) == 11 and len(dataset.gallery) == 4
    unchecked = load("generic", root, on_problem="skip")
    assert len(unchecked.gallery) == 6
    with pytest.raises(ReidDataError, match="0009_c2_s1_001"):
        read_record(unchecked.gallery[-2], unchecked.modalities, (16, 8))


def test_wrong_calls_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReidDataError, match=r"rgbnt201.*generic"):
        load("market", tmp_path)
    with pytest.raises(ReidDataError, match="folder"):
        load("rgbnt201", tmp_path / "nowhere")
    with pytest.raises(ReidDataError, match="train_171"):
        load("rgbnt201", tmp_path)
    root = generic(tmp_path / "g")
    with pytest.raises(ReidDataError, match="camid"):
        load("generic", root, pattern=r"(?P<pid>\d+)")
    with pytest.raises(ReidDataError, match="expression"):
        load("generic", root, pattern="(")
    with pytest.raises(ReidDataError, match="generic"):
        load("rgbnt100", root, pattern=r"(?P<pid>\d+)")
    (root / "train" / "notes").mkdir()
    with pytest.raises(ReidDataError, match=naming("query/notes", "train/", "--data.modalities")):
        load("generic", root)
    (root / "train" / "notes").rmdir()
    with pytest.raises(ReidDataError, match="usable"):
        load("generic", root, pattern=r"x(?P<pid>\d+)(?P<camid>\d+)", on_problem="skip")


def shots(cameras_of: dict[int, tuple[int, ...]]) -> tuple[ReidRecord, ...]:
    source = {"RGB": Source(Path("a")), "TI": Source(Path("b"))}
    return tuple(ReidRecord(source, pid, camera, 10 * camera) for pid, cams in cameras_of.items() for camera in cams)


def test_holdout_takes_whole_identities_that_can_be_matched() -> None:
    train = shots({pid: ((1, 2) if pid % 2 else (1, 1)) for pid in range(20)})
    dataset = ReidDataset("x", ("RGB", "TI"), train, shots({90: (1,)}), shots({90: (2,)}))
    fit, dev = holdout(dataset, 0.25, seed=4)
    held = {record.pid for record in dev.query}
    assert len(held) == 5 and all(pid % 2 for pid in held)
    assert held.isdisjoint(fit.identities) and held | set(fit.identities) == set(range(20))
    assert dev.query == dev.gallery and dev.train == () and fit.query == dataset.query
    assert fit.train_labels == tuple(sorted(fit.train_labels)) and max(fit.train_labels) == 14
    assert {r.pid for r in holdout(dataset, 5, seed=4)[1].query} == held
    assert {r.pid for r in holdout(dataset, 5, seed=5)[1].query} != held
    for part, message in ((11, "only 10"), (0, "fraction"), (1.5, "fraction"), (True, "fraction")):
        with pytest.raises(ReidDataError, match=message):
            holdout(dataset, part, seed=0)
    one_camera = replace(dataset, train=shots(dict.fromkeys(range(20), (1, 1))))
    with pytest.raises(ReidDataError, match=naming("0", "20", "data.holdout 0", "train.eval_every")):
        holdout(one_camera, 1, seed=0)


def wmveid863(root: Path) -> Path:
    for split, pids in (("train", (1, 2)), ("query", (9,)), ("test", (9, 10))):
        for pid in pids:
            for camera, scene in ((1, 3), (2, 45)):
                for folder in ("vis", "ni", "th"):
                    picture(root / split / f"{pid:04d}" / folder / f"v{camera}_n1_s{scene:03d}_0001.jpg", pid * 9)
    return root


def market1501_mm(root: Path) -> Path:
    for split, pids in (("train", (2, 7)), ("query", (9,)), ("gallery", (9, 0, -1))):
        for pid in pids:
            for camera in (1, 6):
                for modality in ("RGB", "NI", "TI"):
                    picture(root / split / modality / f"{pid:04d}_c{camera}s1_000451_03.jpg", (pid + 1) * 9)
    return root


@pytest.mark.parametrize("name", ["WMVeID863", "MSVWild863"])
def test_wmveid863_takes_the_identity_from_the_folder(name: str, tmp_path: Path) -> None:
    dataset = load(name, wmveid863(tmp_path))
    tags = [(r.pid, r.camid, r.sceneid) for r in dataset.gallery]
    assert tags == [(9, 1, 3), (9, 2, 45), (10, 1, 3), (10, 2, 45)]
    assert dataset.identities == (1, 2) and len(dataset.query) == 2 and dataset.excludes == "camera"
    assert [s.path.parent.name for s in dataset.train[0].sources.values()] == ["vis", "ni", "th"]
    (tmp_path / "query" / "0009" / "th" / "v1_n1_s003_0001.jpg").unlink()
    with pytest.raises(ReidDataError, match="no TI image"):
        load(name, tmp_path)
    picture(tmp_path / "test" / "spare" / "vis" / "v1_a.jpg", 3)
    assert [p.kind for p in load(name, tmp_path, on_problem="skip").report.problems] == ["missing_modality"] * 2


def test_market1501_mm_leaves_junk_out_and_keeps_the_background(tmp_path: Path) -> None:
    dataset = load("market1501-MM", market1501_mm(tmp_path))
    assert [(r.pid, r.camid) for r in dataset.gallery] == [(0, 1), (0, 6), (9, 1), (9, 6)]
    assert dataset.report.junk == 2 and dataset.identities == (2, 7) and dataset.excludes == "camera"
