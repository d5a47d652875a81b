"""The probes by area and name, and what a probe may raise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from probes.bench import Bench

AREAS = {
    "scores": "scores of every backend and option, gradients, losses, metrics",
    "published": "names and call shapes of the published code",
    "sensors": "the module for several sensors, with each option",
    "training": "seps train and seps compare: losses and figures of each option",
    "heads": "every head: trained, evaluated, indexed, searched, explained",
    "stores": "stores of every size and precision, of several roots, without a bank: columns, searches, explanations",
    "library": "seps.Library, seps find, seps duplicates",
    "service": "seps serve: every address of the API",
    "dual": "dual encoders of every family",
    "pictures": "the shipped models on the shipped pictures",
    "modules": "the single file in each style and language: its checks, its numbers and its text",
    "exported": "ONNX files, run by onnxruntime",
    "reid": "re-identification with each option: losses, figures, features, files",
    "reference": "help of every command",
}
"""The areas and what each holds, in the order in which they are started: long ones first would be the same."""


class Gone(Exception):
    """The name, command or option that a probe uses does not exist, or does not work."""


Probe = Callable[["Bench"], Any]
_PROBES: dict[str, dict[str, Probe]] = {}
Function = TypeVar("Function", bound=Callable[..., Any])


def probe(area: str, each: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Register a probe. With `each` it is one probe per name, which it gets as its second argument."""

    def register(function: Function) -> Function:
        name = function.__name__.replace("_", " ")
        probes = _PROBES.setdefault(area, {})
        for choice in each:
            probes[f"{name} {choice}"] = lambda bench, choice=choice: function(bench, choice)  # type: ignore[misc]
        if not each:
            probes[name] = function
        return function

    return register


def probes_of(area: str) -> dict[str, Probe]:
    """The probes of an area."""
    importlib.import_module(f"probes.{area}")
    return _PROBES[area]
