"""Does dropping patches pay? Rows of selection rules, five synthetic sets x three seeds, per-query figures.

    python -m benchmarks.reid_selection stem carry/reid/stem.pt     (where the embedded encoder is installed)
    python -m benchmarks.reid_selection run --out runs/selection --stem carry/reid/stem.pt --minutes 7
    python -m benchmarks.reid_selection report runs/selection

`run` needs torch and numpy alone. It draws the sets, then trains row after row, all runs of a row stacked in one
network, `--processes` rows at a time. Every finished row is written to runs.jsonl at once, a line per run: the same
call goes on with what is missing. With `--group 1` the sets come one after the other, so that a cut
study has all rows for the first sets.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import math
import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.selection.data import Sets, SetSize, load_sets, make_sets, save_sets, write_stem
from benchmarks.selection.rows import ROWS
from benchmarks.selection.runs import OutOfTime, Recipe, run_row
from benchmarks.selection.stats import report
from benchmarks.selection.timing import time_rows

Job = tuple[str, tuple[int, ...]]
"""A row and the data seeds whose runs are stacked."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    stem = commands.add_parser("stem", help="write the weights of the stem to carry to another machine")
    stem.add_argument("to", type=Path)
    told = commands.add_parser("report", help="the tables of finished runs, in Markdown")
    told.add_argument("out", type=Path)
    run = commands.add_parser("run", help="train what is missing")
    run.add_argument("--out", type=Path, default=Path("runs/selection"))
    run.add_argument("--stem", type=Path, help="file of `stem`; default: the installed encoder's weights")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    run.add_argument("--data-seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--group", type=int, default=5, help="sets of a job, stacked")
    run.add_argument("--processes", type=int, default=8, help="jobs at a time")
    run.add_argument("--sets", type=Path, help="folder of the drawn sets (1 GB, made when missing); default: --out")
    run.add_argument("--drawers", type=int, default=1, help="processes that draw the sets")
    run.add_argument("--minutes", type=float, help="stop then, jobs on the way are lost; the same call goes on")
    for section in (Recipe, SetSize):
        for field in dataclasses.fields(section):
            if field.name != "net":
                kind = type(field.default)
                run.add_argument(f"--{_option(section, field.name)}", type=kind, default=field.default)
    run.add_argument("--net", type=int, nargs=4, default=list(dataclasses.astuple(Recipe().net)),
                     metavar=("WIDTH", "HEADS", "BLOCKS", "EARLY"))  # fmt: skip
    return parser.parse_args(arguments)


def _option(section: type, name: str) -> str:
    """`identities` and `images` of a set are set-identities and set-images; those of the recipe are of a batch."""
    return f"set-{name}" if section is SetSize else name.replace("_", "-")


def recipe_of(options: argparse.Namespace) -> tuple[Recipe, SetSize]:
    """The recipe and the size of the sets that the options name."""
    given = vars(options)
    names = [field.name for field in dataclasses.fields(Recipe) if field.name != "net"]
    recipe = Recipe(**{name: given[name] for name in names}, net=type(Recipe().net)(*options.net))
    return recipe, SetSize(**{field.name: given[f"set_{field.name}"] for field in dataclasses.fields(SetSize)})


def main(arguments: list[str] | None = None) -> int:
    """0 if everything asked for is there."""
    options = parse(arguments)
    if options.command == "stem":
        write_stem(options.to)
        return 0
    if options.command == "report":
        print(report(read_lines(options.out / "runs.jsonl")))
        timed = options.out / "time.md"
        print(timed.read_text(encoding="utf-8") if timed.exists() else "")
        return 0
    started = time.monotonic()
    deadline = math.inf if options.minutes is None else started + 60 * options.minutes
    recipe, size = recipe_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    check_recipe(options.out, recipe, size)
    todo = missing_jobs(options)
    path = (options.sets or options.out) / f"sets-{'-'.join(map(str, options.data_seeds))}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        save_sets(make_sets(options.data_seeds, size, options.stem, options.device, options.drawers), path)
    say(f"sets ready after {time.monotonic() - started:.0f} s; {len(todo)} jobs")
    timed = options.out / "time.md"
    if not timed.exists():
        with plain_attention():
            timed.write_text(time_rows(load_sets(path).to(options.device), recipe), encoding="utf-8")
        say(f"timed after {time.monotonic() - started:.0f} s")
    with plain_attention():
        left = work(options, todo, path, recipe, deadline)
    say(f"{len(todo) - left} of {len(todo)} jobs done after {time.monotonic() - started:.0f} s")
    return 1 if left else 0


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """The fused attention kernels refuse the layout of stacked networks in the backward pass."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32: autocast and `vmap` do not go together in the backward pass
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def check_recipe(out: Path, recipe: Recipe, size: SetSize) -> None:
    """Note the settings that decide the outcome; refuse to mix runs of other ones."""
    path, values = out / "recipe.json", {**dataclasses.asdict(recipe), "set": dataclasses.asdict(size)}
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != values:
        raise SystemExit(f"{out} holds runs of another recipe ({path}): choose another --out.")
    path.write_text(json.dumps(values) + "\n", encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines, or of that file packed (.gz); one that a kill cut off is passed over."""
    found = []
    packed = path.with_name(f"{path.name}.gz")
    if packed.exists() and not path.exists():
        lines = gzip.decompress(packed.read_bytes()).decode().splitlines()
    else:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for text in lines:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    """Add lines; one that a kill cut off stays alone on its own."""
    with path.open("ab+") as file:
        cut = file.tell() > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * cut + b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def missing_jobs(options: argparse.Namespace) -> list[Job]:
    """Group of sets by group, in it row by row, what has not been written yet."""
    seeds = options.data_seeds
    done = {(line["row"], line["data_seed"], line["seed"]) for line in read_lines(options.out / "runs.jsonl")}
    jobs = []
    for start in range(0, len(seeds), options.group):
        for row in options.rows:
            lacking = tuple(
                data_seed
                for data_seed in seeds[start : start + options.group]
                if any((row, data_seed, seed) not in done for seed in range(options.seeds))
            )
            if lacking:
                jobs.append((row, lacking))
    return jobs


