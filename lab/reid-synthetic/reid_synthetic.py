"""Does cross-modal patch selection help? Concatenation against SDTPS on the synthetic set, several seeds.

    python -m benchmarks.reid_synthetic --out runs/reid --device cuda --processes 12
    python -m benchmarks.reid_synthetic --out runs/reid --report      (tables and curves again, no training)

Every variant is trained with the same recipe, data, batches and number of steps, and gradients are clipped at a norm
that none of them reaches (the table says which share of the steps was clipped); checkpoints are chosen by mAP on
held-out training identities; the test set is looked at once, at the end. Each finished run is a line of runs.jsonl in
--out at once: the same call after a kill, a failure or --minutes goes on with what is missing. Then results.json,
results.md and, where matplotlib is installed, curves.png are written.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.reid_report import curves, report
from benchmarks.reid_truth import KnowingModel, KnowingReader, Truth, kept_rows, write_truth
from seps.reid.config import ReidConfig, from_mapping
from seps.reid.data import ReidDataset
from seps.reid.evaluate import Case, all_cases, cost, evaluate
from seps.reid.synthetic import make_synthetic
from seps.reid.task import ReidTask, load_dataset, split_dataset
from seps.training import load_weights, train
from seps.training.seeding import derive_seed
from seps.training.tracking import read_metrics

VARIANTS: dict[str, dict[str, Any]] = {
    "concat": {"fusion": "concat"},
    # Both branches, but nothing is left out: what the second branch alone brings.
    "keep-all": {"fusion": "sdtps", "sparse_ratio": 1.0, "aggr_ratio": 0.2},
    "topk": {"fusion": "sdtps", "decision": "topk"},
    "gumbel": {"fusion": "sdtps", "decision": "gumbel"},
    "binary": {"fusion": "sdtps", "decision": "binary"},
    # The sensor's own vector has no say: the others alone judge its patches.
    "cross": {"fusion": "sdtps", "decision": "topk", "own_guide": 0.0},
    # The others judge by what they see at the same place, not by their vectors against patches of another sensor.
    "position": {"fusion": "sdtps", "decision": "topk", "guides": "position"},
    # No cosines at all: the predictor alone decides, and Gumbel gives it a gradient.
    "learned": {"fusion": "sdtps", "decision": "gumbel", "beta": 0.0},
    # Told by the drawing where the figure is seen: the most that selection could bring.
    "oracle": {"fusion": "sdtps", "decision": "topk"},
}
SLOWEST_FIRST = ("oracle", "gumbel", "learned", "binary", "position", "topk", "cross", "keep-all", "concat")
# What does not change the outcome of a run, and so may differ when a call goes on.
FREE = {"out", "data", "report", "device", "variants", "seeds", "modality_dropout", "processes", "threads", "minutes"}


class RunKey(NamedTuple):
    """What tells one run from the others."""

    variant: str
    dropout: float
    seed: int

    @property
    def name(self) -> str:
        """A name for folders and lines."""
        return f"{self.variant}-d{self.dropout:g}-{self.seed}"


def settings(options: argparse.Namespace, job: RunKey) -> dict[str, Any]:
    """The recipe: the same for every variant but for the fields of `VARIANTS`."""
    return {
        "data": {
            "root": str(options.data),
            "identities": options.batch // 4,
            "images": 4,
            "holdout": 0.15,
            "pad": max(2, options.image_size[0] // 26),
            "erase": 0.3,
            "threads": 2,
            "cache_mib": 8192,
        },
        "model": {
            "encoder": options.encoder,
            "image_size": list(options.image_size),
            "stride": options.stride,
            "width": options.width,
            "freeze_blocks": options.freeze_blocks,
            **VARIANTS[job.variant],
        },
        # Published: cross-entropy x 0.25 and triplets of raw features, which collapse this encoder (synthetic.yaml).
        "loss": {
            "identity": options.identity_weight,
            "triplet_space": options.triplet_space,
            "modality_dropout": job.dropout,
        },
        "train": {
            "epochs": options.epochs,
            "learning_rate": options.learning_rate,
            "backbone_lr_scale": options.backbone_scale,
            "warmup_fraction": 0.2,
            "clip_norm": options.clip_norm,
            "precision": options.precision,
            "seed": job.seed,
            "eval_every": max(1, options.epochs // 6),
            "keep_last": 1,
            "workers": 2,
        },
    }


def make_task(variant: str, config: ReidConfig, dataset: ReidDataset, known: Truth) -> ReidTask:
    """The task of a variant; the oracle has a reader and a model of its own."""
    if variant != "oracle":
        return ReidTask(config, dataset)
    identities = len(split_dataset(config, dataset)[0].identities)
    torch.manual_seed(derive_seed(config.train.seed))
    model = KnowingModel(config.model, dataset.modalities, identities, len(dataset.cameras))
    return ReidTask(config, dataset, model, KnowingReader(known, config, dataset.modalities))


def one_run(options: argparse.Namespace, job: RunKey) -> dict[str, Any]:
    """Train one variant with one seed and look at the test set in every case."""
    torch.set_num_threads(options.threads)
    config = from_mapping(settings(options, job))
    dataset, known = load_dataset(config.data), Truth(truth_path(options))
    task = make_task(job.variant, config, dataset, known)
    folder = options.out / "runs" / job.name
    started = time.perf_counter()
    result = train(task, config.train, folder, device=options.device)
    seconds = time.perf_counter() - started
    if result.interrupted:
        raise InterruptedError("asked to stop; the next call goes on")
    if result.best_checkpoint is None:
        raise ValueError("no finite score")
    task.model.load_state_dict(load_weights(result.best_checkpoint))
    cases: list[Case] = [case for pattern in task.model.patterns for case in all_cases(task.model, pattern)]
    rows = [found.row() for found in evaluate(task.model, dataset, task.reader, cases)]
    kept = kept_rows(task.model, dataset, task.reader, known)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]
    task.reader.close()
    return {
        **job._asdict(),
        "seconds": seconds,
        "steps": result.step,
        "dev_mAP": result.best_score,
        "best_step": int(result.best_checkpoint.name.split("-")[-1]),
        "rows": rows,
        "kept": kept,
        "stability": stability(
            [line["loss"] for line in lines], [line["grad_norm"] for line in lines], options.clip_norm
        ),
        "curves": {name: thinned([line[name] for line in lines]) for name in ("loss", "grad_norm")},
        "cost": cost(task.model),
    }


def stability(losses: list[float], norms: list[float], clip_norm: float) -> dict[str, float]:
    """How calmly a run trained, and the share of its steps whose gradient was clipped (0 does not clip)."""
    clipped = sum(norm > clip_norm for norm in norms) if clip_norm else 0
    return {
        "final_loss": statistics.mean(losses[-20:]),
        "worst_loss": max(losses[50:] or losses),
        "median_norm": statistics.median(norms),
        "largest_norm": max(norms),
        "clipped": clipped / len(norms),
    }


def thinned(values: list[float], points: int = 60) -> list[float]:
    """Means of windows, `points` or a few less: what a curve needs."""
    window = math.ceil(len(values) / points)
    return [round(statistics.mean(values[i : i + window]), 5) for i in range(0, len(values), window)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reid_synthetic"))
    parser.add_argument("--data", type=Path, help="synthetic set, drawn when missing (default: OUT/data)")
    parser.add_argument("--report", action="store_true", help="only write tables and curves again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a run")
    parser.add_argument("--minutes", type=float, help="stop then, report what is there; the same call goes on")
    parser.add_argument("--data-seed", type=int, default=1, help="the recipe was tuned on the set of seed 0")
    parser.add_argument("--identities", type=int, default=150, help="train and test together")
    parser.add_argument("--images", type=int, default=16, help="shots of an identity")
    parser.add_argument("--blindness", type=float, default=0.5, help="how often a sensor is blind in part of a shot")
    parser.add_argument("--clutter", type=float, default=3.0, help="mean number of unrelated things in a shot")
    parser.add_argument("--image-size", type=int, nargs=2, default=[128, 64], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--encoder", default="mini")
    parser.add_argument("--stride", type=int, default=8, help="8: 128 patches at 128 x 64, the published number")
    parser.add_argument("--freeze-blocks", type=int, default=0, help="first blocks that do not learn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--backbone-scale", type=float, default=0.3)
    parser.add_argument(
        "--clip-norm",
        type=float,
        default=20.0,
        help="largest gradient norm: above that of every variant (11.2 was seen), else it acts on some of them alone",
    )
    parser.add_argument("--identity-weight", type=float, default=1.0)
    parser.add_argument("--triplet-space", choices=("raw", "unit"), default="unit")
    parser.add_argument("--modality-dropout", type=float, nargs="+", default=[0.0], help="every run with each of these")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    options = parser.parse_args(arguments)
    options.data = options.data or options.out / "data"
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, then write what was found; 1 if some runs are still missing."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    missing = 0
    if not options.report:
        check_recipe(options)
        draw_set(options)
        missing = train_missing(options)
    runs = finished(options)
    if not runs:
        print(f"No run in {options.out} has finished: nothing to report.", file=sys.stderr)
        return 1
    recipe = json.loads((options.out / "recipe.json").read_text(encoding="utf-8"))
    results = {"recipe": recipe, "torch": torch.__version__, "runs": runs}
    (options.out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    text = report(results, list(VARIANTS))
    (options.out / "results.md").write_text(text, encoding="utf-8")
    print(text)
    if not curves(results, list(VARIANTS), options.out):
        print("matplotlib is not installed: no curves.png; run again with --report where it is.", file=sys.stderr)
    if missing:
        print(f"{missing} runs are missing: the same call goes on with them.", file=sys.stderr)
    return 1 if missing else 0


def check_recipe(options: argparse.Namespace) -> None:
    """Note the settings that decide the outcome; refuse to mix runs of other ones."""
    path = options.out / "recipe.json"
    recipe = {name: value for name, value in vars(options).items() if name not in FREE}
    if path.exists() and (before := json.loads(path.read_text(encoding="utf-8"))) != recipe:
        changed = sorted(name for name in recipe if before.get(name) != recipe[name])
        raise SystemExit(f"{options.out} holds runs with another {', '.join(changed)}: choose another --out.")
    path.write_text(json.dumps(recipe), encoding="utf-8")


def draw_set(options: argparse.Namespace) -> None:
    """The synthetic set and its truth, unless they are there."""
    make_synthetic(
        options.data,
        options.identities,
        options.images,
        seed=options.data_seed,
        size=tuple(options.image_size),
        blindness=options.blindness,
        clutter=options.clutter,
        workers=options.processes,
    )
    if not truth_path(options).exists():
        dataset = load_dataset(from_mapping(settings(options, RunKey("concat", 0.0, 0))).data)
        names = [record.name for record in (*dataset.train, *dataset.query, *dataset.gallery)]
        write_truth(truth_path(options), options.data, names, options.processes)


def truth_path(options: argparse.Namespace) -> Path:
    """Where the truth of the set lies: in --out, never in the set."""
    path: Path = options.out / "truth.npz"
    return path


def finished(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs so far, in a fixed order, each once."""
    runs = read_metrics(options.out / "runs.jsonl")
    found = {RunKey(run["variant"], run["dropout"], run["seed"]): run for run in runs}
    return [found[job] for job in sorted(found, key=lambda job: (job.dropout, list(VARIANTS).index(job.variant), job))]


