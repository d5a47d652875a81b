"""The four files that `seps modules` can write: both styles in both languages, as texts and as modules."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

from seps.modules import LANGUAGES, STYLES, single_file

VARIANTS = [f"{style}-{language}" for style in STYLES for language in LANGUAGES]


@cache
def text_of(variant: str) -> str:
    """The file of "annotated-en", "annotated-zh", "plain-en" or "plain-zh"."""
    style, language = variant.split("-")
    return single_file(style, language)


def execute(text: str, name: str) -> ModuleType:
    """The module of a file's text. It stays in `sys.modules`, where dataclasses look for it."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module


@cache
def module_of(variant: str) -> ModuleType:
    """The file of a variant, imported."""
    return execute(text_of(variant), f"seps_modules_{variant.replace('-', '_')}")
