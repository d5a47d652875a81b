"""The synthetic set: the same bytes for a seed, disjoint identities, sensors that tell different things."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seps.reid.data import load
from seps.reid.data.texts import refuse_copies, with_texts
from seps.synthetic import Shot, SyntheticConfig, World, make_synthetic, plan_shots
from seps.synthetic.canvas import FIGURE, Canvas, Frame, Material
from seps.synthetic.people import ATTRIBUTES, paint_person
from seps.synthetic.truth import BLIND, truth
from seps.synthetic.words import texts_of, write_texts

SMALL = {"identities": 6, "images_per_identity": 5, "cameras": 3, "size": (64, 32)}


def fingerprint(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def config(**changes: object) -> SyntheticConfig:
    base = SyntheticConfig(40, 8, 4, 0, (128, 64), 0.4, 4, 0.5, 3.0, 90)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_same_seed_same_bytes_and_another_seed_other_bytes(tmp_path: Path) -> None:
    first = make_synthetic(tmp_path / "a", seed=3, **SMALL)  # type: ignore[arg-type]
    again = make_synthetic(tmp_path / "b", seed=3, **SMALL)  # type: ignore[arg-type]
    other = make_synthetic(tmp_path / "c", seed=4, **SMALL)  # type: ignore[arg-type]
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert first == again and first["sha256"] != other["sha256"]
    assert not list(tmp_path.glob("*.partial"))


def test_workers_do_not_change_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    seen: list[tuple[int, int]] = []
    alone = make_synthetic(tmp_path / "a", 8, 12, 2, size=(16, 16), progress=lambda *at: seen.append(at))
    assert seen == [(done, 96) for done in range(1, 97)]
    together = make_synthetic(tmp_path / "b", 8, 12, 2, size=(16, 16), workers=2)
    assert alone == together and fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_the_set_loads_and_train_and_test_identities_are_disjoint(tmp_path: Path) -> None:
    manifest = make_synthetic(tmp_path / "set", **SMALL)  # type: ignore[arg-type]
    dataset = load("generic", tmp_path / "set", verify_files=True)
    assert dataset.modalities == ("RGB", "NI", "TI") and dataset.report.shared_identities == 0
    assert dataset.report.shots == manifest["shots"] == {"train": 20, "query": 2, "gallery": 8}
    assert json.loads((tmp_path / "set/manifest.json").read_text()) == manifest
    for query in dataset.query:
        same = [r for r in dataset.gallery if r.pid == query.pid]
        assert any(record.camid != query.camid for record in same)


@pytest.mark.parametrize(("images", "cameras"), [(3, 2), (4, 6), (9, 2), (16, 4)])
def test_every_query_has_a_match_from_another_camera(images: int, cameras: int) -> None:
    plan = plan_shots(config(images_per_identity=images, cameras=cameras))
    assert len({shot.name for shot in plan}) == len(plan) == 40 * images
    train = {shot.identity for shot in plan if shot.split == "train"}
    queries = [shot for shot in plan if shot.split == "query"]
    assert {s.identity for s in queries}.isdisjoint(train) and len({s.identity for s in queries}) == 16
    for query in queries:
        assert any(s.split == "gallery" and s.identity == query.identity and s.camera != query.camera for s in plan)


def test_a_set_is_drawn_by_one_call_at_a_time(tmp_path: Path) -> None:
    """A second call removed the unfinished files of the first, which then could not write the next one."""
    refused: list[str] = []

    def again(done: int, count: int) -> None:
        if not refused:
            with pytest.raises(ValueError, match="process") as caught:
                make_synthetic(tmp_path / "set", **SMALL)  # type: ignore[arg-type]
            refused.append(str(caught.value))

    make_synthetic(tmp_path / "set", **SMALL, progress=again)  # type: ignore[arg-type]
    assert len(refused) == 1 and [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_finished_set_is_kept_and_another_folder_is_not_touched(tmp_path: Path) -> None:
    manifest = make_synthetic(tmp_path / "set", **SMALL)  # type: ignore[arg-type]
    stamp = (tmp_path / "set/manifest.json").stat().st_mtime_ns
    assert make_synthetic(tmp_path / "set", **SMALL) == manifest  # type: ignore[arg-type]
    assert (tmp_path / "set/manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="other parameters"):
        make_synthetic(tmp_path / "set", seed=9, **SMALL)  # type: ignore[arg-type]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("keep me")
    with pytest.raises(ValueError, match="not empty"):
        make_synthetic(tmp_path / "mine", **SMALL)  # type: ignore[arg-type]
    assert (tmp_path / "mine/letter.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identities": 3}, "identities"),
        ({"cameras": 1}, "cameras"),
        ({"size": (8, 64)}, "size"),
        ({"blindness": 1.5}, "blindness"),
        ({"test_fraction": 0.99}, "test_fraction"),
    ],
)
def test_parameters_out_of_range_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def looks(code: dict[str, int]) -> list[np.ndarray]:
    """What the three sensors see of a figure without camera, clutter or blindness."""
    canvas = Canvas(128, 64, Material((0.5, 0.5, 0.5), 0.5, 0.5))
    paint_person(canvas, Frame(32, 2, 124), code, 0, np.random.default_rng(0))
    tables = [[m.rgb for m in canvas.materials], [m.nir for m in canvas.materials]]
    tables.append([m.heat for m in canvas.materials])
    return [np.array(table)[plane] for table, plane in zip(tables, canvas.index, strict=True)]


@pytest.mark.parametrize(
    ("attribute", "sensors"),
    [
        ("upper_colour", [0]),
        ("print", [0]),
        ("upper_reflectance", [1]),
        ("trim", [1]),
        ("lower_warmth", [2]),
        ("warm_spot", [2]),
        ("bag", [0, 1, 2]),
        ("hat", [0, 1, 2]),
    ],
)
def test_an_attribute_is_seen_by_its_sensors_alone(attribute: str, sensors: list[int]) -> None:
    code = dict.fromkeys(ATTRIBUTES, 0)
    pairs = list(zip(looks(code), looks({**code, attribute: 1}), strict=True))
    assert [number for number, (a, b) in enumerate(pairs) if not np.array_equal(a, b)] == sensors


def test_blindness_is_local_and_of_one_sensor() -> None:
    """With clutter off, blind shots differ from seeing ones in part of the picture only, not all of it."""
    shots = [Shot("train", 0, 0, 0, number) for number in range(24)]
    seeing = [World(config(blindness=0.0, clutter=0.0)).look(shot).images for shot in shots]
    blind = [World(config(blindness=1.0, clutter=0.0)).look(shot).images for shot in shots]
    for sensor in (0, 1):
        lost = []
        for clear, dim in zip(seeing, blind, strict=True):
            values = dim[sensor].reshape(128, 64, -1).max(-1).astype(int)
            saw = clear[sensor].reshape(128, 64, -1).max(-1).astype(int)
            lost.append(float(np.mean(((values < 25) & (saw > 40)) | (values > 250))))
        assert 0.05 < np.mean(lost) < 0.6 and max(lost) < 0.95


def test_mean_colour_does_not_tell_identities() -> None:
    world = World(config())
    plan = [shot for shot in plan_shots(world.config) if shot.split == "train"][:160]
    means = np.array([world.look(shot).images[0].mean((0, 1)) for shot in plan])
    distance = ((means[:, None] - means[None]) ** 2).sum(-1)
    owner, camera = np.array([s.identity for s in plan]), np.array([s.camera for s in plan])
    distance[camera[:, None] == camera[None]] = np.inf
    right = owner[distance.argmin(1)] == owner
    assert right.mean() < 0.2


def test_drawing_is_fast() -> None:
    world = World(config(size=(256, 128)))
    plan = plan_shots(world.config)[:40]
    start = time.process_time()
    for shot in plan:
        world.look(shot)
    assert (time.process_time() - start) / 40 < 0.05


def test_the_truth_says_what_lies_where(tmp_path: Path) -> None:
    make_synthetic(tmp_path / "set", blindness=0.5, **SMALL)  # type: ignore[arg-type]
    dataset = load("generic", tmp_path / "set")
    names = [record.name for record in (*dataset.query, *dataset.train)]
    kinds = truth(tmp_path / "set", names)
    assert kinds.shape == (22, 3, 64, 32) and set(np.unique(kinds)) == {0, 1, 2, 3}
    assert np.array_equal(truth(tmp_path / "set", names[3:5]), kinds[3:5])
    # Sensors agree on everything but on where they are blind.
    seen = kinds[:, :2].reshape(22, 2, -1)
    both = (seen != BLIND).all(axis=1)
    assert np.array_equal(seen[:, 0][both], seen[:, 1][both])
    with pytest.raises(ValueError, match="no shot 'nobody'"):
        truth(tmp_path / "set", ["nobody"])
    with pytest.raises(ValueError, match=r"manifest\.json"):
        truth(tmp_path, names)


def test_the_figure_of_the_truth_is_what_changes_with_the_identity() -> None:
    """Another identity in the same place changes pixels of the figure and none of the undisturbed background."""
    plain = config(blindness=0.0, clutter=0.0)
    world = World(plain)
    shot = plan_shots(plain)[0]
    before = world.look(shot)
    code = dict(world.codes[0])
    world.codes[0] = {**code, "upper_colour": (code["upper_colour"] + 4) % 10}
    after = world.look(shot)
    changed = (before.images[0].astype(int) != after.images[0]).any(axis=-1)
    outside = before.kinds != FIGURE
    assert changed[~outside].mean() > 0.1
    # The blur of the lens reaches one pixel over the edge.
    edge = np.zeros_like(outside)
    for rows in (-1, 0, 1):
        for columns in (-1, 0, 1):
            edge |= np.roll(~outside, (rows, columns), (0, 1))
    assert not changed[~edge].any()


def test_the_pictures_are_those_of_the_first_release() -> None:
    """The measured figures of the documentation are of this set: its pictures must not change.

    Exact for the map of what lies where. For the pixels mean and deviation: their noise is a product of matrices,
    which processors round differently.
    """
    world = World(config(blindness=1.0, clutter=14.0, size=(64, 32)))
    drawn = [world.look(shot) for shot in plan_shots(world.config)[:12]]
    kinds = hashlib.sha256(b"".join(look.kinds.tobytes() for look in drawn)).hexdigest()
    assert kinds == "46df22c57b8fe09d71df8f9b9b2f14dd3cb7fd988948d29a506cd54f4ca90099"
    pixels = [np.array([look.images[sensor] for look in drawn]) for sensor in range(3)]
    assert [float(part.mean()) for part in pixels] == pytest.approx([90.64, 95.99, 111.11], abs=0.01)
    assert [float(part.std()) for part in pixels] == pytest.approx([82.9, 72.48, 62.59], abs=0.01)


def test_texts_are_of_the_shots_and_mostly_right(tmp_path: Path) -> None:
    manifest = make_synthetic(tmp_path / "set", **SMALL)  # type: ignore[arg-type]
    pictures = fingerprint(tmp_path / "set")
    file = write_texts(tmp_path / "set", manifest)
    first = file.read_bytes()
    assert write_texts(tmp_path / "set", manifest).read_bytes() == first
    assert make_synthetic(tmp_path / "set", **SMALL) == manifest  # type: ignore[arg-type]
    assert {name: value for name, value in fingerprint(tmp_path / "set").items() if name != "texts.jsonl"} == pictures
    dataset = with_texts(load("generic", tmp_path / "set"), file, tmp_path / "set")
    shots = (*dataset.train, *dataset.query, *dataset.gallery)
    assert all(record.text for record in shots)
    refuse_copies(dataset)
    assert len({(record.pid, record.text) for record in shots}) == len(shots)
    big = config()
    codes, told = World(big).codes, texts_of(big)
    hats = [
        ("a cap" in text)
        for shot, text in told
        if codes[shot.identity]["hat"] == 1 and " hat" in text.replace("a cap", " hat")
    ]
    assert 0.8 < np.mean(hats) < 1.0
