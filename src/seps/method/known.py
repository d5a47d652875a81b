"""The networks that the fast paths can score, as a list of what is allowed; all others run in the readable form.

The factored form, the kernels, the training path and the explanations compute the scores of `PatchSlimming` in another
order. They are correct only for its own methods, parts and settings. A changed network (a subclass with other methods,
a swapped part, a patched method, a hook) must not be scored as the original one: every fast path calls `why_not_fast`
first.

What every path calls may be changed: the sum of Eq. 3 (`PatchSlimming.guided`), the mix of patches and description
(`PatchSlimming.mix`), and what `encode_images` alone calls, the layers of the score predictor and of the aggregation's
MLP. The kernels compute the sum themselves and take no network with another one (`changed_step`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from seps.method.align import HRPA
from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.method.parts import OwnAggregation, OwnAlignment, OwnDecision
from seps.method.select import TokenSparse
from seps.method.tokens import DualTokenAggregation, TokenAggregation
from seps.registry import FORMS

_NETWORKS = {
    ("seps.method.network", "PatchSlimming"),
    # Only the call shape of its forward differs. By name: `compat` is above this package.
    ("seps.method.published", "CrossSparseAggrNet"),
}
_SETTINGS: dict[str, frozenset[str]] = {
    "scoring": frozenset({"sum", "learned"}),
    "dense": frozenset({"none", "guide", "branch", "tokens"}),
    "aggregation": frozenset({"single", "dual"}),
    "alignment": frozenset({"mean", "topk"}),
    "similarity": frozenset({"cosine", "leaky"}),
    "decision": frozenset({"topk", "gumbel", "relaxed", "binary"}),
}
"""What the fast paths compute; beside these an idea of somebody's own, if it promises the form they need."""


def _methods(kind: type) -> dict[str, Any]:
    """Functions and properties of a class but its forward, as they were when this module was loaded."""
    return {
        name: value
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType | property) and not name.startswith("__") and name != "forward"
    }


_METHODS: dict[type, dict[str, Any]] = {
    kind: _methods(kind)
    for kind in (
        PatchSlimming,
        TokenSparse,
        OwnDecision,
        TokenAggregation,
        DualTokenAggregation,
        OwnAggregation,
        HRPA,
        OwnAlignment,
        SlimmingConfig,
    )
}


_FOLLOWED = ("guided", "mix")
"""Methods of the network that every path calls: a subclass may change them, and stays fast (but on the kernels)."""


def changed_step(net: PatchSlimming) -> str | None:
    """Which step that every path calls (Eq. 3's sum, the mix) is not the one of this library; None when all are."""
    for name in _FOLLOWED:
        if name in vars(net) or getattr(type(net), name) is not _METHODS[PatchSlimming][name]:
            return name
    return None


def why_not_fast(net: PatchSlimming) -> str | None:
    """Why the fast paths cannot score `net`, as a part of a sentence; None when they can."""
    if own_forward(net):
        return "its forward was replaced, or has a hook"
    if type(net).__call__ is not PatchSlimming.__call__:
        return f"{type(net).__name__} has another __call__"
    return (
        _changed("it", net, PatchSlimming) or _unknown_settings(net) or _unknown_selection(net) or _unknown_parts(net)
    )


def own_forward(net: PatchSlimming) -> bool:
    """Whether calling `net` runs anything but the forward of this library: another forward, or hooks."""
    if "forward" in net.__dict__ or net._forward_hooks or net._forward_pre_hooks:
        return True
    forward = type(net).forward
    return not _of_a_known_network(forward, "forward")


def _of_a_known_network(function: object, method: str) -> bool:
    place = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
    return place in {(module, f"{name}.{method}") for module, name in _NETWORKS}


def _changed(name: str, part: object, kind: type) -> str | None:
    """Which method of `part`, an instance of `kind`, is not the one of this library."""
    own, methods = vars(part), _METHODS[kind]
    for method, function in methods.items():
        if kind is PatchSlimming and method in _FOLLOWED:
            continue
        found = getattr(type(part), method)
        if method in ("encode_images", "prefix_count") and _of_a_known_network(found, method):
            found = function  # every path calls it
        if method in own or found is not function:
            return f"{name} has another {method}"
    return None


