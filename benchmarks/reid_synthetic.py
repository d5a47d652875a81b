"""Does cross-modal patch selection help? Concatenation against SDTPS on the synthetic set, several seeds.

    python benchmarks/reid_synthetic.py --out results/reid --device cuda --processes 4
    python benchmarks/reid_synthetic.py --out results/reid --report      (tables and curves again, no training)

Every variant is trained with the same recipe, data, batches and number of steps; checkpoints are chosen by mAP on
held-out training identities; the test set is looked at once, at the end. Writes results.json, results.md and, where
matplotlib is installed, curves.png into --out. Needs torch, numpy, Pillow, PyYAML, safetensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from seps.reid.config import from_mapping
from seps.reid.data import make_synthetic
from seps.reid.evaluate import Case, all_cases, cost, evaluate
from seps.reid.task import ReidTask, load_dataset
from seps.training import load_weights, train
from seps.training.tracking import read_metrics

VARIANTS: dict[str, dict[str, Any]] = {
    "concat": {"fusion": "concat"},
    # Both branches, but nothing is left out: what the second branch alone brings.
    "keep-all": {"fusion": "sdtps", "sparse_ratio": 1.0, "aggr_ratio": 0.2},
    "topk": {"fusion": "sdtps", "decision": "topk"},
    "gumbel": {"fusion": "sdtps", "decision": "gumbel"},
    "binary": {"fusion": "sdtps", "decision": "binary"},
}


def settings(options: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
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
            **VARIANTS[variant],
        },
        # Published: cross-entropy x 0.25 and triplets of raw features, which collapse this encoder (synthetic.yaml).
        "loss": {
            "identity": options.identity_weight,
            "triplet_space": options.triplet_space,
            "modality_dropout": options.modality_dropout,
        },
        "train": {
            "epochs": options.epochs,
            "learning_rate": options.learning_rate,
            "backbone_lr_scale": options.backbone_scale,
            "warmup_fraction": 0.2,
            "clip_norm": 5.0,
            "precision": options.precision,
            "seed": seed,
            "eval_every": max(1, options.epochs // 6),
            "keep_last": 1,
            "workers": 2,
        },
    }


def one_run(options: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    """Train one variant with one seed and look at the test set in every case."""
    torch.set_num_threads(options.threads)
    config = from_mapping(settings(options, variant, seed))
    dataset = load_dataset(config.data)
    task = ReidTask(config, dataset)
    folder = options.out / "runs" / f"{variant}-{seed}"
    started = time.perf_counter()
    result = train(task, config.train, folder, device=options.device)
    seconds = time.perf_counter() - started
    if result.best_checkpoint is None:
        raise ValueError(f"{variant} with seed {seed} has no finite score.")
    task.model.load_state_dict(load_weights(result.best_checkpoint))
    cases: list[Case] = [case for pattern in task.model.patterns for case in all_cases(task.model, pattern)]
    rows = [found.row() for found in evaluate(task.model, dataset, task.reader, cases)]
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]
    task.reader.close()
    return {
        "variant": variant,
        "seed": seed,
        "seconds": seconds,
        "steps": result.step,
        "dev_mAP": result.best_score,
        "best_step": int(result.best_checkpoint.name.split("-")[-1]),
        "rows": rows,
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "cost": cost(task.model),
    }


def name_of(case: list[str]) -> str:
    """["RGB", "TI"] -> "RT"."""
    return "".join(sensor[0] for sensor in case)


def figures(runs: list[dict[str, Any]], variant: str, pattern: int, key: str = "mAP") -> dict[tuple[str, str], Any]:
    """(case, handling) -> that figure of every seed."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["variant"] == variant:
            for row in run["rows"]:
                if row["pattern"] == pattern:
                    found.setdefault((name_of(row["present"]), row["missing"]), []).append(row[key])
    return found


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {deviation:.1f}"


