"""`seps compare`: train and measure a suite of variants over several seeds, and print the tables."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seps.cli.shared.argtypes import default_device, device, input_file, non_negative, output_folder, positive
from seps.cli.shared.errors import EXIT_USER_ERROR
from seps.cli.shared.parser import Parser, add_explain, add_plugins
from seps.cli.shared.text import say
from seps.files import read_json, write_text
from seps.plugins import load_plugins
from seps.retrieval.config import RunConfig

if TYPE_CHECKING:
    from seps.retrieval.experiments.compare import Trial
    from seps.retrieval.experiments.workers import Outcome

SUITE_NAMES = ("baselines", "ablation")  # as seps.retrieval.experiments.compare has them, whose import takes seconds
MACHINE_SETTINGS = ("chunk_size", "workers", "prefetch")
"""Of `train`: they may differ between the runs of one folder, so that a run out of memory can be made again."""


def run(options: argparse.Namespace) -> int:
    """Train what is not finished yet; results go to OUT/results.jsonl as they come, then OUT/table.md and plot.png."""
    missing = [name for name in ("config", "data", "dev") if not getattr(options, name)]
    if missing and not options.report:
        options.parser.error(f"the following arguments are required: {', '.join(f'--{name}' for name in missing)}")
    from seps.retrieval.experiments.compare import Trial
    from seps.retrieval.experiments.report import finished
    from seps.retrieval.experiments.suites import suite_with_own_rows

    load_plugins(options.plugin)
    suite = suite_with_own_rows(options.suite)
    names = options.only or list(suite)
    for option, given in (("--only", names), ("--against", options.against)):
        unknown = [name for name in given if name not in suite]
        if unknown:
            raise ValueError(
                f"{option} {' '.join(unknown)}: suite {options.suite} has no such entry, only {', '.join(suite)}."
            )
    out = Path(options.out)
    if options.report and not any(result["name"] in suite for result in finished(out / "results.jsonl")):
        raise ValueError(
            f"{out / 'results.jsonl'} holds no result of the suite {options.suite} yet: leave out --report, and they "
            "are made, or name another suite."
        )
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    if not options.report:
        _recipe(options, out)  # also where all is done already: other settings must not show these results
        done = {(result["name"], result["seed"]) for result in finished(out / "results.jsonl")}
        # All entries with the first seed come first, so that a run cut off leaves whole seeds.
        trials = [
            Trial(options.suite, name, seed) for seed in options.seeds for name in names if (name, seed) not in done
        ]
        failed = _run_trials(options, trials, out) if trials else 0
    _report(options.suite, out, options.against, names)
    return EXIT_USER_ERROR if failed else 0


def add_options(parser: Parser) -> None:
    """The options of `seps compare`."""
    parser.settings = RunConfig
    parser.add_argument(
        "--suite", choices=SUITE_NAMES, default="baselines", help="compare these entries (default: baselines)"
    )
    parser.add_argument(
        "--config", type=input_file, help="read the shared recipe from this YAML file, as for seps train"
    )
    parser.add_argument("--data", help="train on this data set, as for seps train")
    parser.add_argument("--dev", nargs="+", help="evaluate on these JSONL files")
    parser.add_argument("--out", type=output_folder, required=True, help="write the results to this folder")
    parser.add_argument(
        "--only", nargs="+", metavar="ENTRY", help="train only these entries (default: all of the suite)"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="ENTRY",
        help="compare the entries of --only with these, image by image, with p of a paired bootstrap",
    )
    add_plugins(parser)
    add_explain(parser)
    parser.add_argument(
        "--seeds",
        type=non_negative,
        nargs="+",
        default=[0, 1, 2],
        help="train each entry with these seeds (default: 0 1 2)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=1,
        help="run this many entries at a time, each in a separate process (default: 1)",
    )
    parser.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--scratch", type=output_folder, help="write checkpoints and decoded photos to this folder (default: OUT/runs)"
    )
    parser.add_argument("--keep-runs", action="store_true", help="keep the checkpoints of all runs")
    parser.add_argument(
        "--report", action="store_true", help="write tables and plot from OUT/results.jsonl, without training"
    )


def _recipe(options: argparse.Namespace, out: Path) -> RunConfig:
    """The recipe. Raises ValueError where `out` holds results of another one."""
    from seps.retrieval.experiments.report import finished
    from seps.retrieval.train.start import load_run

    recipe = load_run(options.config, {"data.train": options.data, "data.dev": options.dev, **options.settings})
    path = out / "recipe.json"
    # Without a result there is nothing to keep apart: a recipe that failed may be corrected.
    has_results = path.is_file() and finished(out / "results.jsonl")
    if has_results and _comparable(read_json(path)) != _comparable(_settings(options.suite, recipe)):
        raise ValueError(
            f"{out} holds results of another suite or recipe, or of other data (see {path}): use the same, or "
            "another --out."
        )
    return recipe


def _settings(suite: str, recipe: RunConfig) -> dict[str, Any]:
    """What is written down of a recipe: everything but where the data lies; of its files the names."""
    settings: dict[str, Any] = {"suite": suite, **json.loads(json.dumps(asdict(recipe)))}
    data = settings["data"]
    del data["images_root"]
    data["train"] = Path(data["train"]).name
    for name in ("dev", "dense"):
        data[name] = [Path(place).name for place in data[name]]
    return settings


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that change how a run computes and not what."""
    train = {name: value for name, value in settings.get("train", {}).items() if name not in MACHINE_SETTINGS}
    return {**settings, "train": train}


