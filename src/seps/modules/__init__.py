"""The method as one file, `seps_modules.py`, for use inside other projects (`seps modules`)."""

from .contents import BundleError
from .language import LANGUAGES, Language
from .writer import GENERATED, MODULES, PARTS, STYLES, Part, Style, public_names, single_file

__all__ = [
    "GENERATED",
    "LANGUAGES",
    "MODULES",
    "PARTS",
    "STYLES",
    "BundleError",
    "Language",
    "Part",
    "Style",
    "public_names",
    "single_file",
]
