"""Sub-commands of `seps reid` that put a trained model to use: threshold, export, features."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seps.cli.shared.argtypes import default_device, inner_fraction, input_folder, non_negative, output_file
from seps.cli.shared.argtypes import output_folder as _output_folder
from seps.cli.shared.outputs import check_output, write_output
from seps.cli.shared.text import SHOWN_PROBLEMS, print_json, printable, say

if TYPE_CHECKING:
    from seps.reid.config import ReidConfig
    from seps.reid.data import ReidDataset
    from seps.reid.run import TrainedReid

Load = Callable[[argparse.Namespace], "tuple[TrainedReid, ReidConfig, ReidDataset]"]
THRESHOLD, CURVE = "threshold.json", "roc.png"
_OURS = "asked_false_accept"
"""A key that every threshold.json has."""


def _folder(text: str) -> Path:
    return Path(_output_folder(text))


def add_commands(
    commands: Any, add_run: Callable[[argparse.ArgumentParser], None], data_settings: type, load: Load
) -> None:
    """Put the sub-commands beside the others; `add_run` and `load` are those of the other ones."""
    threshold = commands.add_parser("threshold", help="a distance for 'the same one'", settings=data_settings)
    add_run(threshold)
    threshold.add_argument("--out", type=_folder, required=True, help="folder for threshold.json and roc.png")
    threshold.add_argument(
        "--false-accept", type=inner_fraction, default=0.01, help="part of other ones accepted (default: %(default)s)"
    )
    threshold.add_argument("--pattern", type=int, choices=(1, 2, 3), help="1 original, 2 SDTPS, 3 both")
    threshold.add_argument("--json", action="store_true", help="print the figures as JSON")
    threshold.set_defaults(action=lambda options: _threshold(options, load))

    export = commands.add_parser("export", help="write the model as ONNX")
    export.add_argument("run", type=Path, help="run folder of seps reid train, or a model folder")
    export.add_argument("--which", choices=("best", "last"), default="best", help="checkpoint (default: best)")
    export.add_argument("-o", "--out", type=_folder, required=True, help="folder to write")
    export.add_argument("--pattern", type=int, choices=(1, 2, 3), help="1 original, 2 SDTPS, 3 both")
    export.add_argument("--threshold", type=input_folder, help="folder of seps reid threshold, to note its distance")
    export.set_defaults(action=_export)

    features = commands.add_parser("features", help="features of a folder to a file", settings=data_settings)
    add_run(features)
    features.add_argument("folder", type=input_folder, help="holds a folder of pictures for each sensor")
    features.add_argument("--out", type=output_file, required=True, help=".npz file to write")
    features.add_argument("--camera", type=non_negative, help="camera of all pictures (default: from their names)")
    features.add_argument("--pattern", type=int, choices=(1, 2, 3), help="1 original, 2 SDTPS, 3 both")
    features.set_defaults(action=_features)


def _threshold(options: argparse.Namespace, load: Load) -> int:
    from seps.reid.task import make_reader
    from seps.reid.verification import calibrate, roc_picture

    for name in ("data.holdout", "data.layout"):
        if name in options.settings:
            raise ValueError(f"--{name}: the identities that were held out are those of the run; leave it out.")
    check_output(options.out / THRESHOLD, "--out", _OURS)
    if (options.out / CURVE).exists() and not (options.out / THRESHOLD).exists():
        raise ValueError(f"--out {options.out} holds a {CURVE} that this command did not write: choose another folder.")
    trained, config, dataset = load(options)
    with make_reader(config, dataset) as reader:
        found = calibrate(
            trained,
            config,
            dataset,
            reader,
            options.false_accept,
            pattern=options.pattern,
            batch_size=options.batch_size,
        )
    figures = {"checkpoint": str(trained.checkpoint), **found.to_json()}
    options.out.mkdir(parents=True, exist_ok=True)
    write_output(options.out / THRESHOLD, figures)
    roc_picture(found).save(options.out / CURVE)
    if options.json:
        print_json(figures)
        return 0
    print(f"Distance {found.distance:.4f}: shots at most that far apart count as the same one.")
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
    from seps.reid.run import load_trained

    check_export(options.out)
    distance = None
    if options.threshold is not None:
        stated = read_json(Path(options.threshold) / THRESHOLD)
        distance = stated.get("distance")
        if not isinstance(distance, float) or (options.pattern or stated.get("pattern")) != stated.get("pattern"):
            raise ValueError(
                f"{Path(options.threshold) / THRESHOLD} holds no threshold for these features: make it with "
                "seps reid threshold and the same --pattern."
            )
        options.pattern = stated["pattern"]
    trained = load_trained(options.run, options.which)
    difference = export_reid(trained, options.out, pattern=options.pattern, threshold=distance)
    out = printable(options.out)
    print(f"Wrote {out}/model.onnx; largest difference of a feature from torch {difference:.1e}.")
    print(f"{out}/export.json names the sensors, the image size and the cameras.")
    return 0


def _features(options: argparse.Namespace) -> int:
    from seps import settings
    from seps.cli.shared.progress import count_progress
    from seps.reid.config import ReidConfig
    from seps.reid.deploy import check_features_file, folder_features
    from seps.reid.run import load_trained

    if Path(options.out).suffix != ".npz":
        raise ValueError(f"--out {options.out}: the features are written as .npz; name a file that ends so.")
    check_features_file(options.out)
    trained = load_trained(options.run, options.which, options.device or default_device())
    config = settings.load(ReidConfig, overrides={**trained.config.to_json(), **options.settings})
    with count_progress("features") as progress:
        found = folder_features(
            trained,
            config,
            options.folder,
            camera=options.camera,
            pattern=options.pattern,
            batch_size=options.batch_size,
            progress=progress,
        )
    found.save(options.out)
    if found.left_out:
        named = "; ".join(map(str, found.left_out[:SHOWN_PROBLEMS]))
        say(f"{len(found.left_out)} shots were left out: {named}{'; ...' * (len(found.left_out) > SHOWN_PROBLEMS)}")
    rows, width = found.features.shape
    print(f"{printable(options.out)}: {rows} shots, {width} numbers each; arrays names, features, cameras.")
    return 0
