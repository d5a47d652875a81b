"""Sub-commands of `seps reid` that put a trained model to use (threshold, export, features), and how all load one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seps.cli.shared.argtypes import (
    default_device,
    device,
    inner_fraction,
    input_folder,
    non_negative,
    output_file,
    output_folder,
    positive,
)
from seps.cli.shared.outputs import check_output, save_picture, write_output
from seps.cli.shared.parser import add_plugins
from seps.cli.shared.text import SHOWN_PROBLEMS, print_json, printable, say
from seps.reid.config import ReidConfig, ReidDataConfig

if TYPE_CHECKING:
    from seps.reid.data import ReidDataset
    from seps.reid.trained import TrainedReid

DATA_SETTINGS = make_dataclass("DataSettings", [("data", ReidDataConfig, field(default_factory=ReidDataConfig))])
"""What may be set beside a trained model: the `data` section alone."""
READING = (
    *("data.root", "data.layout", "data.modalities", "data.pattern", "data.labels", "data.texts", "data.text_copies"),
    *("data.on_problem", "data.verify_files", "data.threads", "data.cache_mib"),
)
"""Those of them that say which shots are read, and how."""
THRESHOLD, CURVE = "threshold.json", "roc.png"
_OURS = "asked_false_accept"
"""A key that every threshold.json has."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """The run folder, and how its model is used."""
    _add_checkpoint(parser)
    parser.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="compute this many samples at once (default: %(default)s)"
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="load this run of seps reid train, or this model folder")
    parser.add_argument(
        "--which",
        choices=("best", "last"),
        default="best",
        help="load the best or the last checkpoint of a run (default: best)",
    )
    add_plugins(parser)


def add_pattern(parser: argparse.ArgumentParser) -> None:
    """Which features of the model are taken."""
    text = "use these features: 1 original, 2 SDTPS, 3 both (default: the last that the model has)"
    parser.add_argument("--pattern", type=int, choices=(1, 2, 3), help=text)


def refuse_model_settings(given: Iterable[str]) -> None:
    """Raise ValueError for a setting that belongs to training; a trained model was built with its own."""
    for name in given:
        if not name.startswith("data."):
            raise ValueError(f"--{name}: a trained model takes data settings alone, such as --data.root FOLDER.")


def load_model(options: argparse.Namespace) -> tuple[TrainedReid, ReidConfig]:
    """The trained model, and its settings with the overrides of this call."""
    from seps import settings
    from seps.reid.run import load_trained

    refuse_model_settings(options.settings)
    trained = load_trained(options.run, options.which, options.device or default_device())
    return trained, settings.load(ReidConfig, overrides={**trained.config.to_json(), **options.settings})


def load_run(options: argparse.Namespace) -> tuple[TrainedReid, ReidConfig, ReidDataset]:
    """As `load_model`, and the data set."""
    from seps.reid.task import load_dataset

    trained, config = load_model(options)
    dataset = load_dataset(config.data)
    say_report(dataset)
    trained.check(dataset)
    return trained, config, dataset


def say_report(dataset: ReidDataset) -> None:
    """What was left out of the data set, and identities that are both trained on and asked for."""
    if dataset.report.problems or dataset.report.shared_identities:
        say(dataset.report.summary())


def _folder(text: str) -> Path:
    return Path(output_folder(text))


def add_commands(commands: Any) -> None:
    """Put the sub-commands beside the others."""
    threshold = commands.add_parser(
        "threshold",
        help="the distance up to which two shots count as the same one",
        settings=DATA_SETTINGS,
        of_run=[name for name in READING if name != "data.layout"],
    )
    add_run(threshold)
    threshold.add_argument("--out", type=_folder, required=True, help="write threshold.json and roc.png to this folder")
    threshold.add_argument(
        "--false-accept",
        type=inner_fraction,
        default=0.01,
        help="accept this fraction of wrong pairs, 0 to 1 (default: %(default)s)",
    )
    add_pattern(threshold)
    threshold.add_argument("--json", action="store_true", help="print the figures as JSON")
    threshold.set_defaults(action=_threshold)

    export = commands.add_parser("export", help="write the model as ONNX")
    _add_checkpoint(export)
    export.add_argument("-o", "--out", type=_folder, required=True, help="write to this folder")
    add_pattern(export)
    export.add_argument(
        "--threshold", type=input_folder, help="add the distance of this folder of seps reid threshold to export.json"
    )
    export.set_defaults(action=_export)

    used = ("data.pattern", "data.on_problem", "data.verify_files", "data.threads")
    features = commands.add_parser(
        "features", help="features of a folder to a file", settings=DATA_SETTINGS, of_run=used
    )
    add_run(features)
    features.add_argument(
        "folder", type=input_folder, help="read this folder, which has one folder of pictures per sensor"
    )
    features.add_argument("--out", type=output_file, required=True, help="write the features to this .npz file")
    features.add_argument(
        "--camera", type=non_negative, help="set the camera of all pictures (default: from their names)"
    )
    add_pattern(features)
    features.set_defaults(action=_features)


def _threshold(options: argparse.Namespace) -> int:
    from seps.reid.run import weights_digest
    from seps.reid.task import make_reader
    from seps.reid.verification import calibrate, roc_picture

    for name in ("data.holdout", "data.layout"):
        if name in options.settings:
            raise ValueError(f"--{name}: the identities that were held out are those of the run; leave it out.")
    check_output(options.out / THRESHOLD, "--out", _OURS)
    if (options.out / CURVE).exists() and not (options.out / THRESHOLD).exists():
        raise ValueError(f"--out {options.out} holds a {CURVE} that this command did not write: choose another folder.")
    trained, config, dataset = load_run(options)
    with make_reader(config, dataset) as reader:
        threshold = calibrate(
            trained,
            config,
            dataset,
            reader,
            options.false_accept,
            pattern=options.pattern,
            batch_size=options.batch_size,
        )
    about = {"checkpoint": str(trained.checkpoint), "model_sha256": weights_digest(trained.model)}
    figures = {**about, **threshold.to_json()}
    options.out.mkdir(parents=True, exist_ok=True)
    write_output(options.out / THRESHOLD, figures)
    save_picture(roc_picture(threshold), options.out / CURVE)
    if options.json:
        print_json(figures)
        return 0
    print(f"Distance {threshold.distance:.4f}: shots at most that far apart count as the same one.")
    for kind, text in (("held_out", "held-out identities"), ("test", "test identities")):
        part = figures[kind]
        print(
            f"{text} ({part['identities']}): {part['true_accept']:.1%} of {part['genuine_pairs']} right pairs are "
            f"accepted, {part['false_accept']:.2%} of {part['impostor_pairs']} wrong ones."
        )
    print(f"{printable(options.out / THRESHOLD)}\n{printable(options.out / CURVE)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from seps.files import read_json
    from seps.reid.deploy import check_export, export_reid
    from seps.reid.run import load_trained, weights_digest

    check_export(options.out)
    trained = load_trained(options.run, options.which)
    distance = None
    if options.threshold is not None:
        file = Path(options.threshold) / THRESHOLD
        stated = read_json(file)
        distance = stated.get("distance")
        if not isinstance(distance, float) or (options.pattern or stated.get("pattern")) != stated.get("pattern"):
            raise ValueError(
                f"{file} holds no threshold for these features: make it with "
                "seps reid threshold and the same --pattern."
            )
        if stated.get("model_sha256") != weights_digest(trained.model):
            raise ValueError(
                f"{file} holds the threshold of another model ({stated.get('checkpoint')}), not of "
                f"{trained.checkpoint}: run seps reid threshold again."
            )
        options.pattern = stated["pattern"]
    difference = export_reid(trained, options.out, pattern=options.pattern, threshold=distance)
    out = printable(options.out)
    print(f"Wrote {out}/model.onnx; largest difference of a feature from torch {difference:.1e}.")
    print(f"{out}/export.json names the sensors, the image size and the cameras.")
    return 0


def _features(options: argparse.Namespace) -> int:
    from seps.cli.shared.progress import count_progress
    from seps.reid.deploy import check_features_file, folder_features

    if Path(options.out).suffix != ".npz":
        raise ValueError(f"--out {options.out}: the features are written as .npz; name a file that ends so.")
    refuse_model_settings(options.settings)
    check_features_file(options.out)
    trained, config = load_model(options)
    with count_progress("features") as progress:
        features = folder_features(
            trained,
            config,
            options.folder,
            camera=options.camera,
            pattern=options.pattern,
            batch_size=options.batch_size,
            progress=progress,
        )
    features.save(options.out)
    if features.left_out:
        named, count = "; ".join(map(str, features.left_out[:SHOWN_PROBLEMS])), len(features.left_out)
        say(f"{count} shots were left out: {named}{'; ...' * (count > SHOWN_PROBLEMS)}")
    rows, width = features.features.shape
    print(f"{printable(options.out)}: {rows} shots, {width} numbers each; arrays names, features, cameras.")
    return 0