def _unknown_settings(net: PatchSlimming) -> str | None:
    config = net.config
    if type(config) is not SlimmingConfig:
        return f"its configuration is a {type(config).__name__}"
    for name, known in _SETTINGS.items():
        if name in net.forms:
            if net.forms[name] != FORMS[name]:
                return f"{name}={getattr(config, name)!r} does not promise form={FORMS[name]!r}"
        elif getattr(config, name) not in known:
            return f"{name}={getattr(config, name)!r} is not one of {sorted(known)}"
    return _changed("its configuration", config, SlimmingConfig)


def _unknown_selection(net: PatchSlimming) -> str | None:
    names = ["sparse_net_cap", *(["sparse_net_long"] if net.config.uses_dense_branch else [])]
    for name in names:
        module = getattr(net, name)
        kind = OwnDecision if "decision" in net.forms else TokenSparse
        if type(module) is not kind:
            return f"{name} is a {type(module).__name__}"
        changed = _changed(name, module, kind)
        if changed is not None:
            return changed
        expected = (net.config.decision, net.config.sparse_ratio, net.config.scoring == "learned")
        if (module.decision, module.sparse_ratio, module.use_paper_version) != expected:
            return f"{name} has other settings than the network's configuration"
        if module.training != net.training:
            return f"{name} is in {'training' if module.training else 'evaluation'} mode and the network is not"
    return None


def _unknown_parts(net: PatchSlimming) -> str | None:
    aggregation: type = DualTokenAggregation if net.config.aggregation == "dual" else TokenAggregation
    aggregation = OwnAggregation if "aggregation" in net.forms else aggregation
    for name, kind in (("aggr_net", aggregation), ("hrpa", OwnAlignment if "alignment" in net.forms else HRPA)):
        module = getattr(net, name)
        if type(module) is not kind:
            return f"{name} is a {type(module).__name__}"
        changed = _changed(name, module, kind)
        if changed is not None:
            return changed
    return _unknown_mlp(net.hrpa)


def _unknown_mlp(hrpa: HRPA) -> str | None:
    """The fast paths call the MLP of Eq. 5 with other shapes, and the kernels read its weights directly."""
    mlp, top = hrpa.relevance_mlp, hrpa.top_k
    if mlp is None:
        return None
    layers = list(mlp) if type(mlp) is nn.Sequential else []
    if [type(layer) for layer in layers] != [nn.Linear, nn.GELU, nn.Linear]:
        return "hrpa.relevance_mlp has other layers"
    first, middle, last = layers
    sizes = [first.in_features, first.out_features, last.in_features, last.out_features]
    plain = sizes == [top, 2 * top, 2 * top, 1] and first.bias is not None and last.bias is not None
    if not plain or middle.approximate != "none":
        return "hrpa.relevance_mlp has other settings"
    for part in (mlp, *layers):
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return "hrpa.relevance_mlp has a hook, or another forward"
    return None


def say_readable(reason: str) -> None:
    """Warn that scores come from the network's own `forward`, one text at a time and slowly, and why."""
    warnings.warn(
        f"Scored in the readable form, one text at a time: the fast paths do not know this network ({reason}).",
        UserWarning,
        stacklevel=3,
    )


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Within it the network and all its parts are in evaluation mode; afterwards each has its former mode."""
    training = [module for module in net.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def call_forward(net: PatchSlimming, images: Tensor, words: Tensor, lengths: Any, extras: Mapping[str, Any]) -> Any:
    """`net(images, words, lengths, ...)` with the extras that are not None, for a network with its own forward.

    Raises `InputError` for an extra that this forward does not take.
    """
    given = {name: value for name, value in extras.items() if value is not None}
    parameters = inspect.signature(net.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        refused = sorted(given.keys() - parameters.keys())
        if refused:
            raise InputError(
                f"{type(net).__name__} has a forward of its own, which takes no {refused}; leave them out, or let it "
                "take the arguments of PatchSlimming.forward."
            )
    return net(images, words, lengths, **given)