def _run_trials(options: argparse.Namespace, trials: Sequence[Trial], out: Path) -> int:
    """Run and write down what comes; returns how many runs failed."""
    failed = 0
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        if file.tell() and not (out / "results.jsonl").read_bytes().endswith(b"\n"):
            file.write("\n")
        for number, outcome in enumerate(_outcomes(options, trials, out), 1):
            place = f"[{number}/{len(trials)}] {outcome.trial.name} seed {outcome.trial.seed}"
            if outcome.result is None:
                failed += 1
                say(f"{place} failed: {outcome.reason}")
                continue
            result: dict[str, Any] = {**outcome.result, "processes": options.processes}
            file.write(json.dumps(result) + "\n")
            file.flush()
            figures = ", ".join(f"{key} {value:.1f}" for key, value in result["rsum"].items())
            say(f"{place}: {figures or 'the loss was not finite'} ({result.get('seconds', 0):.0f} s)")
    return failed


def _outcomes(options: argparse.Namespace, trials: Sequence[Trial], out: Path) -> Iterator[Outcome]:
    from seps.encoders import vision_encoder
    from seps.retrieval.experiments.workers import Workers
    from seps.retrieval.train.data import load_sets, read_data

    recipe = _recipe(options, out)
    runs = Path(options.scratch) if options.scratch else out / "runs"
    device = options.device or default_device()
    sets = load_sets(recipe)
    # A size that does not fit the encoder is refused here, before photos are decoded.
    size = vision_encoder(recipe.model.vision, image_size=recipe.model.image_size, pretrained=False).image_size
    shared = read_data(recipe, sets, size, say, folder=runs)
    written = json.dumps(_settings(options.suite, recipe), indent=1) + "\n"
    write_text(out / "recipe.json", written)
    try:
        # Also a single run at a time has a process of its own: if memory runs out the system ends that one alone.
        # The workers share the processor already; a pool of tokenizer threads in each would only be in the way.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with Workers(
            options.processes, shared, runs, device=device, keep=options.keep_runs, plugins=options.plugin
        ) as workers:
            yield from workers.run(trials)
    except InterruptedError as error:
        raise KeyboardInterrupt from error
    finally:
        for path in shared.files:
            path.unlink(missing_ok=True)


def _report(name: str, out: Path, others: Sequence[str], rows: Sequence[str]) -> None:
    from seps.retrieval.experiments.paired import against
    from seps.retrieval.experiments.report import finished, markdown, plot_differences
    from seps.retrieval.experiments.suites import suite_with_own_rows

    results, suite = finished(out / "results.jsonl"), suite_with_own_rows(name)
    table = markdown(results, suite)
    if others:
        table += "\n" + against(results, rows, others)
    write_text(out / "table.md", table)
    print(table)
    if plot_differences(results, suite, out / "plot.png"):
        say(f"The differences as a picture: {out / 'plot.png'}")
