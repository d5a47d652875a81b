"""All commands, and their parsers; a command's module is imported on its first call."""

from __future__ import annotations

import importlib
from types import ModuleType

from seps.cli.shared.parser import Parser

COMMANDS = {
    "find": "find pictures in a folder by a sentence; new pictures are indexed first",
    "index": "put folders of pictures into a store, and update it",
    "search": "find pictures of a store by a sentence or a picture",
    "explain": "show what each word and patch adds to a score",
    "duplicates": "list equal, re-encoded and nearly equal pictures of a store",
    "serve": "serve a store as a web page and an API",
    "mcp": "let an assistant search a store, by the Model Context Protocol",
    "train": "train a retrieval model on pictures with captions",
    "eval": "measure the recall of a model under a named protocol",
    "caption": "write descriptions of images with a vision-language model",
    "compare": "train and measure baselines or the ablation over several seeds",
    "convert": "convert a checkpoint of the published code into a model",
    "export": "export a model or the vectors of a store for other programs",
    "demo": "search the photos of the package",
    "reid": "match people or vehicles across RGB, NIR and TIR cameras",
    "doctor": "print which parts work, which are missing, and how to install them",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
    "modules": "write the method as one file that requires only torch",
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
