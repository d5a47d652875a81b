"""`seps reid`: re-identification over several sensors (RGB, NIR, TIR).

  seps reid synth OUT                         draw a synthetic set
  seps reid train --out RUN                   train, or continue the run in RUN
  seps reid eval RUN                          mAP and CMC on query and gallery; --missing: also without some sensors
  seps reid report --config FILE --out DIR    several seeds: the papers' figures, ours and the difference
  seps reid show RUN --out DIR                pictures: ranked lists, kept patches; --features: gradients, a map
  seps reid threshold RUN --out DIR           the distance up to which two shots count as the same one
  seps reid export RUN -o DIR                 the network as ONNX
  seps reid features RUN FOLDER --out FILE    features of a folder of pictures

Settings come from --config FILE.yaml (configs/reid/ has presets) and from --section.name value, which overrides it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import default_device, device, fraction, input_file, non_negative, output_folder, positive
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.parser import Parser, add_explain, add_plugins
from seps.cli.shared.reid_report import add_report
from seps.cli.shared.reid_show import add_show
from seps.cli.shared.reid_use import DATA_SETTINGS, READING, add_commands, add_pattern, add_run, load_run, say_report
from seps.cli.shared.text import print_json, printable, say, typed
from seps.reid.config import ReidConfig

if TYPE_CHECKING:
    from seps.reid.data import ReidDataset
    from seps.reid.evaluate import Case, CaseResult
    from seps.reid.trained import TrainedReid


def run(options: argparse.Namespace) -> int:
    """Run one of the sub-commands; returns the exit status."""
    from seps.plugins import load_plugins

    load_plugins(getattr(options, "plugin", []))
    action: Callable[[argparse.Namespace], int] = options.action
    return action(options)


def add_options(parser: Parser) -> None:
    """The options of `seps reid` and its sub-commands."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(action=_help)
    commands = parser.add_subparsers(dest="command", metavar="synth|train|eval|report|show|threshold|export|features")

    synth = commands.add_parser("synth", help="draw a synthetic RGB / NIR / TIR set")
    synth.add_argument("out", type=output_folder, help="write the set to this new folder")
    for name, kind, default, text in (
        ("identities", positive, 150, "draw this many people, 4 or more, for training and test together"),
        ("images", positive, 16, "draw this many shots of each, 3 or more, spread over the cameras"),
        ("cameras", positive, 4, "draw from this many cameras"),
        ("seed", non_negative, 0, "seed the random draws; the same seed draws the same files"),
        ("height", positive, 256, "draw images of this height, in pixels"),
        ("width", positive, 128, "draw images of this width, in pixels"),
        ("workers", positive, 2, "draw with this many processes"),
    ):
        synth.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)")
    synth.add_argument(
        "--blindness",
        type=fraction,
        default=0.5,
        help="set the probability that a part of an image is blank, 0 to 1 (default: %(default)s)",
    )
    synth.add_argument(
        "--texts", action="store_true", help="write a text of each shot, too, to texts.jsonl (data.texts)"
    )
    synth.add_argument("--json", action="store_true", help="print the manifest as JSON")
    synth.set_defaults(action=_synth)

    train = commands.add_parser("train", help="train, or continue a run", settings=ReidConfig)
    train.add_argument(
        "--config",
        type=input_file,
        help="read settings from this YAML file, such as those of configs/reid/ or of DeMo",
    )
    train.add_argument(
        "demo", nargs="*", metavar="KEY VALUE", help="override options of a file of DeMo: MODEL.DIRECT 0"
    )
    train.add_argument(
        "--out", type=output_folder, required=True, help="write the run to this folder, or continue the run there"
    )
    train.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    train.add_argument("--fresh", action="store_true", help="stop with an error if --out contains a run already")
    add_plugins(train)
    add_explain(train)
    train.add_argument("--json", action="store_true", help="print the result as JSON")
    train.set_defaults(action=_train)

    of_run = (*READING, "data.rerank")
    measure = commands.add_parser(
        "eval", help="mAP and CMC on query and gallery", settings=DATA_SETTINGS, of_run=of_run
    )
    add_run(measure)
    measure.add_argument(
        "--missing",
        action="store_true",
        help="evaluate every set of missing sensors, too, with both settings of model.missing",
    )
    measure.add_argument(
        "--any",
        action="store_true",
        help="evaluate every set of sensors as query against every set as gallery: matrices of mAP and"
        " R1 (loss.shared)",
    )
    add_pattern(measure)
    measure.add_argument(
        "--texts",
        choices=("own", "gallery", "none"),
        help="use texts of all shots, of the gallery alone, or none, for a model that reads texts (default: own)",
    )
    measure.add_argument("--rerank", action="store_true", help="add rows with k-reciprocal re-ranking")
    measure.add_argument("--cost", action="store_true", help="print parameters, FLOPs and throughput, too")
    measure.add_argument("--json", action="store_true", help="print the figures as JSON")
    measure.add_argument("--per-query", action="store_true", help="add the average precision of every query to --json")
    measure.set_defaults(action=_eval)

    add_report(commands)
    add_show(commands)
    add_commands(commands)


