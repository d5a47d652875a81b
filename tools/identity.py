"""Write down what the software computes on fixed inputs, so that a refactoring can be shown to keep every number.

    python tools/identity.py record before.zip                  # on the tree before the change
    python tools/identity.py compare before.zip                 # on the tree after it: what differs, and by how much
    python tools/identity.py compare before.zip --only stores   # one area; --only stores/columns one probe
    python tools/identity.py list                               # the areas and their probes
    python tools/identity.py planted                            # does each area see a fault? plants one at a time

Only public names and command lines are used, so that files may move between the two calls: `--tree` names another
checkout, so that a record of an older tree can be made later. Numbers are compared bit by bit, which holds on one
machine with one set of installed packages. Text for people is compared as well, and counted apart: with `--numbers` it
is left out. A probe whose name, option or command no longer works is reported as gone. Exit status 1 where anything
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from probes.plants import PLANTS, plant  # noqa: E402
from probes.registry import AREAS, probes_of  # noqa: E402
from probes.values import Difference, Leaf, compare, is_gone, leaves, read, write  # noqa: E402

JOBS = 2
"""Areas at a time, each in a process with one thread."""


def chosen_areas(only: list[str]) -> list[str]:
    """The areas of `--only`, in their order; all without it. Ends with a sentence for one that does not exist."""
    named = {choice.partition("/")[0] for choice in only}
    unknown = sorted(named - AREAS.keys())
    if unknown:
        sys.exit(f"There is no area {unknown[0]}; the areas are {', '.join(AREAS)}.")
    return [area for area in AREAS if area in named or not named]


def is_chosen(key: str, only: list[str]) -> bool:
    """Whether a value or a probe belongs to `--only`."""
    return not only or any(key == choice or key.startswith(f"{choice}/") or choice == key for choice in only)


@contextlib.contextmanager
def scratch_folder(area: str) -> Iterator[Path]:
    """An empty folder with the same path in every run, because ids of pictures and stores depend on paths."""
    folder = Path(tempfile.gettempdir()).resolve() / f"seps-identity-{area}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def record_area(area: str, only: list[str], tree: Path, out: Path) -> None:
    """Run the probes of one area in this process, with one thread, and write what they return."""
    sys.path[:0] = [str(tree / "src"), str(ROOT / "tests")]
    import torch
    from probes.bench import Bench
    from probes.registry import Gone

    torch.set_num_threads(1)
    record: dict[str, Leaf] = {}
    with scratch_folder(area) as home:
        os.environ.update(HOME=str(home), XDG_DATA_HOME=str(home / "data"), XDG_CACHE_HOME=str(home / "cache"))
        bench = Bench(tree, home)
        wanted = [choice for choice in only if choice.startswith(f"{area}/")]
        for name, function in probes_of(area).items():
            if wanted and f"{area}/{name}" not in wanted:
                continue
            start = sum(os.times()[:4])
            try:
                found = dict(leaves(function(bench), f"{area}/{name}"))
            except (Exception, Gone) as error:  # a probe that cannot run is an answer too
                told = bench.clean(f"{error}" if isinstance(error, Gone) else f"{type(error).__name__}: {error}")
                found = {f"{area}/{name}": f"gone: {told.strip().splitlines()[0] if told.strip() else error!r}"}
            record |= found
            print(f"{sum(os.times()[:4]) - start:6.1f} s  {area}/{name}", file=sys.stderr, flush=True)
    write(out, record)


def record(only: list[str], tree: Path, jobs: int = JOBS, verbose: bool = False) -> dict[str, Leaf]:
    """Every chosen value. Areas run in processes of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(tree / "src")
    with tempfile.TemporaryDirectory(prefix="seps-identity-") as folder:

        def run(area: str) -> dict[str, Leaf]:
            out = Path(folder) / f"{area}.zip"
            command = [sys.executable, str(Path(__file__).resolve()), "area", str(out), "--tree", str(tree)]
            chosen = [choice for choice in only if choice.startswith(f"{area}/")] or [area]
            log = Path(folder) / f"{area}.log"
            with log.open("w") as errors:
                words = [*command, "--only", *chosen]
                done = subprocess.run(words, env=environment, stdout=errors, stderr=errors, check=False)
            lines = log.read_text().splitlines()
            if verbose:
                print("\n".join(line for line in lines if re.match(r" *\d+\.\d s  ", line)), flush=True)
            if done.returncode or not out.exists():
                last = (lines or ["no output"])[-1]
                return {area: f"gone: the process ended with {done.returncode}: {last}"}
            return read(out)

        with ThreadPoolExecutor(jobs) as pool:
            return {key: value for part in pool.map(run, chosen_areas(only)) for key, value in part.items()}


