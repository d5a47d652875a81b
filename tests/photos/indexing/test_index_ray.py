"""Indexing over Ray gives the store that the local engine gives, also with bad pictures and workers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from seps.cli.main import call
from seps.images.sources import ImageSource
from seps.photos.indexing import build as indexing
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.indexing.embedding import ImageJob, PreparedBatch, Preparer, Unread, _joined, _lost
from seps.photos.indexing.maintenance import verify
from seps.photos.store.rows import Row
from seps.photos.store.store import Store
from seps.ray_cluster import LOST, ClusterWork, RayConfig, answers, carry_plugins, connected
from seps.ray_cluster import one_by_one as answer_one_by_one
from seps.retrieval.engine.packing import unpack
from seps.retrieval.ranking import bank
from stores import few_sentences, gallery, index, model, model_folder, paint


def over_ray(folder: Path, store: Path, workers: int = 1) -> indexing.IndexReport:
    options = IndexOptions(batch_size=4, ray=RayConfig(workers=workers), bank=False)
    return index_folder(folder, store, model(), model_folder(), options=options)


def rows(store: Path) -> dict[str, Row]:
    opened = Store.open(store)
    return opened.rows(sorted(opened.known()))


def same(left: dict[str, Row], right: dict[str, Row]) -> None:
    """The same rows: facts are equal, states up to the rounding of float16."""
    assert left.keys() == right.keys()
    for identity, one in left.items():
        two = right[identity]
        for name in ("path", "member", "size", "mtime", "sha256", "width", "height", "thumbnail", "dense", "positions"):
            assert getattr(one, name) == getattr(two, name), (one.path, name)
        np.testing.assert_allclose(
            np.asarray(one.vector, np.float32), np.asarray(two.vector, np.float32), atol=1e-3, rtol=2e-3
        )
        assert (one.bank is None) == (two.bank is None) and one.bank == pytest.approx(two.bank, abs=1e-3)
        for name in ("tokens", "words"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(unpack(a), unpack(b), atol=2e-3, rtol=2e-3)


def test_without_ray_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import of a package that is not installed meets
    with pytest.raises(ValueError, match=r"seps\[dist\]"):
        over_ray(gallery(tmp_path / "g", 2), tmp_path / "s")


@pytest.mark.slow
def test_a_cluster_gives_the_same_store(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start of a worker imports torch and transformers, about 5 s each: two runs prove everything."""
    folder = gallery(tmp_path / "g", 20, described=10)
    (folder / "bad.jpg").write_text("no picture")

    # With the bank: the driver sends its sentences, and no worker encodes them.
    few_sentences(monkeypatch)
    count = len(bank.sentences()) - bank.ASKED

    class Counted(Preparer):
        def __call__(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
            assert self.bank is not None and len(self.bank.vectors) == count
            return super().__call__(jobs)

    # A worker dies once, so its images are tried one by one; the run is interrupted after the first commit.
    mark = str(tmp_path / "died once")

    class DiesOnce(Counted):
        def __call__(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
            if not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(jobs)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    options = IndexOptions(batch_size=4, ray=RayConfig(workers=1))
    with monkeypatch.context() as patch:
        patch.setattr(indexing, "Preparer", DiesOnce)
        patch.setattr(indexing, "COMMIT_ROWS", 1)
        with pytest.raises(KeyboardInterrupt):
            index_folder(folder, tmp_path / "ray", model(), model_folder(), options=options, progress=interrupt)
    committed = sorted(row.path for row in rows(tmp_path / "ray").values())
    assert os.path.exists(mark) and 1 <= len(committed) <= 4
    every = sorted(str(path.relative_to(folder)) for path in folder.rglob("p*.jpg"))
    moved, killer = committed[0], [path for path in every if path not in committed][-1]

    # Then the folder changes, and the command runs, over two workers, with a picture that kills whoever reads it.
    os.replace(folder / moved, folder / "moved.jpg")
    text = (folder / "data.jsonl").read_text()
    (folder / "data.jsonl").write_text(text.replace(f'"{moved}"', '"moved.jpg"'))
    paint(folder / committed[-1], 300)

    class Dying(Counted):
        def __call__(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
            if any(job.source.path.name == Path(killer).name for job in jobs):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(jobs)

    monkeypatch.setattr(indexing, "Preparer", Dying)
    monkeypatch.setattr("seps.ray_cluster.TRIES", 1)
    arguments = [str(folder), "--store", str(tmp_path / "ray"), "--model", model_folder(), "--engine", "ray", "--json"]
    call("index", [*arguments, "--workers", "2"])
    shown = capsys.readouterr().out
    # The cluster of the tests outlives the command, so Ray may print before and after it.
    told = json.JSONDecoder().raw_decode(shown[shown.index("{") :])[0]
    monkeypatch.undo()
    assert told["moved"] == 1 and told["unchanged"] + told["new"] + told["changed"] + told["moved"] == 19
    problems = {problem["name"]: problem["why"] for problem in told["problems"]}
    assert set(problems) == {"bad.jpg", killer} and problems[killer] == LOST

    few_sentences(monkeypatch)
    index(folder, tmp_path / "local", bank=True)
    expected = {identity: row for identity, row in rows(tmp_path / "local").items() if row.path != killer}
    same(expected, rows(tmp_path / "ray"))
    assert verify(Store.open(tmp_path / "ray")) == []
    calibrations = [Store.open(tmp_path / name).settings.calibration for name in ("ray", "local")]
    assert calibrations[0].keys() == calibrations[1].keys() and calibrations[0]["images"] == 19.0


class FakeRay:
    """A cluster and its worker in one; each call ends as the script says: "works", "dies" or "restarts"."""

    class exceptions:
        class RayActorError(Exception):
            pass

        class ActorUnavailableError(RayActorError):
            pass

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.run = SimpleNamespace(remote=lambda jobs: jobs)
        self.ready = SimpleNamespace(remote=tuple)

    def get(self, jobs: Sequence[ImageJob], timeout: float | None = None) -> PreparedBatch:
        step = self.script.pop(0)
        if step == "works":
            return PreparedBatch(["read"] * len(jobs))
        raise self.exceptions.RayActorError if step == "dies" else self.exceptions.ActorUnavailableError


WORK: ClusterWork[ImageJob, PreparedBatch] = ClusterWork(lambda on_gpu: lambda jobs: PreparedBatch([]), _lost, _joined)


def one_by_one(names: Sequence[str], *script: str) -> Sequence[object]:
    fake = FakeRay(*script)
    jobs = [ImageJob(ImageSource(Path(name)), None) for name in names]
    outcomes = answer_one_by_one(fake, fake, jobs, WORK).outcomes
    assert not fake.script
    return outcomes


def test_a_cluster_that_cannot_work_is_no_fault_of_the_pictures() -> None:
    with pytest.raises(ValueError, match="die"):
        one_by_one(["a.jpg", "b.jpg"], *["works", "dies"] * 4)
    assert one_by_one(["a.jpg"], *["works", "dies"] * 2) == [Unread(LOST)]


def test_a_worker_that_is_starting_again_costs_no_picture() -> None:
    """The first picture kills it at both tries; the second is given once it has started."""
    starting = ["restarts"] * 3 + ["works"]
    assert one_by_one(["killer.jpg", "b.jpg"], *["works", "dies", *starting, "dies", *starting, "works"]) == [
        Unread(LOST),
        "read",
    ]


class SmallCluster:
    """Ray with room for some workers: the others never start."""

    def __init__(self, room: int) -> None:
        self.room, self.made, self.told = room, 0, 0
        self.exceptions = SimpleNamespace(RayActorError=KeyError)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.room)}

    def put(self, value: Any) -> Any:
        return value

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def start(self, *_: Any) -> Any:
        number, self.made = self.made, self.made + 1
        return SimpleNamespace(ready=self.task(number), run=self.task(number))

    def task(self, worker: int) -> Any:
        def submit(*jobs: Any) -> tuple[int, int]:
            self.told += 1
            return worker, self.told

        return SimpleNamespace(remote=submit)

    def wait(self, tasks: list[tuple[int, int]], num_returns: int, timeout: float | None = None) -> Any:
        able = [task for task in tasks if task[0] < self.room]
        assert able or timeout is not None, "it waits for ever"
        return able[:1], tasks

    def get(self, task: tuple[int, int]) -> PreparedBatch:
        return PreparedBatch([])

    def kill(self, worker: Any) -> None:
        pass


def spread(ray: SmallCluster, workers: int, address: str = "auto") -> list[int]:
    batches: list[list[ImageJob]] = [[] for _ in range(9)]
    return sorted(number for number, _ in answers(ray, RayConfig(address, workers), batches, WORK))


def test_more_workers_than_the_cluster_has_room_for_cost_nothing() -> None:
    """Batches of a worker that never started were waited for, without an end."""
    assert spread(SmallCluster(2), 4) == spread(SmallCluster(4), 4) == list(range(9))
    with pytest.raises(ValueError, match="300"):
        spread(SmallCluster(0), 2)
    here = SmallCluster(2)
    assert spread(here, 4, address="") == list(range(9)) and here.made == 2


def test_what_ray_prints_is_not_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with connected(RayConfig()):
        print("(raylet) A worker died or was killed while executing a task")
    print("{}")
    shown = capsys.readouterr()
    assert shown.out == "{}\n" and "(raylet)" in shown.err


@pytest.mark.slow
def test_ideas_of_a_plugin_travel_to_workers_without_the_file(tmp_path: Path) -> None:
    import ray

    from seps import PatchSlimming, SlimmingConfig, registry
    from seps.plugins import load_plugin

    (tmp_path / "ideas.py").write_text(
        "import seps\nimport torch\n\n@seps.register_decision('all')\n"
        "def keep_all(scores, count, valid):\n    return torch.ones_like(scores)\n"
    )
    with mock.patch.dict(registry._IDEAS, clear=True):
        module = load_plugin(tmp_path / "ideas.py")
        carry_plugins(ray)
        net = PatchSlimming(SlimmingConfig(decision="all", embed_size=8, num_patches=10))
    try:
        (tmp_path / "net").write_bytes(ray.cloudpickle.dumps(net))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    (tmp_path / "ideas.py").unlink()
    program = (
        "import pickle, torch; net = pickle.load(open('net', 'rb')).eval(); "
        "side = net.encode_images(torch.randn(2, 11, 8)); "
        "from seps.method.encoded import Texts; assert net.score(side, Texts.of(torch.randn(1, 3, 8))).masks[0].all()"
    )
    paths = os.pathsep.join([str(Path(registry.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
