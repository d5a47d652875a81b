"""`seps train`: train a retrieval model.

Settings come from --config FILE.yaml (configs/ has presets) and from --section.name value, which overrides it.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import default_device, device, input_file, output_folder
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.parser import Parser, add_explain, add_plugins
from seps.cli.shared.text import say, typed
from seps.plugins import load_plugins
from seps.retrieval.config import RunConfig

if TYPE_CHECKING:
    from seps.training import TrainResult


def add_options(parser: Parser) -> None:
    """The options of `seps train`; every field of `RunConfig` is one, too."""
    parser.settings = RunConfig
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config",
        type=input_file,
        action="append",
        default=[],
        help="read settings from this YAML file; a later file overrides an earlier one",
    )
    parser.add_argument(
        "--out", type=output_folder, help="write the run to this folder, or continue the unfinished run there"
    )
    parser.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    add_plugins(parser)
    add_explain(parser)
    parser.add_argument("--print_config", action="store_true", help="print all settings as YAML, and stop")


def run(options: argparse.Namespace) -> int:
    """Train, and say where the result is. Under torchrun every process calls this."""
    if options.out is None and not options.print_config:
        options.parser.error("the following arguments are required: --out")
    load_plugins(options.plugin)
    from seps.retrieval.train.start import load_run
    from seps.settings import to_yaml

    config = load_run(options.config, options.settings)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    from seps.cli.shared.progress import training_progress
    from seps.retrieval.train.run import train_model
    from seps.training import from_environment, process_group

    with process_group(from_environment(os.environ)) as info:
        first = info.rank == 0
        result = train_model(
            config,
            options.out,
            device=(options.device or default_device()) if info.world == 1 else None,
            distributed=info,
            progress=training_progress() if first else None,
            log=say if first else None,
        )
    if first:
        print(f"Step {result.step} of {result.total_steps}; {_chosen(result)}.")
        if result.interrupted:
            print(f"Interrupted and saved; run the same command to go on with {options.out}.")
        else:
            print(f"Evaluate it with: seps eval --model {typed(options.out)}/model --data FILE.jsonl")
    return EXIT_INTERRUPTED if result.interrupted else 0


def _chosen(result: TrainResult) -> str:
    """Which checkpoint is the model, and by which score."""
    if result.best_score is not None:
        named = f" under protocol {result.labels['protocol']}" if "protocol" in result.labels else ""
        first = ", that of the model it started with, which stays the best" if result.best_step == 0 else ""
        return f"best score on dev{named}: {result.best_score:.1f}{first}"
    if result.best_checkpoint is not None:
        return "without a dev set (--data.dev) the last checkpoint is the model"
    return "no score on dev yet"
