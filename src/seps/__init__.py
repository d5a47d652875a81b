"""Semantic-Enhanced Patch Slimming (arXiv 2511.01390): let the text decide which image patches matter."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from seps.extras import missing_package

if TYPE_CHECKING:
    from seps.method.align import HRPA, mask_xattn_one_text
    from seps.method.checks import InputError
    from seps.method.config import ConfigError, LossConfig, SlimmingConfig
    from seps.method.encoded import EncodedImages
    from seps.method.losses import ContrastiveLoss, InfoNCELoss, RatioLoss, SEPSLoss, SigmoidLoss
    from seps.method.network import PatchSlimming
    from seps.method.published import (
        SDTPS,
        CrossSparseAggrNet,
        CrossSparseAggrNet_v2,
        HRPA_function,
        SDTPS_TokenAggregation,
        SDTPS_TokenSparse,
        create_seps_model,
        score_published_pairing,
    )
    from seps.method.select import TokenSparse
    from seps.method.sensors import MultiModalSDTPS
    from seps.method.tokens import DualTokenAggregation, TokenAggregation
    from seps.photos.library import Library
    from seps.plugins import load_plugin, register_encoder, register_head, register_row
    from seps.registry import (
        register_aggregation,
        register_alignment,
        register_decision,
        register_guide,
        register_scoring,
    )

__version__ = "1.0.0"

__all__ = [
    "HRPA",
    "SDTPS",
    "ConfigError",
    "ContrastiveLoss",
    "CrossSparseAggrNet",
    "CrossSparseAggrNet_v2",
    "DualTokenAggregation",
    "EncodedImages",
    "HRPA_function",
    "InfoNCELoss",
    "InputError",
    "Library",
    "LossConfig",
    "MultiModalSDTPS",
    "PatchSlimming",
    "RatioLoss",
    "SDTPS_TokenAggregation",
    "SDTPS_TokenSparse",
    "SEPSLoss",
    "SigmoidLoss",
    "SlimmingConfig",
    "TokenAggregation",
    "TokenSparse",
    "create_seps_model",
    "load_plugin",
    "mask_xattn_one_text",
    "register_aggregation",
    "register_alignment",
    "register_decision",
    "register_encoder",
    "register_guide",
    "register_head",
    "register_row",
    "register_scoring",
    "score_published_pairing",
]
_HOMES = (
    "registry",
    "plugins",
    *(
        f"method.{name}"
        for name in (
            "config",
            "checks",
            "encoded",
            "select",
            "tokens",
            "align",
            "network",
            "sensors",
            "losses",
            "published",
        )
    ),
)
"""The modules that define the names above, but for `Library`."""
_ROOMS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""What may be reached as an attribute: `seps.metrics.cmc_map` after `import seps` alone."""


def __getattr__(name: str) -> Any:
    # On first use: `seps --help` then starts at once, and `seps doctor` runs where torch itself is broken.
    if name in _ROOMS:
        return importlib.import_module(f"seps.{name}")
    if name == "Library":
        return _import_room("photos.library").Library
    if name in __all__:
        for home in _HOMES:
            module = _import_room(home)
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    told = f"module {__name__!r} has no attribute {name!r}"
    if name.startswith("register_"):
        kinds = ", ".join(sorted(each for each in __all__ if each.startswith("register_")))
        told += f". There are {kinds}; for losses, metrics and protocols see docs/change-one-idea.md"
    raise AttributeError(told)


def _import_room(name: str) -> Any:
    """A module of this package. Raises ImportError with the command that installs a package it lacks."""
    try:
        return importlib.import_module(f"seps.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "seps":
            raise
        raise ImportError(missing_package(error.name)) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_ROOMS])
