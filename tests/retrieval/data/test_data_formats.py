"""Records, the JSONL format and the published layout, with the faults users make in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import naming
from seps.images.sources import DataError, ImageSource
from seps.retrieval.data import (
    ImageRecord,
    RetrievalDataset,
    attach_dense,
    load_data,
    load_jsonl,
    load_published,
    save_jsonl,
)


def write_lines(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def record(name: str, *captions: str, dense: str | None = None) -> ImageRecord:
    return ImageRecord(name, ImageSource(Path(name)), captions, dense)


def dataset() -> RetrievalDataset:
    return RetrievalDataset((record("a", "a1", "a2", dense="A"), record("b", "b1"), record("c", "c1", "c2", "c3")))


def test_captions_are_numbered_image_by_image() -> None:
    data = dataset()
    assert data.captions == ["a1", "a2", "b1", "c1", "c2", "c3"]
    assert data.image_of_caption.tolist() == [0, 0, 1, 2, 2, 2]
    assert data.image_of_caption.dtype == torch.int64
    assert data.dense == ["A", None, None]
    assert len(data) == 3
    assert data.caption(2, 1) == "c2"


def test_subset_carries_captions_and_dense_text_with_the_image() -> None:
    data = dataset().subset([2, 0])
    assert [r.id for r in data.records] == ["c", "a"]
    assert data.dense == [None, "A"]
    assert data.image_of_caption.tolist() == [0, 0, 0, 1, 1]


def test_empty_dataset_has_no_captions() -> None:
    assert RetrievalDataset(()).image_of_caption.shape == (0,)


def test_dense_text_per_caption_is_refused() -> None:
    with pytest.raises(DataError, match="description"):
        ImageRecord("a", ImageSource(Path("a")), ("x", "y"), ["dx", "dy"])  # type: ignore[arg-type]


def test_caption_ids_are_one_per_caption() -> None:
    with pytest.raises(DataError, match=naming("2", "captions")):
        replace(record("a", "x", "y"), caption_ids=("1",))


def test_jsonl_reads_files_shards_and_any_script(tmp_path: Path) -> None:
    name = "写真/кот قطة 🐈.jpg"
    path = write_lines(
        tmp_path / "dev.jsonl",
        {"image": name, "captions": ["一匹の猫\u2028です", " قطة "], "dense": "Кот."},
        "",
        {"image": "./7.jpg", "shard": "s-0.tar", "captions": [], "id": 7, "license": "CC0"},
    )
    data = load_jsonl(path)
    assert data.records[0].id == name
    assert data.records[0].source == ImageSource(tmp_path.resolve() / name)
    assert data.records[0].captions == ("一匹の猫\u2028です", "قطة")
    assert data.records[1] == ImageRecord("7", ImageSource(tmp_path.resolve() / "s-0.tar", "7.jpg"), ())
    assert (data.name, data.split) == (tmp_path.name, "dev")


@pytest.mark.parametrize(
    "image",
    [
        "/etc/passwd",
        "../x.jpg",
        "a/../../x.jpg",
        "..",
        ".",
        "a/..",
        "link/x.jpg",
        "link.jpg",
        "a\0b",
        "x" * 70_000,
    ],
)
@pytest.mark.parametrize("key", ["image", "shard"])
def test_hostile_paths_are_refused_with_file_and_line(tmp_path: Path, image: str, key: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "x.jpg").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path)
    (root / "link.jpg").symlink_to(tmp_path / "x.jpg")
    good = {"image": "fine.jpg", "captions": ["fine"]}
    path = write_lines(root / "d.jsonl", good, {"image": "m.jpg", key: image, "captions": ["x"]})
    if len(image) > 60_000:  # not hostile to the root, and no file can have that name
        assert len(load_jsonl(path)) == 2
        return
    with pytest.raises(DataError, match=naming("d.jsonl", "line 2")):
        load_jsonl(path)


def test_a_neighbour_with_the_root_as_prefix_is_outside(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "database").mkdir()
    path = write_lines(tmp_path / "data/d.jsonl", {"image": "../database/x.jpg", "captions": ["x"]})
    with pytest.raises(DataError, match="leads"):
        load_jsonl(path)


def test_links_inside_the_root_and_an_image_root_are_fine(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "b.jpg").symlink_to(images / "a.jpg")
    (tmp_path / "text").mkdir()
    path = write_lines(tmp_path / "text/d.jsonl", {"image": "b.jpg", "captions": ["x"]})
    assert load_jsonl(path, images_root=images).records[0].source.path == images.resolve() / "a.jpg"


@pytest.mark.parametrize("member", ["/etc/passwd", "../a.jpg", "a/../../b.jpg"])
def test_hostile_members_are_refused(tmp_path: Path, member: str) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"image": member, "shard": "s.tar", "captions": ["x"]})
    with pytest.raises(DataError, match="line 1"):
        load_jsonl(path)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1]", "JSON"),
        ('{"captions": ["x"]}', 'no "image"'),
        ('{"image": 3, "captions": ["x"]}', "image"),
        ('{"image": "a.jpg"}', "captions"),
        ('{"image": "a.jpg", "captions": "x"}', "captions"),
        ('{"image": "a.jpg", "captions": ["x", 3]}', "caption 2"),
        ('{"image": "a.jpg", "captions": [" "]}', "caption 1"),
        ('{"image": "a.jpg", "captions": ["\\ud800"]}', "surrogate"),
        ('{"image": "\\ud800.jpg", "captions": ["x"]}', "surrogate"),
        ('{"image": "a.jpg", "captions": ["x"], "dense": ["d"]}', "text"),
        ('{"image": "a.jpg", "captions": ["x"], "id": true}', "id"),
        ('{"image": "a.jpg", "captions": ["x"], "caption_ids": [1, 2]}', "captions"),
        ('{"image": "a.jpg", "captions": ["x"], "caption_ids": 1}', "captions"),
        ('{"image": "a.jpg", "captions": ["x"], "caption_ids": [null]}', "caption"),
    ],
)
def test_malformed_lines_name_their_line(tmp_path: Path, line: str, what: str) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"image": "ok.jpg", "captions": ["ok"]}, line)
    with pytest.raises(DataError, match=r"d\.jsonl, line 2: ") as caught:
        load_jsonl(path)
    assert what in str(caught.value)


def test_wrong_encoding_missing_and_empty_files_give_sentences(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('\n{"image": "é.jpg", "captions": []}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=naming("line 2", "UTF-8")):
        load_jsonl(latin)
    with pytest.raises(DataError, match="file"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="images"):
        load_jsonl(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match="folder"):
        load_jsonl(latin, images_root=tmp_path / "nowhere")


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"image": "a.jpg", "captions": ["x"]}\r\n')
    assert load_jsonl(path).captions == ["x"]


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(str.strip).map(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, st.lists(texts, max_size=3), st.none() | texts), min_size=1, max_size=4))
def test_save_then_load_gives_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, list[str], str | None]]
) -> None:
    folder = tmp_path_factory.mktemp("round").resolve()
    sources = [ImageSource(folder / "x.jpg"), ImageSource(folder / "s.tar", "m/x.jpg")]
    records = tuple(
        ImageRecord(name, sources[k % 2], tuple(captions), dense, caption_ids=tuple(captions[::-1]) if k else ())
        for k, (name, captions, dense) in enumerate(rows)
    )
    data = RetrievalDataset(records, folder.name, "train")
    save_jsonl(data, folder / "train.jsonl")
    assert load_jsonl(folder / "train.jsonl") == data
    assert [p.name for p in folder.iterdir()] == ["train.jsonl"]


def test_save_refuses_images_outside_its_folder(tmp_path: Path) -> None:
    data = RetrievalDataset((ImageRecord("a", ImageSource(Path("/elsewhere/a.jpg")), ("x",)),))
    with pytest.raises(DataError, match="outside"):
        save_jsonl(data, tmp_path / "d.jsonl")
    assert not list(tmp_path.iterdir())


def test_attached_descriptions_are_bound_by_id_whatever_their_order(tmp_path: Path) -> None:
    lines = [{"image": "c", "text": "C"}, {"id": "elsewhere", "dense": "E"}, {"image": "b", "dense": "B"}]
    forward = attach_dense(dataset(), write_lines(tmp_path / "f.jsonl", *lines))
    backward = attach_dense(dataset(), write_lines(tmp_path / "b.jsonl", *lines[::-1]))
    assert forward.dense == backward.dense == ["A", "B", "C"]
    shuffled = attach_dense(dataset().subset([1, 2, 0]), tmp_path / "f.jsonl")
    assert shuffled.dense == ["B", "C", "A"]


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([{"image": "a", "text": "1"}, {"image": "a", "text": "2"}], "line 2"),
        ([{"text": "by position"}], 'line 1: no "image"'),
        ([{"image": "z", "text": "Z"}], "line"),
        ([{"image": "a", "dense": ["x"]}], "line 1"),
    ],
)
def test_attach_refuses_what_it_cannot_bind(tmp_path: Path, lines: list[Any], what: str) -> None:
    with pytest.raises(DataError, match=what):
        attach_dense(dataset(), write_lines(tmp_path / "d.jsonl", *lines))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Three images, the second with three captions, whose ids are neither sorted nor in one run each."""
    mapping = {"51": "one.jpg", "9": "sub/two.jpg", "97": "three.jpg", "1": "of_another_split.jpg"}
    (tmp_path / "id_mapping.json").write_text(json.dumps(mapping))
    (tmp_path / "test_ids.txt").write_text("51\n9\n51\n9\n97\n9\n97\n")
    (tmp_path / "test_caps.txt").write_text("o1\nt1\no2\nt2 a\u2028b\nh1\nt3\nh2\n", encoding="utf-8")
    write_lines(tmp_path / "f30k_test.jsonl", {"text": "ONE"}, {"text": "TWO"}, {"text": "THREE"})
    (tmp_path / "images").mkdir()
    return tmp_path