def report(differences: list[Difference], before: Mapping[str, Leaf], numbers: bool, most: int) -> int:
    """Print what differs, numbers first; returns the exit status."""
    shown = [one for one in differences if not (numbers and one.kind == "prose")]
    ordered = [one for kind in ("value", "renamed", "gone", "new", "prose") for one in shown if one.kind == kind]
    for one in ordered[:most]:
        print(one)
    if len(ordered) > most:
        print(f"... and {len(ordered) - most} more (--most)")
    if not shown:
        left_out = len(differences)
        print("The same, bit by bit." + (f" {left_out} texts differ (--numbers)." if left_out else ""))
        return 0
    areas = sorted({one.place.partition("/")[0] for one in shown})
    kinds = {kind: sum(one.kind == kind for one in shown) for kind in ("value", "prose", "renamed", "gone", "new")}
    names = {"value": "values differ", "prose": "texts differ", "renamed": "renamed", "gone": "gone", "new": "new"}
    told = ", ".join(f"{count} {names[kind]}" for kind, count in kinds.items() if count)
    print(f"Of {len(before)} values: {told}; in {', '.join(areas)}.")
    return 1


def planted(only: list[str], jobs: int) -> int:
    """Plant every fault of the chosen areas, one at a time, and say which probes saw it; returns the exit status."""
    faults = [fault for fault in PLANTS if any(probe.partition("/")[0] in chosen_areas(only) for probe in fault.probes)]
    before = record(sorted({probe for fault in faults for probe in fault.probes}), ROOT, jobs)
    missed = 0
    for number, fault in enumerate(faults, 1):
        with tempfile.TemporaryDirectory(prefix="seps-planted-") as folder:
            tree = Path(folder) / "tree"
            places = plant(ROOT, fault, tree)
            if not places:
                print(f"{number:2} FITS NOWHERE  {fault.about}", flush=True)
                missed += 1
                continue
            now = record(list(fault.probes), tree, jobs)
        for probe in fault.probes:
            first, second = ({k: v for k, v in one.items() if is_chosen(k, [probe])} for one in (before, now))
            differences = list(compare(first, second))
            seen = bool(differences) and first and not any(is_gone(value) for value in first.values())
            missed += not seen
            told = f"{len(differences)} differ, first {differences[0]}" if differences else "the same"
            print(
                f"{number:2} {'seen' if seen else 'NOT SEEN'}  {probe}: {fault.about} ({places[0]}): {told}"[:300],
                flush=True,
            )
    print(f"{len(faults)} faults planted; " + (f"{missed} times unseen." if missed else "every probe saw its own."))
    return int(missed > 0)


def show_list() -> int:
    """Print the areas and their probes."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for area, about in AREAS.items():
        print(f"{area}: {about}")
        for name in probes_of(area):
            print(f"    {area}/{name}")
    return 0


def main() -> int:
    """Record, compare or list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare", "list", "planted", "area"))
    parser.add_argument("file", type=Path, nargs="?", help="the record to write, or to compare with")
    parser.add_argument("--only", nargs="+", default=[], metavar="AREA", help="areas, or AREA/PROBE; default: all")
    parser.add_argument("--numbers", action="store_true", help="leave out differences of text for people")
    parser.add_argument("--most", type=int, default=200, help="lines to print of a comparison (default: %(default)s)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to run (default: this one)")
    parser.add_argument("--jobs", type=int, default=JOBS, help="areas at a time (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print the processor seconds of every probe")
    options = parser.parse_args()
    if options.action == "list":
        return show_list()
    if options.action == "planted":
        return planted(options.only, options.jobs)
    if options.file is None:
        parser.error("name the file of the record")
    tree = options.tree.resolve()
    if options.action == "area":
        (area,) = chosen_areas(options.only)
        record_area(area, options.only, tree, options.file)
        return 0
    start = time.monotonic()
    if options.action == "record":
        now = record(options.only, tree, options.jobs, options.verbose)
        write(options.file, now)
        gone = [key for key, value in now.items() if is_gone(value)]
        for key in gone:
            print(f"{key}: {now[key]}")
        print(f"Written: {options.file}, {len(now)} values in {time.monotonic() - start:.0f} s; {len(gone)} are gone.")
        return 0
    before = {key: value for key, value in read(options.file).items() if is_chosen(key, options.only)}
    now = record(options.only, tree, options.jobs, options.verbose)
    return report(list(compare(before, now)), before, options.numbers, options.most)


if __name__ == "__main__":
    sys.exit(main())
