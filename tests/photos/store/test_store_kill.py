"""A process killed while it indexes: the next run completes the store, nothing lost and nothing twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seps.photos.indexing.maintenance import verify
from seps.photos.store.store import Store
from stores import gallery, index, model_folder

KILLS = int(os.environ.get("SEPS_KILLS", "4"))
_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from seps.photos.indexing import build as indexing
from seps.retrieval.pretrained import from_pretrained
model = from_pretrained(sys.argv[3])
indexing.COMMIT_ROWS = 1
options = indexing.IndexOptions(batch_size=1, workers=1, bank=False)
progress = lambda done, total: print(done, flush=True)
indexing.index_folder(sys.argv[1], sys.argv[2], model, sys.argv[3], options=options, progress=progress)
"""


def kill_while_indexing(folder: Path, store: Path, chance: random.Random) -> int:
    """Start indexing, kill the process at some moment of its first images, and count what the store holds."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(folder), str(store), model_folder()],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for _ in range(chance.randint(1, 8)):
        assert process.stdout.readline()
    time.sleep(chance.uniform(0.0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return len(Store.open(store))


@pytest.mark.slow
def test_killed_at_random(tmp_path: Path) -> None:
    """`SEPS_KILLS=20 pytest tests/photos/store/test_store_kill.py` for as many moments."""
    images = 16 * KILLS  # more than any process gets to
    folder, store = gallery(tmp_path / "g", images), tmp_path / "s"
    chance = random.Random(3)
    survived = [0]
    for _ in range(KILLS):
        survived.append(kill_while_indexing(folder, store, chance))
        assert survived[-2] < survived[-1] < images  # nothing that was written is lost
        assert verify(Store.open(store)) == []
    report = index(folder, store)
    assert (report.unchanged, report.new, report.problems) == (survived[-1], images - survived[-1], [])
    assert len(Store.open(store)) == images and verify(Store.open(store)) == []


def test_killed_before_the_first_commit(tmp_path: Path) -> None:
    """What a process leaves that died while it made the table: a folder without a version."""
    folder, store = gallery(tmp_path / "g", 2), tmp_path / "s"
    (store / "images.lance" / "data").mkdir(parents=True)
    (store / "images.lance" / "data" / "part.lance").write_bytes(b"half a file")
    (store / "writer.lock").write_text("process 1 on nowhere")
    assert index(folder, store).new == 2
    assert verify(Store.open(store)) == []