def load(folder: Path, name: str = "f30k") -> RetrievalDataset:
    return load_published(folder, "test", name, images_dir=folder / "images")


def test_published_layout_binds_descriptions_in_order_of_first_appearance(published: Path) -> None:
    data = load(published)
    assert [r.id for r in data.records] == ["51", "9", "97"]
    assert data.records[1].captions == ("t1", "t2 a\u2028b", "t3")
    assert data.dense == ["ONE", "TWO", "THREE"]
    assert data.records[1].source.path == published.resolve() / "images/sub/two.jpg"
    assert data.label == "f30k/test"


def test_published_caption_ids_follow_their_captions(published: Path) -> None:
    assert all(record.caption_ids == () for record in load(published).records)
    (published / "test_caption_ids.txt").write_text("11\n21\n12\n22\n31\n23\n32\n")
    assert [record.caption_ids for record in load(published).records] == [
        ("11", "12"),
        ("21", "22", "23"),
        ("31", "32"),
    ]


def test_published_images_may_lack_a_description(published: Path) -> None:
    write_lines(published / "f30k_test.jsonl", {"text": None}, {"text": " "}, {"text": "THREE"})
    assert load(published).dense == [None, None, "THREE"]
    (published / "f30k_test.jsonl").write_text('{"text": NaN}\n' * 3)
    with pytest.raises(DataError, match=naming("line 1", "float")):
        load(published)