def jobs(options: argparse.Namespace) -> list[RunKey]:
    """What is missing: a seed at a time, so that a cut experiment has all variants; in it the longest first."""
    done = {RunKey(run["variant"], run["dropout"], run["seed"]) for run in finished(options)}
    wanted = [
        RunKey(variant, dropout, seed)
        for seed in range(options.seeds)
        for variant in sorted(options.variants, key=SLOWEST_FIRST.index)
        for dropout in options.modality_dropout
    ]
    return [job for job in wanted if job not in done]


def attempt(options: argparse.Namespace, job: RunKey) -> dict[str, Any] | str:
    """`one_run`, or why it failed: the others go on."""
    try:
        return one_run(options, job)
    except Exception:
        return traceback.format_exc(limit=-3)


def attempts(options: argparse.Namespace, todo: list[RunKey]) -> Iterator[tuple[RunKey, dict[str, Any] | str]]:
    """Every job's outcome as it comes, `options.processes` at a time, until the time is over."""
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    if options.processes == 1:
        for job in todo:
            if time.monotonic() < deadline:
                yield job, attempt(options, job)
        return
    # Spawned: a forked process cannot use CUDA.
    pool = ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(attempt, options, job): job for job in todo}
        left = None if deadline == math.inf else max(1.0, deadline - time.monotonic())
        for future in as_completed(futures, left):
            yield futures[future], future.result()
    except OutOfTime:
        print("The time is over: runs on the way stop here.", file=sys.stderr)
    except BrokenProcessPool as error:
        print(f"A process died ({error}): the runs on the way are lost, those finished are not.", file=sys.stderr)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        stop_children()


def stop_children() -> None:
    """End what is still running: a run that is told to stop saves where it is."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    limit = time.monotonic() + 10
    for child in children:
        child.join(max(0.0, limit - time.monotonic()))
        child.kill()


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line; one that a kill cut off stays alone on its own."""
    with path.open("ab+") as file:
        cut = file.tell() > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * cut + json.dumps(line).encode() + b"\n")


def train_missing(options: argparse.Namespace) -> int:
    """Run what is missing and write each run at once; returns how many are missing still."""
    todo = jobs(options)
    done = 0
    for job, outcome in attempts(options, todo):
        if isinstance(outcome, str):
            print(f"{job.name} FAILED:\n{outcome}", file=sys.stderr, flush=True)
            continue
        done += 1
        append(options.out / "runs.jsonl", outcome)
        full = [row["mAP"] for row in outcome["rows"] if len(row["present"]) > 2]
        print(
            f"{done}/{len(todo)} {job.name}: dev mAP {outcome['dev_mAP']:.1f}, test mAP {full[-1]:.1f}, "
            f"{outcome['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return len(todo) - done


if __name__ == "__main__":
    # A polite kill ends the processes of the runs too, and they save where they are.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
