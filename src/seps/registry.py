"""Ideas of your own, by name: scoring, decision, aggregation, alignment and guides; `seps.plugins` adds the rest.

    @register_decision("first")
    def keep_first(scores, count, valid):
        return (torch.arange(scores.shape[-1]) < count).float()

    PatchSlimming(SlimmingConfig(decision="first"))

A class is made once per network, as `Mine(config)` with its `SlimmingConfig`; a function is used as it is. The function
that registers a component says what it is called with. An aggregation and an alignment have a second hook, a method
(`merge`, `align`), for what the first cannot express; with it all pairs are scored by the reference, which is slower.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Thing = TypeVar("Thing", bound=Callable[..., Any])
CUSTOM = "own"
"""The name of an idea that came as an object and not by name."""
BUILT_IN: dict[str, tuple[str, ...]] = {
    "scoring": ("sum", "learned"),
    "decision": ("topk", "gumbel", "relaxed", "binary"),
    "aggregation": ("single", "dual"),
    "alignment": ("mean", "topk"),
    "guide": ("image", "caption", "dense"),
    "head": ("slimming", "maxsim", "mean", "scan-t2i", "scan-i2t", "scan", "description"),
    "vision encoder": ("mini",),
    "text encoder": ("mini",),
    "row": (),
}
"""By kind: the names of this library, which cannot be registered."""


HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "scoring": {"": ("patches", "attentions", "weights", "valid")},
    "decision": {"": ("scores", "count", "valid")},
    "aggregation": {"merge": ("patches", "keep", "scores"), "": ("patches",)},
    "alignment": {"align": ("similarity", "word_mask", "token_mask"), "": ("best", "mask")},
    "guide": {"": ("vectors",)},
    "row": {"": ("recipe",)},
}
"""By kind, and by the name of the method ("": the component itself), what a component is called with; the first method
that it has is its hook."""


class RegistryError(ValueError):
    """An idea that cannot be registered, or is not; the message names it and says what to do."""


@dataclass(frozen=True)
class Idea:
    """A class or function of somebody's own, under its name."""

    kind: str
    name: str
    thing: Callable[..., Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def made(self, *arguments: Any, **options: Any) -> Any:
        """What is used: an instance of a class, or the function itself."""
        return self.thing(*arguments, **options) if isinstance(self.thing, type) else self.thing


_IDEAS: dict[tuple[str, str], Idea] = {}


def register(kind: str, name: str, **about: Any) -> Callable[[Thing], Thing]:
    """A decorator that puts a class or function under `name`; the same one may come again, and replaces itself.

    Raises `RegistryError` for a name that is taken.
    """
    if callable(name):
        raise RegistryError(f'A {kind} needs a name: write @seps.{_decorator(kind)}("NAME") above {_place(name)[1]}.')
    if not isinstance(name, str) or not name.strip() or name == CUSTOM:
        raise RegistryError(f"A {kind} cannot be registered as {name!r}; choose a name that says what it does.")
    if name in BUILT_IN[kind]:
        raise RegistryError(f"The {kind} {name!r} is built in and cannot be replaced; choose another name.")

    def take(thing: Thing) -> Thing:
        if not callable(thing):
            raise RegistryError(f"The {kind} {name!r} is a {type(thing).__name__}; register a class or a function.")
        before = _IDEAS.get((kind, name))
        if before is not None and _place(before.thing) != _place(thing):
            module, place = _place(before.thing)
            file = getattr(sys.modules.get(module), "__file__", None) or module
            raise RegistryError(
                f"The {kind} {name!r} is registered already, by {place} in {file}; choose another name."
            )
        _check_call(kind, name, thing)
        _IDEAS[kind, name] = Idea(kind, name, thing, about)
        return thing

    return take


def _check_call(kind: str, name: str, thing: Any) -> None:
    """Raise `RegistryError` where a component cannot be made with its configuration, or called as its hook is."""
    what = f"The {kind} {name!r}"
    if kind == "head" or (isinstance(thing, type) and kind in HOOKS):
        _check_arguments(f"{what} is made with", thing, ("config",))
    method = next((method for method in HOOKS.get(kind, ()) if not method or hasattr(thing, method)), None)
    if method is None:
        return
    given = HOOKS[kind][method]
    if not isinstance(thing, type):
        _check_arguments(f"{what} is called with", getattr(thing, method) if method else thing, given)
        return
    called = inspect.getattr_static(thing, method or ("forward" if hasattr(thing, "forward") else "__call__"), None)
    if inspect.isfunction(called):
        _check_arguments(f"{what} is called with", called, ("self", *given))


def _check_arguments(what: str, called: Any, given: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        names, own = ", ".join(name for name in given if name != "self"), _place(called)[1]
        raise RegistryError(f"{what} ({names}), which {own}{signature} does not take: {error}.") from error


def _decorator(kind: str) -> str:
    return f"register_{'encoder' if kind.endswith('encoder') else kind}"


def _place(thing: Any) -> tuple[str, str]:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(named.__module__), str(named.__qualname__)


def registered(kind: str) -> dict[str, Idea]:
    """The ideas of that kind, by name."""
    return {idea.name: idea for (of, _), idea in _IDEAS.items() if of == kind}


def how_to_register(kind: str, name: object) -> str:
    """The sentence for a name that nobody registered."""
    arguments = f"{name!r}, kind='text'" if kind == "text encoder" else f"{name!r}"
    return (
        f"Register a custom component first, with @seps.{_decorator(kind)}({arguments}) in a Python file: give "
        "that file to the command with --plugin FILE, or in Python with seps.load_plugin(FILE)."
    )


def unknown_name(field_name: str, kind: str, name: object) -> str | None:
    """The message for a name that is neither built in nor registered as an idea of that kind; None for one that is."""
    if isinstance(name, str) and (name == CUSTOM or name in BUILT_IN[kind] or (kind, name) in _IDEAS):
        return None
    names = ", ".join(map(repr, [*BUILT_IN[kind], *registered(kind)]))
    return f"{field_name} is {name!r}; choose one of {names}. {how_to_register(kind, name)}"


def register_scoring(name: str) -> Callable[[Thing], Thing]:
    """A custom scoring: `scoring(patches, attentions, weights, valid)` -> scores (..., N).

    patches (B, N, C); attentions: by guide ("image", "caption", "dense" and extra guides) the cosines (T, B, N) of its
    vector with the patches, without gradient; weights: by guide a number (1, or that of `extra_guides`); valid (B, N)
    bool, or None. A guide that an image lacks has a weight and no attention. It is also called once per image without
    "caption", with cosines (B, N): for the scores before any caption.
    """
    return register("scoring", name)


def register_decision(name: str) -> Callable[[Thing], Thing]:
    """A custom decision: `decision(scores, count, valid)` -> D (R, N), 1 at the kept patches; a row is one pair.

    scores (R, N) float32; count (R, 1) is K, the number of patches that `sparse_ratio` asks for, and a decision may
    keep another number; valid (R, N) bool marks the patches that exist, None: all do. Each row of D depends on the same
    row of the scores alone. D may carry a gradient. Where it holds weights between 0 and 1, the pairs are scored by the
    reference, which is slower.
    """
    return register("decision", name)


def register_aggregation(name: str) -> Callable[[Thing], Thing]:
    """A custom aggregation: `aggregation(patches)` -> merge logits (B, N, Q), Q = `config.num_merged`.

    patches (B, N, C). The merged patches are those of a softmax over the kept ones (Eq. 4). A class with the method
    `merge(patches, keep, scores)` -> (B, Q, C) merges by itself instead: keep is D (B, N) and scores (B, N) of one
    caption, Q of its choice. It is scored by the reference and not explained.
    """
    return register("aggregation", name)


def register_alignment(name: str) -> Callable[[Thing], Thing]:
    """A custom alignment: `alignment(best, mask)` -> (...), one direction of S from its maxima.

    It is called for the best cosine of each word (..., M) and for that of each token (..., K), and S is the sum of
    both; mask, bool or None, broadcasts to `best`. A class with the method `align(similarity, word_mask, token_mask)`
    -> (R,) reads all cosines (R, M, K) of each pair instead, leaky where the option `similarity` says so; the masks are
    (R, M) and (R, K) bool, or None. It is scored by the reference and not explained.
    """
    return register("alignment", name)


def register_guide(name: str, *, from_patches: bool = False) -> Callable[[Thing], Thing]:
    """A custom guide: `guide(vectors)` -> (B, C), from the vectors (B, V), V any width, that come with the images.

    An image without a vector has zeros, and its guide is zero, which guides nothing. `extra_guides={name: weight}` of
    the configuration gives it its weight. Guides are used without gradient (Eq. 2): what is in one does not learn.
    With `from_patches` it is called with the patches (B, N, C), and needs no data.
    """
    return register("guide", name, from_patches=from_patches)
