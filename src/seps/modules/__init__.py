"""The method as one file, `seps_modules.py`, for use inside other projects (`seps modules`)."""

from .contents import BundleError
from .language import LANGUAGES, Language
from .writer import GENERATED, MODULES, STYLES, Style, single_file

__all__ = ["GENERATED", "LANGUAGES", "MODULES", "STYLES", "BundleError", "Language", "Style", "single_file"]