def _help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    return 0


def _synth(options: argparse.Namespace) -> int:
    from seps.cli.shared.progress import count_progress
    from seps.synthetic import make_synthetic

    with count_progress("drawing") as progress:
        manifest = make_synthetic(
            options.out,
            options.identities,
            options.images,
            options.cameras,
            options.seed,
            (options.height, options.width),
            blindness=options.blindness,
            workers=options.workers,
            progress=progress,
        )
    if options.texts:
        from seps.synthetic.words import write_texts

        texts = write_texts(options.out, manifest)
    if options.json:
        print_json(manifest, 2)
    else:
        shots = ", ".join(f"{split} {count}" for split, count in manifest["shots"].items())
        print(f"{printable(options.out)}: {shots} shots in {' / '.join(manifest['modalities'])}.")
        if options.texts:
            print(printable(texts))
    return 0


def _train(options: argparse.Namespace) -> int:
    from seps.cli.shared.progress import training_progress
    from seps.reid.run import train_reid
    from seps.reid.task import load_dataset
    from seps.training import from_environment, process_group

    config = _settings(options)
    dataset = load_dataset(config.data)
    with process_group(from_environment(os.environ)) as info:
        if info.rank == 0:
            say_report(dataset)
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
        print(f"Next: seps reid eval {typed(options.out)} --missing")
    else:
        print(f"{result.step} steps. mAP on held-out training identities: best {result.best_score:.1f}.")
        print(f"Next: seps reid eval {typed(options.out)} --missing")
    return EXIT_INTERRUPTED if result.interrupted else 0


def _settings(options: argparse.Namespace) -> ReidConfig:
    """The settings of a training run, from a file of ours or of DeMo's; of the latter each key is answered."""
    from seps import settings
    from seps.method.config import ConfigError
    from seps.reid.demo.settings import HINT, demo_settings, is_demo

    values = settings.read_yaml(Path(options.config)) if options.config else {}
    if is_demo(values):
        made = demo_settings(values, options.demo, str(options.config))
        config = settings.load(ReidConfig, overrides={**made.values, **options.settings})
        if int(os.environ.get("RANK", "0")) == 0:
            say(f"{printable(options.config)} is a configuration of DeMo's. What its keys are here:")
            say("\n".join(f"  {printable(line)}" for line in made.mapped))
            say("Without a counterpart here:")
            say("\n".join(f"  {printable(line)}" for line in made.left_out) or "  nothing")
            say(f"The settings it makes, as a file for --config:\n{settings.to_yaml(config, changed=True)}")
        return config
    if options.demo:
        raise ConfigError(f"{' '.join(options.demo)!r} are no options of this command. {HINT}")
    try:
        return settings.load(ReidConfig, options.config, options.settings)
    except ConfigError as error:
        if set(values) <= set(ReidConfig.__dataclass_fields__):
            raise
        raise ConfigError(f"{error} {HINT}") from error