def widest(variant: str) -> int:
    """The features a variant is judged by: all it has."""
    return 1 if variant == "concat" else 3


def report(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    runs = results["runs"]
    variants = [name for name in VARIANTS if any(run["variant"] == name for run in runs)]
    tables = {variant: figures(runs, variant, widest(variant)) for variant in variants}
    cases = list(dict.fromkeys(case for case, _ in tables[variants[0]]))
    text = ["# Synthetic re-identification: concatenation against SDTPS", "", f"Settings: `{results['options']}`", ""]
    text += ["mAP on the test set, mean ± standard deviation over the seeds; features: all a variant has.", ""]
    text += ["| sensors | missing ones | " + " | ".join(variants) + " |", "|---|---|" + "---:|" * len(variants)]
    for case in cases:
        for handling in ("zero", "leave-out"):
            if (case, handling) in tables[variants[0]]:
                cells = " | ".join(spread(tables[variant][case, handling]) for variant in variants)
                text.append(f"| {case} | {'-' if case == cases[0] else handling} | {cells} |")
    return "\n".join([*text, "", *pattern_table(runs, variants, cases[0]), "", *stability(runs, variants), "",
                      *verdict(tables, variants, cases)]) + "\n"  # fmt: skip


def pattern_table(runs: list[dict[str, Any]], variants: list[str], full: str) -> list[str]:
    """All sensors: each branch by itself, R1, and what it costs."""
    lines = ["| variant | original mAP | SDTPS mAP | both mAP | R1 | parameters (M) | GFLOPs | s a run |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for variant in variants:
        cells = []
        for pattern in (1, 2, 3):
            values = figures(runs, variant, pattern).get((full, "leave-out"))
            cells.append(spread(values) if values else "-")
        first = spread(figures(runs, variant, widest(variant), "r1")[full, "leave-out"])
        own = [run for run in runs if run["variant"] == variant]
        price = own[0]["cost"]
        seconds = statistics.mean(run["seconds"] for run in own)
        cells += [first, f"{price['parameters_m']:.2f}", f"{price['gflops']:.3f}", f"{seconds:.0f}"]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return lines


def stability(runs: list[dict[str, Any]], variants: list[str]) -> list[str]:
    """How calmly each variant trained."""
    lines = ["| variant | final loss | median gradient norm | largest gradient norm | largest loss after step 50 |"]
    lines.append("|---|---:|---:|---:|---:|")
    for variant in variants:
        own = [run for run in runs if run["variant"] == variant]
        final = statistics.mean(statistics.mean(run["loss"][-20:]) for run in own)
        middle = statistics.mean(statistics.median(run["grad_norm"]) for run in own)
        largest = max(max(run["grad_norm"]) for run in own)
        worst = max(max(run["loss"][50:] or run["loss"]) for run in own)
        lines.append(f"| {variant} | {final:.3f} | {middle:.2f} | {largest:.1f} | {worst:.2f} |")
    return lines


def verdict(tables: dict[str, Any], variants: list[str], cases: list[str]) -> list[str]:
    """What was asked, answered by the figures."""
    if "concat" not in variants:
        return []
    mean = {v: {key: statistics.mean(values) for key, values in tables[v].items()} for v in variants}
    lines = ["Against concatenation (its own figures in each case with the same handling):", ""]
    for variant in variants:
        if variant == "concat":
            continue
        gain = mean[variant][cases[0], "leave-out"] - mean["concat"][cases[0], "leave-out"]
        better = {
            handling: sum(mean[variant][case, handling] > mean["concat"][case, handling] for case in cases[1:])
            for handling in ("zero", "leave-out")
        }
        ours = sum(mean[variant][case, "leave-out"] > mean[variant][case, "zero"] for case in cases[1:])
        published = sum(mean[variant][case, "leave-out"] > mean["concat"][case, "zero"] for case in cases[1:])
        lines.append(
            f"- {variant}: {gain:+.1f} mAP with all sensors (asked: +3); better in {better['leave-out']} of "
            f"{len(cases) - 1} missing cases with leave-out, {better['zero']} with zero images (asked: 5); leave-out "
            f"above zero images in {ours} of {len(cases) - 1}; above the published way (concatenation, zero images) "
            f"in {published}."
        )
    return lines


def curves(results: dict[str, Any], path: Path) -> bool:
    """Loss and gradient norm by step, mean of the seeds; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for variant in VARIANTS:
        own = [run for run in results["runs"] if run["variant"] == variant]
        for axis, key in zip(axes, ("loss", "grad_norm"), strict=True):
            if own:
                series = torch.tensor([run[key] for run in own]).mean(dim=0)
                window = max(1, len(series) // 60)
                smooth = series[: len(series) // window * window].view(-1, window).mean(dim=1)
                axis.plot([window * (i + 1) for i in range(len(smooth))], smooth.tolist(), label=variant)
    for axis, title in zip(axes, ("training loss", "gradient norm before clipping"), strict=True):
        axis.set(xlabel="step", title=title)
        axis.legend()
    axes[1].set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return True


def parse() -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/reid_synthetic"))
    parser.add_argument("--data", type=Path, help="synthetic set, drawn when missing (default: OUT/data)")
    parser.add_argument("--report", action="store_true", help="only write tables and curves again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a run")
    parser.add_argument("--identities", type=int, default=150, help="train and test together")
    parser.add_argument("--images", type=int, default=16, help="shots of an identity")
    parser.add_argument("--kind", choices=("people", "vehicles"), default="people")
    parser.add_argument("--image-size", type=int, nargs=2, default=(128, 64), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--encoder", default="mini")
    parser.add_argument("--stride", type=int, default=8, help="8: 128 patches at 128 x 64, the published number")
    parser.add_argument("--freeze-blocks", type=int, default=0, help="first blocks that do not learn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--backbone-scale", type=float, default=0.3)
    parser.add_argument("--identity-weight", type=float, default=1.0)
    parser.add_argument("--triplet-space", choices=("raw", "unit"), default="unit")
    parser.add_argument("--modality-dropout", type=float, default=0.0)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    options = parser.parse_args()
    options.data = options.data or options.out / "data"
    return options


def main() -> int:
    """Train everything, then write what was found."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    if options.report:
        results = json.loads(path.read_text(encoding="utf-8"))
    else:
        size = tuple(options.image_size)
        make_synthetic(
            options.data, options.identities, options.images, kind=options.kind, size=size, workers=options.processes
        )
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        results = {"options": plain, "torch": torch.__version__, "runs": train_all(options)}
        path.write_text(json.dumps(results), encoding="utf-8")
    text = report(results)
    (options.out / "results.md").write_text(text, encoding="utf-8")
    print(text)
    if not curves(results, options.out / "curves.png"):
        print("matplotlib is not installed: no curves.png; run again with --report where it is.", file=sys.stderr)
    return 0


def train_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every variant with every seed, `options.processes` at a time, in a fixed order."""
    jobs = [(variant, seed) for seed in range(options.seeds) for variant in options.variants]
    done: dict[tuple[str, int], dict[str, Any]] = {}

    def note(run: dict[str, Any]) -> None:
        full = [row["mAP"] for row in run["rows"] if len(row["present"]) > 2]
        print(
            f"{run['variant']} seed {run['seed']}: dev mAP {run['dev_mAP']:.1f}, test mAP {full[-1]:.1f}, "
            f"{run['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    if options.processes == 1:
        for job in jobs:
            done[job] = one_run(options, *job)
            note(done[job])
    else:
        # Spawned: a forked process cannot use CUDA.
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(one_run, options, *job): job for job in jobs}
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                note(done[futures[future]])
    return [done[job] for job in jobs]


if __name__ == "__main__":
    sys.exit(main())
