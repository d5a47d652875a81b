"""A process killed while it indexes: the next run completes the store, nothing lost and nothing twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from seps.retrieval.maintenance import verify
from seps.retrieval.store import Store
from stores import gallery, index, model_folder

_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from seps.retrieval import indexing
from seps.retrieval.pretrained import from_pretrained
model = from_pretrained(sys.argv[3])
indexing.COMMIT_ROWS = 1
print("ready", flush=True)
options = indexing.IndexOptions(batch_size=1, workers=1)
indexing.index_folder(sys.argv[1], sys.argv[2], model, sys.argv[3], options=options)
"""


def test_killed_at_random(tmp_path: Path) -> None:
    folder, store = gallery(tmp_path / "g", 24), tmp_path / "s"
    chance = random.Random(3)
    survived = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(folder), str(store), model_folder()],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        survived.append(len(Store.open(store)) if (store / "images.lance" / "_versions").exists() else 0)
    report = index(folder, store)
    assert survived == sorted(survived)  # nothing that was written is lost
    assert report.unchanged == survived[-1] and report.problems == []
    assert len(Store.open(store)) == 24 and verify(Store.open(store)) == []