def _eval(options: argparse.Namespace) -> int:
    from seps.cli.shared.progress import count_progress
    from seps.reid.data.texts import copied_texts
    from seps.reid.evaluate import all_cases, cost, default_cases, evaluate, throughput
    from seps.reid.task import make_reader

    if options.per_query and not options.json:
        raise ValueError("--per-query is part of the JSON: give --json too.")
    if options.any and (options.missing or options.rerank or options.cost):
        raise ValueError("--any is an evaluation of its own: leave --missing, --rerank and --cost out.")
    trained, config, dataset = load_run(options)
    model = trained.model
    if options.texts and model.text_head is None:
        raise ValueError("--texts: this model reads no texts (model.text none); leave it out.")
    if options.any:
        return _eval_pairs(options, trained, config, dataset)
    cases: list[Case] = (
        all_cases(model, options.pattern, options.texts)
        if options.missing
        else default_cases(model, pattern=options.pattern, texts=options.texts)
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
        copies = {} if model.text_head is None else {"copied_texts": len(copied_texts(dataset))}
        print_json({"checkpoint": str(trained.checkpoint), "results": rows, "cost": costs, **copies}, 2)
    else:
        _table(dataset, results, costs)
    return 0


def _eval_pairs(options: argparse.Namespace, trained: TrainedReid, config: ReidConfig, dataset: ReidDataset) -> int:
    """Any sensor to any sensor: a matrix of mAP and one of R1."""
    from seps.cli.shared.progress import count_progress
    from seps.reid.any_to_any import evaluate_pairs, matrix_of
    from seps.reid.task import make_reader

    with make_reader(config, dataset) as reader, count_progress("features") as progress:
        results = evaluate_pairs(
            trained.model,
            dataset,
            reader,
            pattern=options.pattern,
            batch_size=options.batch_size,
            progress=progress,
        )
    if options.json:
        print_json({"checkpoint": str(trained.checkpoint), "results": [result.row() for result in results]}, 2)
        return 0
    names = list(dict.fromkeys("+".join(result.query) for result in results))
    for figure, title in (("mAP", "mAP"), ("r1", "R1")):
        _matrix(f"{title}, query (rows) against gallery (columns)", names, matrix_of(results, figure))
    print("Sets without a common sensor are compared in the shared space (loss.shared).")
    return 0


def _matrix(title: str, names: Sequence[str], values: Sequence[Sequence[float]]) -> None:
    """A square table on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    # As text: a sensor is named by its folder, and rich would obey a name in brackets.
    table.add_column("")
    for name in names:
        table.add_column(Text(printable(name)), justify="right", min_width=4)
    for name, row in zip(names, values, strict=True):
        table.add_row(Text(printable(name)), *(f"{value:.1f}" for value in row))
    Console().print(table)


def _table(dataset: ReidDataset, results: Sequence[CaseResult], costs: dict[str, float]) -> None:
    """Figures as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from seps.reid.data.texts import copied_texts

    table = Table(title=f"{dataset.name}: {len(dataset.query)} queries, {len(dataset.gallery)} gallery shots")
    texts = any(result.case.texts != "none" for result in results)
    words = ("sensors", "missing ones", "features", *(("texts",) if texts else ()))
    for name in (*words, "mAP", "mINP", "R1", "R5", "R10"):
        table.add_column(name, justify="left" if name in words else "right")
    kinds = {1: "original", 2: "SDTPS", 3: "both"}
    for result in results:
        row, case = result.row(), result.case
        figures = [f"{row[name]:.1f}" if name in row else "-" for name in ("mAP", "mINP", "r1", "r5", "r10")]
        handling = "-" if set(case.present) == set(dataset.modalities) else case.missing
        again = ", re-ranked" if result.reranked else ""
        # As text: a sensor is named by its folder, and rich would obey a name in brackets.
        sensors = Text(printable(" + ".join(case.present)))
        table.add_row(sensors, handling, kinds[case.pattern] + again, *([case.texts] if texts else []), *figures)
    console = Console()
    console.print(table)
    counted = results[0].metrics.valid_queries
    if counted < len(dataset.query):
        console.print(
            f"{len(dataset.query) - counted} queries have no match in another {dataset.excludes} and are not counted.",
            highlight=False,
        )
    copies = copied_texts(dataset) if any(result.case.texts == "own" for result in results) else []
    if copies:
        console.print(
            f"{len(copies)} queries have, word for word, the text of a gallery shot that they should find "
            "(data.text_copies allow): the figures hold what was written of the gallery.",
            highlight=False,
        )
    if costs:
        console.print(
            f"{costs['parameters_m']:.2f} M parameters (SDTPS {costs['sdtps_parameters_m']:.2f} M), "
            f"{costs['gflops']:.2f} GFLOPs ({costs['gmacs']:.2f} G multiply-adds) and "
            f"{1 / costs['samples_per_second']:.3f} s per sample of all sensors.",
            highlight=False,
        )