def karpathy(folder: Path, *images: dict[str, Any]) -> Path:
    """A file of Karpathy's with the images, and those under `folder`/images."""
    every = []
    for image in images:
        file = folder / "images" / image.get("filepath", "") / image["filename"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        every.append({**image, "sentences": [{"raw": text, "sentid": 7} for text in image["sentences"]]})
    (folder / "dataset_x.json").write_text(json.dumps({"dataset": "x", "images": every}))
    return folder / "dataset_x.json"


def test_karpathys_files_are_read_by_split(tmp_path: Path) -> None:
    six = [f" caption {number}\n" for number in range(6)]
    file = karpathy(
        tmp_path,
        {"filename": "a.jpg", "split": "test", "sentences": six},
        {"filename": "COCO_1.jpg", "filepath": "val2014", "cocoid": 1, "split": "restval", "sentences": ["one"]},
        {"filename": "é 日本.jpg", "split": "train", "sentences": ["two", "three"]},
    )
    (record,) = load_data(f"{file}:test").records
    assert (record.id, record.captions, record.dense) == ("a.jpg", tuple(f"caption {i}" for i in range(5)), None)
    assert record.source.path == tmp_path.resolve() / "images" / "a.jpg" and not record.caption_ids
    both = load_data(f"{file}:train+restval")
    assert [record.id for record in both.records] == ["COCO_1.jpg", "é 日本.jpg"] and both.label == (
        "dataset_x/train+restval"
    )
    assert both.sources[0].path == tmp_path.resolve() / "images" / "val2014" / "COCO_1.jpg"
    with pytest.raises(DataError, match=naming("restval", "test", "train", "json:restval")):
        load_data(str(file))
    with pytest.raises(DataError, match=naming("dev", "restval", "test", "train")):
        load_data(f"{file}:dev")
    with pytest.raises(DataError, match="splits"):
        load_data(f"{write_lines(tmp_path / 'lines.json', {'image': 'a.jpg', 'captions': ['a']})}:test")
    file.write_text(file.read_text().replace("a.jpg", "../../a.jpg"))
    with pytest.raises(DataError, match=naming("image 1", "../../a.jpg")):
        load_data(f"{file}:test")
    file.write_text('{"images": [{"split": "test", "filename": "a.jpg", "sentences": [{"tokens": []}]}]}')
    with pytest.raises(DataError, match=naming("image 1", "NoneType")):
        load_data(f"{file}:test")
    for wrong in ('["a cat"]', '{"raw": "a cat"}', "{}", '"a cat"', "null"):
        file.write_text('{"images": [{"split": "test", "filename": "a.jpg", "sentences": ' + wrong + "}]}")
        with pytest.raises(DataError, match=naming("image 1", "sentences", "raw")):
            load_data(f"{file}:test")


def test_published_without_its_jsonl_has_no_dense_text(published: Path) -> None:
    assert load(published, "coco").dense == [None, None, None]


def test_published_accepts_a_description_per_caption_only_if_they_agree(published: Path) -> None:
    per_caption = [{"text": t} for t in ("ONE", "TWO", "ONE", "TWO", "THREE", "TWO", "THREE")]
    write_lines(published / "f30k_test.jsonl", *per_caption)
    assert load(published).dense == ["ONE", "TWO", "THREE"]
    write_lines(published / "f30k_test.jsonl", *per_caption[:-1], {"text": "OTHER"})
    with pytest.raises(DataError, match="description 7: image '97'"):
        load(published)


def test_published_ids_named_once_stand_for_five_captions_in_a_row(published: Path) -> None:
    (published / "test_ids.txt").write_text("97\n51\n9\n")
    (published / "test_caps.txt").write_text("".join(f"{image}{i}\n" for image in "hot" for i in range(5)))
    data = load(published)
    assert [r.id for r in data.records] == ["97", "51", "9"] and data.dense == ["ONE", "TWO", "THREE"]
    assert [r.captions for r in data.records] == [tuple(f"{image}{i}" for i in range(5)) for image in "hot"]
    (published / "test_ids.txt").write_text("97\n51\n51\n")  # a list by caption, of another release
    with pytest.raises(DataError, match=naming("3", "15", "5")):
        load(published)


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("test_ids.txt", "51\n9\n", naming("2", "test_caps.txt", "7")),
        ("test_ids.txt", "51\n9\n51\n9\n98\n9\n98\n", "'98'"),
        ("test_ids.txt", "51\n9\n\n9\n97\n9\n97\n", "line 3: blank"),
        ("test_caps.txt", "o1\nt1\n\nt2\nh1\nt3\nh2\n", "test_caps.txt, line 3"),
        ("f30k_test.jsonl", '{"text": "x"}\n' * 5, naming("5", "3", "7")),
        ("f30k_test.jsonl", '{"caption": "x"}\n' * 3, "line 1"),
        ("id_mapping.json", '{"51": "../../etc/passwd", "9": "a", "97": "b"}', "leads"),
        ("id_mapping.json", "[", "JSON"),
        ("test_caption_ids.txt", "1\n2\n3\n", naming("3", "7")),
        ("test_caption_ids.txt", "1\n2\n\n4\n5\n6\n7\n", "line 3: blank"),
        ("id_mapping.json", "[]", "object"),
    ],
)
def test_published_faults_are_sentences(published: Path, file: str, content: str, what: str) -> None:
    (published / file).write_text(content)
    with pytest.raises(DataError, match=what):
        load(published)


def test_published_refuses_splits_that_are_paths(published: Path) -> None:
    with pytest.raises(DataError, match="split"):
        load_published(published, "../test", images_dir=published)
