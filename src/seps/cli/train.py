"""`seps train`: train a retrieval model."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from seps.cli.argtypes import default_device, device, ended, output_folder, suggestion
from seps.cli.main import EXIT_INTERRUPTED
from seps.cli.text import printable_lines
from seps.retrieval.config import RunConfig


class _Parser(ArgumentParser):  # type: ignore[misc]
    """Says what is wrong in one sentence, without the hundred options before it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(message.split()).rstrip(".")
        unknown = re.match(r"[Uu]nrecognized arguments: (--[^\s=]+)", text)
        if unknown:
            text = f"There is no option {unknown[1]}{suggestion(unknown[1], self._option_string_actions)}"
        raise ValueError(f"{ended(text)} (seps train --help lists the settings.)") from ex


def build_parser() -> ArgumentParser:
    """Every field of `RunConfig` as a dotted option; `--config FILE.yaml` sets many at once."""
    parser = _Parser(prog="seps train", description=__doc__)
    parser.add_argument("--config", action="config", help="YAML file of settings; options after it override it")
    parser.add_argument(
        "--out", type=output_folder, required=True, help="folder of the run; an unfinished one is continued"
    )
    parser.add_argument("--device", type=device, default=None, help="cpu, cuda, ...; default: a GPU if there is one")
    parser.add_class_arguments(RunConfig, nested_key=None, sub_configs=True)
    return parser


def read_config(path: str, overrides: Mapping[str, Any]) -> RunConfig:
    """The configuration in a YAML file, with some dotted settings replaced."""
    parser = build_parser()
    words = ["--out", tempfile.gettempdir(), "--config", path]  # no run is made there
    for name, value in overrides.items():
        words += [f"--{name}", json.dumps(value) if not isinstance(value, str) else value]
    return to_config(parser, parser.parse_args(words))


def to_config(parser: ArgumentParser, options: Any) -> RunConfig:
    """The parsed options as a `RunConfig`."""
    values = parser.instantiate(options)
    return RunConfig(**{name: values[name] for name in RunConfig.__dataclass_fields__})


def run(arguments: Sequence[str]) -> int:
    """Train, and say where the result is. Under torchrun every process calls this."""
    parser = build_parser()
    options = parser.parse_args(list(arguments))
    from seps.retrieval.train.run import train_model
    from seps.training import from_environment, process_group
    from seps.training.tracking import terminal_progress

    config = to_config(parser, options)
    with process_group(from_environment(os.environ)) as info:
        first = info.rank == 0
        result = train_model(
            config,
            options.out,
            device=(options.device or default_device()) if info.world == 1 else None,
            distributed=info,
            progress=terminal_progress() if first else None,
            log=(lambda text: print(printable_lines(text), file=sys.stderr)) if first else None,
        )
    if first:
        named = f" under protocol {result.labels['protocol']}" if "protocol" in result.labels else ""
        print(f"Step {result.step} of {result.total_steps}; best score on dev{named}: {result.best_score}.")
        if result.interrupted:
            print(f"Interrupted and saved; run the same command to go on with {options.out}.")
        else:
            print(f"Evaluate it with: seps eval --model {options.out}/model --data FILE.jsonl")
    return EXIT_INTERRUPTED if result.interrupted else 0
