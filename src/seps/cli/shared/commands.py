"""All commands, and their parsers; a command's module is imported on its first call."""

from __future__ import annotations

import importlib
from types import ModuleType

from seps.cli.shared.parser import Parser

COMMANDS = {
    "find": "find pictures in a folder by a sentence: indexes what is new, then answers",
    "index": "embed a folder of pictures into a store, again and again",
    "search": "find pictures of a store by a sentence or a picture",
    "explain": "show why a picture has its score for a sentence",
    "duplicates": "pictures of a store that are the same file, saved again, or nearly the same",
    "serve": "a web page and an API over a store",
    "mcp": "let an assistant search a store, by the Model Context Protocol",
    "train": "train a retrieval model on pictures with captions",
    "eval": "measure a model: recall both ways, under a named protocol",
    "caption": "describe images with a vision-language model, one resumable line per image",
    "compare": "train and measure baselines, or the ablation, over several seeds",
    "convert": "make a model from a checkpoint of the published code",
    "export": "write a model as ONNX files, or the vectors of a store, for other programs",
    "demo": "run the main job on the photos that ship with the package",
    "reid": "re-identification over RGB / NIR / TIR: synth, train, eval, show, threshold, export, features",
    "doctor": "what is installed, which parts work, what is missing and how to get it",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
    "modules": "write seps_modules.py, the method in one file that needs torch alone",
}
_ROOMS = {
    "pictures": ("find", "index", "search", "explain", "duplicates", "serve", "mcp", "demo"),
    "models": ("train", "eval", "caption", "compare", "convert", "export", "modules"),
}
"""The folder of a command's file; a command that is not listed has its file beside this one."""


def module_of(name: str) -> ModuleType:
    """The module of a command, imported on its first call."""
    room = next((f"{room}." for room, names in _ROOMS.items() if name in names), "")
    return importlib.import_module(f"seps.cli.{room}{name}")


def parser_of(name: str) -> Parser:
    """The parser of a command; its module adds the options."""
    command = module_of(name)
    parser = Parser(f"seps {name}", description=command.__doc__)
    parser.set_defaults(parser=parser)
    command.add_options(parser)
    return parser
