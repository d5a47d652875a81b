"""The files that `seps modules` can write: both styles in both languages, and the parts, as texts and as modules."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

from seps.modules import LANGUAGES, PARTS, STYLES, single_file

VARIANTS = [f"{style}-{language}" for style in STYLES for language in LANGUAGES]


PART_FILES = [f"{style}-{language}-{part}" for style in STYLES for language in LANGUAGES for part in PARTS]


@cache
def text_of(variant: str) -> str:
    """The file of "annotated-en", "annotated-zh", "slim-en" or "slim-zh"; with "-sensors" and so on one part of it."""
    style, language, *only = variant.split("-")
    return single_file(style, language, only[0] if only else None)


def execute(text: str, name: str) -> ModuleType:
    """The module of a file's text. It stays in `sys.modules`, where dataclasses look for it."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module


@cache
def module_of(variant: str) -> ModuleType:
    """The file of a variant, imported."""
    return execute(text_of(variant), f"seps_modules_{variant.replace('-', '_')}")
