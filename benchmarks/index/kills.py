"""Kill `seps index` at random moments of its whole life, start-up and tidying included, and see what is left.

    python -m benchmarks.index.kills FOLDER --work DIR [--kills 20]

Each time: a new store, SIGKILL at a moment drawn from the time a whole run takes, then the command again to its end.
What must hold: that run succeeds, `--verify` is clean, every picture is there once.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from seps.photos.indexing.maintenance import verify
from seps.photos.store.store import Store


def _command(folder: Path, store: Path) -> list[str]:
    return [sys.executable, "-m", "seps.cli.main", "index", str(folder), "--store", str(store), "--json"]


def _index(folder: Path, store: Path) -> dict[str, Any]:
    """Index to the end and return what the command reports."""
    done = subprocess.run(_command(folder, store), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"seps index failed after a kill: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _killed_after(folder: Path, store: Path, seconds: float) -> bool:
    """Start indexing and kill it; False if it had ended by then."""
    process = subprocess.Popen(_command(folder, store), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True


def _rows(store: Path) -> int:
    return len(Store.open(store)) if store.exists() and any(store.glob("*.lance/_versions/*")) else 0


def main() -> None:
    """Kill, run again, check; prints a line a kill."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index.kills", description=__doc__)
    parser.add_argument("folder", type=Path, help="pictures to index")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    store = options.work / "store"
    shutil.rmtree(store, ignore_errors=True)
    started = time.perf_counter()
    whole = _index(options.folder, store)
    seconds = time.perf_counter() - started
    images = len(Store.open(store))
    print(f"{images} pictures in {seconds:.1f} s without a kill: {whole}", flush=True)
    chance = random.Random(options.seed)
    for number in range(1, options.kills + 1):
        shutil.rmtree(store, ignore_errors=True)
        moment = chance.uniform(0, seconds)
        killed = _killed_after(options.folder, store, moment)
        left = _rows(store)
        _index(options.folder, store)
        found = Store.open(store)
        problems = verify(found)
        if problems or len(found) != images:
            raise SystemExit(f"kill {number} after {moment:.2f} s: {len(found)} of {images} pictures, {problems}")
        state = "killed" if killed else "ended before"
        print(f"kill {number}: {state} at {moment:.2f} s with {left} rows; complete and clean after", flush=True)


if __name__ == "__main__":
    main()
