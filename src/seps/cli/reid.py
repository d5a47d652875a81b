"""`seps reid`: re-identification over several sensors (RGB, NIR, TIR).

  seps reid synth OUT            draw a synthetic set
  seps reid train --out RUN      train, or continue the run in RUN
  seps reid eval RUN             figures on query and gallery, with sensors missing by choice
  seps reid show RUN --out DIR   pictures: ranked lists, and the patches that were kept
  seps reid threshold RUN        a distance for "the same one" at a false-accept rate, and its ROC
  seps reid export RUN -o DIR    the network as ONNX
  seps reid features RUN FOLDER  features of a folder of pictures, to a file

Settings come from --config FILE.yaml (configs/reid/ has presets) and from --section.name value, which wins.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import default_device, device, fraction, input_file, non_negative, output_folder, positive
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.parser import Parser
from seps.cli.shared.reid_use import add_commands
from seps.cli.shared.text import print_json, say
from seps.reid.config import ReidConfig, ReidDataConfig

if TYPE_CHECKING:
    from seps.reid.data import ReidDataset
    from seps.reid.evaluate import Case, CaseResult
    from seps.reid.run import TrainedReid

_DATA_SETTINGS = make_dataclass("DataSettings", [("data", ReidDataConfig, field(default_factory=ReidDataConfig))])
"""What may be set beside a trained model: the `data` section alone."""


def run(options: argparse.Namespace) -> int:
    """Run one of the sub-commands; returns the exit status."""
    action: Callable[[argparse.Namespace], int] = options.action
    return action(options)


def add_options(parser: Parser) -> None:
    """The options of `seps reid` and its sub-commands."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(action=_help)
    commands = parser.add_subparsers(dest="command", metavar="synth|train|eval|show|threshold|export|features")

    synth = commands.add_parser("synth", help="draw a synthetic RGB / NIR / TIR set")
    synth.add_argument("out", type=output_folder, help="folder to make")
    for name, kind, default, text in (
        ("identities", positive, 150, "people, train and test together"),
        ("images", positive, 16, "shots of each"),
        ("cameras", positive, 4, "cameras"),
        ("seed", non_negative, 0, "the same seed draws the same files"),
        ("height", positive, 256, "pixels"),
        ("width", positive, 128, "pixels"),
        ("workers", positive, 2, "processes that draw"),
    ):
        synth.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)")
    synth.add_argument("--kind", choices=("people", "vehicles"), default="people", help="people; vehicles are refused")
    synth.add_argument("--blindness", type=fraction, default=0.5, help="how often a sensor is blind in part")
    synth.add_argument("--json", action="store_true", help="print the manifest as JSON")
    synth.set_defaults(action=_synth)

    train = commands.add_parser("train", help="train, or continue a run", settings=ReidConfig)
    train.add_argument("--config", type=input_file, help="YAML settings")
    train.add_argument("--out", type=output_folder, required=True, help="run folder")
    train.add_argument("--device", type=device, help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    train.add_argument("--fresh", action="store_true", help="refuse to continue a run that is there")
    train.add_argument("--json", action="store_true", help="print the result as JSON")
    train.set_defaults(action=_train)

    measure = commands.add_parser("eval", help="figures on query and gallery", settings=_DATA_SETTINGS)
    _add_run(measure)
    measure.add_argument("--missing", action="store_true", help="every missing-sensor case, both handlings")
    measure.add_argument("--pattern", type=int, choices=(1, 2, 3), help="1 original, 2 SDTPS, 3 both")
    measure.add_argument("--rerank", action="store_true", help="also with k-reciprocal re-ranking")
    measure.add_argument("--cost", action="store_true", help="also parameters, FLOPs and throughput")
    measure.add_argument("--json", action="store_true", help="print the figures as JSON")
    measure.add_argument("--per-query", action="store_true", help="with --json: average precision of every query")
    measure.set_defaults(action=_eval)

    show = commands.add_parser("show", help="pictures: what was found and kept", settings=_DATA_SETTINGS)
    _add_run(show)
    show.add_argument("--out", type=output_folder, required=True, help="folder for the pictures")
    show.add_argument("--queries", type=positive, default=6, help="rows (default: %(default)s)")
    show.add_argument("--places", type=positive, default=5, help="gallery shots per row (default: %(default)s)")
    show.set_defaults(action=_show)
    add_commands(commands, _add_run, _DATA_SETTINGS, _load)


def _help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run folder of seps reid train")
    parser.add_argument("--which", choices=("best", "last"), default="best", help="checkpoint (default: best)")
    parser.add_argument("--device", type=device, help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--batch-size", type=positive, default=64, help="samples at once (default: %(default)s)")


def _synth(options: argparse.Namespace) -> int:
    from seps.cli.shared.progress import count_progress
    from seps.reid.synthetic import make_synthetic

    with count_progress("drawing") as progress:
        manifest = make_synthetic(
            options.out,
            options.identities,
            options.images,
            options.cameras,
            options.seed,
            options.kind,
            (options.height, options.width),
            blindness=options.blindness,
            workers=options.workers,
            progress=progress,
        )
    if options.json:
        print_json(manifest, 2)
    else:
        shots = ", ".join(f"{split} {count}" for split, count in manifest["shots"].items())
        print(f"{options.out}: {shots} shots in {' / '.join(manifest['modalities'])}.")
    return 0


def _train(options: argparse.Namespace) -> int:
    from seps import settings
    from seps.cli.shared.progress import training_progress
    from seps.reid.run import train_reid
    from seps.reid.task import load_dataset
    from seps.training import from_environment, process_group

    config = settings.load(ReidConfig, options.config, options.settings)
    dataset = load_dataset(config.data)
    with process_group(from_environment(os.environ)) as info:
        if info.rank == 0:
            _say_report(dataset)
        device = options.device or (str(info.device) if info.world > 1 else default_device())
        result = train_reid(
            config,
            dataset,
            options.out,
            distributed=info,
            device=device,
            resume=not options.fresh,
            progress=training_progress(),
            log=say,
        )
    if info.rank:
        return 0
    figures = {name: round(value, 3) for name, value in result.metrics.items()}
    if options.json:
        best = str(result.best_checkpoint) if result.best_checkpoint else None
        state = {"step": result.step, "total_steps": result.total_steps, "interrupted": result.interrupted}
        print_json({**state, "best_score": result.best_score, "best_checkpoint": best, "last": figures}, None)
    elif result.interrupted:
        print(f"Stopped and saved after step {result.step} of {result.total_steps}; the same command continues.")
    elif not config.data.holdout:
        print(f"{result.step} steps. No identity was held out: the last checkpoint is the model.")
        print(f"Next: seps reid eval {options.out} --missing")
    else:
        print(f"{result.step} steps. mAP on held-out training identities: best {result.best_score:.1f}.")
        print(f"Next: seps reid eval {options.out} --missing")
    return EXIT_INTERRUPTED if result.interrupted else 0


def _eval(options: argparse.Namespace) -> int:
    from seps.cli.shared.progress import count_progress
    from seps.reid.evaluate import all_cases, cost, default_cases, evaluate, throughput
    from seps.reid.task import make_reader

    if options.per_query and not options.json:
        raise ValueError("--per-query is part of the JSON: give --json too.")
    trained, config, dataset = _load(options)
    model = trained.model
    cases: list[Case] = (
        all_cases(model, options.pattern) if options.missing else default_cases(model, pattern=options.pattern)
    )
    with make_reader(config, dataset) as reader, count_progress("features") as progress:
        results = evaluate(
            model,
            dataset,
            reader,
            cases,
            batch_size=options.batch_size,
            use_rerank=options.rerank,
            neighbours=config.data.rerank,
            progress=progress,
        )
    costs = {**cost(model), "samples_per_second": throughput(model)} if options.cost else {}
    if options.json:
        rows = [
            {**result.row(), **({"queries": result.per_query(dataset.query)} if options.per_query else {})}
            for result in results
        ]
        print_json({"checkpoint": str(trained.checkpoint), "results": rows, "cost": costs}, 2)
    else:
        _table(dataset, results, costs)
    return 0


def _table(dataset: ReidDataset, results: Sequence[CaseResult], costs: dict[str, float]) -> None:
    """Figures as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{dataset.name}: {len(dataset.query)} queries, {len(dataset.gallery)} gallery shots")
    for name in ("sensors", "missing ones", "features", "mAP", "mINP", "R1", "R5", "R10"):
        table.add_column(name, justify="left" if name in ("sensors", "missing ones", "features") else "right")
    kinds = {1: "original", 2: "SDTPS", 3: "both"}
    for result in results:
        row, case = result.row(), result.case
        figures = [f"{row[name]:.1f}" if name in row else "-" for name in ("mAP", "mINP", "r1", "r5", "r10")]
        handling = "-" if set(case.present) == set(dataset.modalities) else case.missing
        again = ", re-ranked" if result.reranked else ""
        table.add_row(" + ".join(case.present), handling, kinds[case.pattern] + again, *figures)
    console = Console()
    console.print(table)
    counted = results[0].metrics.valid_queries
    if counted < len(dataset.query):
        console.print(
            f"{len(dataset.query) - counted} queries have no match in another {dataset.excludes} and are not counted.",
            highlight=False,
        )
    if costs:
        console.print(
            f"{costs['parameters_m']:.2f} M parameters (SDTPS {costs['sdtps_parameters_m']:.2f} M), "
            f"{costs['gflops']:.2f} GFLOPs ({costs['gmacs']:.2f} G multiply-adds) and "
            f"{1 / costs['samples_per_second']:.3f} s per sample of all sensors.",
            highlight=False,
        )


def _show(options: argparse.Namespace) -> int:
    from seps.reid.pictures import kept_picture, ranked_picture, ranking
    from seps.reid.task import make_reader

    trained, config, dataset = _load(options)
    count = min(options.queries, len(dataset.query))
    # Spread over the set: neighbours in the list are often the same identity.
    queries = [number * len(dataset.query) // count for number in range(count)]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with make_reader(config, dataset) as reader:
        matrix = ranking(trained.model, dataset, reader, options.batch_size)
        pictures = {"ranked.png": ranked_picture(dataset, reader, matrix, queries, options.places)}
        if trained.model.sdtps is not None:
            shots = [dataset.query[i] for i in queries]
            pictures["kept.png"] = kept_picture(trained.model, dataset, reader, shots)
    for name, picture in pictures.items():
        picture.save(out / name)
        print(out / name)
    return 0


def _load(options: argparse.Namespace) -> tuple[TrainedReid, ReidConfig, ReidDataset]:
    """The trained model, its settings with the overrides of this call, and the data set."""
    from seps import settings
    from seps.reid.run import load_trained
    from seps.reid.task import load_dataset

    trained = load_trained(options.run, options.which, options.device or default_device())
    for name in options.settings:
        if not name.startswith("data."):
            raise ValueError(f"--{name}: a trained model takes data settings alone, such as --data.root FOLDER.")
    config = settings.load(ReidConfig, overrides={**trained.config.to_json(), **options.settings})
    dataset = load_dataset(config.data)
    _say_report(dataset)
    trained.check(dataset)
    return trained, config, dataset


def _say_report(dataset: ReidDataset) -> None:
    """What was left out of the data set, and identities that are both trained on and asked for."""
    if dataset.report.problems or dataset.report.shared_identities:
        say(dataset.report.summary())
