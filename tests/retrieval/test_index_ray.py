"""Indexing over Ray gives the store that the local engine gives, also with bad pictures and workers that die."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seps.cli import index as index_command
from seps.retrieval import indexing
from seps.retrieval.data import ImageSource
from seps.retrieval.dense_text import RayConfig
from seps.retrieval.embedding import Batch, Job, Preparer
from seps.retrieval.indexing import IndexOptions, index_folder
from seps.retrieval.maintenance import verify
from seps.retrieval.packing import unpack
from seps.retrieval.ray_indexing import LOST, _one_by_one
from seps.retrieval.store import Store
from seps.retrieval.store_rows import Row
from stores import gallery, index, model, model_folder, paint

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (pip install 'seps[dist]')")


def over_ray(folder: Path, store: Path, workers: int = 1) -> indexing.IndexReport:
    options = IndexOptions(batch_size=4, ray=RayConfig(workers=workers))
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
        for name in ("tokens", "words"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(unpack(a), unpack(b), atol=2e-3, rtol=2e-3)


def test_without_ray_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"seps\[dist\]"):
        over_ray(gallery(tmp_path / "g", 2), tmp_path / "s")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield ray
    ray.shutdown()


@needs_ray
@pytest.mark.slow
def test_a_cluster_gives_the_same_store(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = gallery(tmp_path / "g", 20, described=10)
    (folder / "bad.jpg").write_text("no picture")
    local = index(folder, tmp_path / "local")
    arguments = [str(folder), "--store", str(tmp_path / "ray"), "--model", model_folder(), "--engine", "ray", "--json"]
    assert index_command.run([*arguments, "--workers", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["new"], told["described"]) == (local.new, local.described) == (20, 10)
    assert [problem["name"] for problem in told["problems"]] == ["bad.jpg"]
    same(rows(tmp_path / "local"), rows(tmp_path / "ray"))
    (folder / "bad.jpg").unlink()

    # Interrupted after the first commit; then the folder changes, and it runs again.
    monkeypatch.setattr(indexing, "COMMIT_ROWS", 1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    options = IndexOptions(batch_size=4, ray=RayConfig(workers=1))
    with pytest.raises(KeyboardInterrupt):
        index_folder(folder, tmp_path / "cut", model(), model_folder(), options=options, progress=interrupt)
    assert len(rows(tmp_path / "cut")) == 4
    os.replace(folder / "p00.jpg", folder / "moved.jpg")
    text = (folder / "data.jsonl").read_text()
    (folder / "data.jsonl").write_text(text.replace('"p00.jpg"', '"moved.jpg"'))
    paint(folder / "p02.jpg", 300)
    report = over_ray(folder, tmp_path / "cut")
    index(folder, tmp_path / "local")
    assert report.unchanged + report.new + report.changed + report.moved == 20
    assert report.moved == 1 and report.deleted == 1
    same(rows(tmp_path / "local"), rows(tmp_path / "cut"))
    assert verify(Store.open(tmp_path / "cut")) == []

    # A worker dies once, and one picture kills whoever reads it.
    mark = str(tmp_path / "died once")

    class Dying(Preparer):
        def __call__(self, jobs: Sequence[Job]) -> Batch:
            names = [job.source.path.name for job in jobs]
            if not os.path.exists(mark) or "p04.jpg" in names:
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(jobs)

    monkeypatch.setattr(indexing, "Preparer", Dying)
    report = over_ray(folder, tmp_path / "dying", workers=2)
    assert [(problem.name, problem.why) for problem in report.problems] == [("p04.jpg", LOST)]
    expected = {identity: row for identity, row in rows(tmp_path / "local").items() if row.path != "p04.jpg"}
    same(expected, rows(tmp_path / "dying"))


class _Dead:
    """A cluster whose workers always die."""

    class exceptions:
        class RayActorError(Exception):
            pass

    class run:
        @staticmethod
        def remote(jobs: Sequence[Job]) -> Sequence[Job]:
            return jobs

    def get(self, _: object) -> None:
        raise self.exceptions.RayActorError


def test_a_cluster_that_cannot_work_is_no_fault_of_the_pictures(tmp_path: Path) -> None:
    jobs = [Job(ImageSource(tmp_path / name), None) for name in ("a.jpg", "b.jpg")]
    with pytest.raises(ValueError, match="die whatever they read"):
        _one_by_one(_Dead(), _Dead(), jobs)
    assert _one_by_one(_Dead(), _Dead(), jobs[:1]).outcomes == [LOST]
