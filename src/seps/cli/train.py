"""`seps train`: train a retrieval model.

Settings come from --config FILE.yaml (configs/ has presets) and from --section.name value, which wins.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from seps.cli.shared.argtypes import default_device, device, input_file, output_folder
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.recipe import load_recipe, run_config
from seps.cli.shared.text import say
from seps.plugins import load_plugins


def build_parser() -> argparse.ArgumentParser:
    """The options of `seps train`; every field of `RunConfig` is one, too."""
    parser = Parser(
        "seps train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        settings=run_config,
    )
    parser.add_argument(
        "--config",
        type=input_file,
        action="append",
        default=[],
        help="YAML file of settings; of several the last wins",
    )
    parser.add_argument("--out", type=output_folder, help="folder of the run; an unfinished one is continued")
    parser.add_argument("--device", type=device, help="cpu, cuda, ...; default: a GPU if there is one")
    add_plugins(parser)
    parser.add_argument("--print_config", action="store_true", help="print all settings as YAML, and stop")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Train, and say where the result is. Under torchrun every process calls this."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.out is None and not options.print_config:
        parser.error("the following arguments are required: --out")
    load_plugins(options.plugin)
    config = load_recipe(options.config, options.settings)
    if options.print_config:
        from seps.settings import to_yaml

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
        named = f" under protocol {result.labels['protocol']}" if "protocol" in result.labels else ""
        print(f"Step {result.step} of {result.total_steps}; best score on dev{named}: {result.best_score}.")
        if result.interrupted:
            print(f"Interrupted and saved; run the same command to go on with {options.out}.")
        else:
            print(f"Evaluate it with: seps eval --model {options.out}/model --data FILE.jsonl")
    return EXIT_INTERRUPTED if result.interrupted else 0
