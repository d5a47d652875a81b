"""The help of every command, as the commands list themselves."""

from __future__ import annotations

import re
from typing import Any

from probes.bench import Bench
from probes.registry import probe


def commands(bench: Bench, *words: str) -> list[str]:
    """The commands that `seps WORDS --help` lists: the first words of its indented lines."""
    text = bench.seps(*words, "--help").out
    return re.findall(r"^ (?:seps )?([a-z]+) (?=\S)", text, re.MULTILINE)


@probe("reference")
def help_of_commands(bench: Bench) -> dict[str, Any]:
    """Every help text."""
    found: dict[str, Any] = {"seps": bench.seps("--help").text()}
    for name in dict.fromkeys(commands(bench)):
        found[name] = bench.seps(name, "--help").text()
    for name in ("synth", "train", "eval", "show", "threshold", "export", "features"):
        found[f"reid {name}"] = bench.seps("reid", name, "--help").text()
    return found