def one_job(sets: Sets, job: Job, seeds: int, recipe: Recipe, deadline: float) -> list[dict[str, Any]]:
    """The lines of one job."""
    row, data_seeds = job
    runs = [(data_seed, seed) for data_seed in data_seeds for seed in range(seeds)]
    return run_row(ROWS[row], sets.chosen(data_seeds), runs, recipe, deadline)


def work(options: argparse.Namespace, todo: list[Job], path: Path, recipe: Recipe, deadline: float) -> int:
    """Do the jobs and write each at once; returns how many are left."""
    given = (path, options.device, options.seeds, recipe, deadline)
    left = len(todo)
    if options.processes == 1:
        outcomes = _here(todo, *given)
    else:
        outcomes = _in_processes(todo, min(options.processes, len(todo)), given)
    for job, outcome, seconds in outcomes:
        if isinstance(outcome, str):
            say(f"{job[0]} {list(job[1])} FAILED after {seconds:.0f} s: {outcome}")
            continue
        append(options.out / "runs.jsonl", outcome)
        left -= 1
        say(f"{job[0]} {list(job[1])}: {seconds:.0f} s, {summary(job[0], outcome)}; {left} jobs left")
    return left


def summary(row: str, lines: list[dict[str, Any]]) -> str:
    """mAP of the row's patterns."""
    own = [line["ap"] for line in lines if line["row"] == row]
    means = {p: sum(sum(ap[p]) / len(ap[p]) for ap in own) / len(own) for p in own[0]}
    return "mAP " + ", ".join(f"({pattern}) {value:.1f}" for pattern, value in means.items())


def _here(todo: list[Job], path: Path, device: str, seeds: int, recipe: Recipe, deadline: float) -> Any:
    sets = load_sets(path).to(device)
    for job in todo:
        started = time.monotonic()
        if started < deadline:
            yield job, _attempt(sets, job, seeds, recipe, deadline), time.monotonic() - started


def _attempt(sets: Sets, job: Job, seeds: int, recipe: Recipe, deadline: float) -> list[dict[str, Any]] | str:
    """The lines of a job, or why there are none: the others go on."""
    try:
        return one_job(sets, job, seeds, recipe, deadline)
    except OutOfTime as error:
        return str(error)
    except Exception:
        return traceback.format_exc(limit=-3)


def _worker(jobs: Any, results: Any, path: Path, device: str, seeds: int, recipe: Recipe, deadline: float) -> None:
    torch.set_num_threads(1)
    sets = load_sets(path).to(device)
    with plain_attention():
        while time.monotonic() < deadline:
            try:
                job = jobs.get(timeout=1)
            except queue.Empty:
                break
            started = time.monotonic()
            results.put((job, _attempt(sets, job, seeds, recipe, deadline), time.monotonic() - started))
    results.put(None)


def _in_processes(todo: list[Job], count: int, given: tuple[Any, ...]) -> Any:
    """Outcomes as they come from `count` processes; one that dies without a word is noticed."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    jobs, results = context.Queue(), context.Queue()
    for job in todo:
        jobs.put(job)
    workers = [context.Process(target=_worker, args=(jobs, results, *given), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    ended = 0
    while ended < count:
        try:
            outcome = results.get(timeout=5)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if outcome is None:
            ended += 1
        else:
            yield outcome
    jobs.cancel_join_thread()
    for worker in workers:
        worker.join(5)
        if worker.is_alive():
            worker.terminate()


def say(text: str) -> None:
    """A line about progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
