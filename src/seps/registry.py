"""Ideas of your own, by name: scoring, decision, aggregation, alignment and guides; `seps.plugins` adds the rest.

    @register_decision("first", form="scores")
    def keep_first(scores, count, valid):
        return (torch.arange(scores.shape[-1]) < count).float().expand_as(scores)

    PatchSlimming(SlimmingConfig(decision="first"))

A class is made once per network, as `Mine(config)` with its `SlimmingConfig`; a function is used as it is. What each is
called with says the function that registers it. `form` is a promise by which the fast paths can use the idea; without
it the network runs in the readable form, and says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Thing = TypeVar("Thing", bound=Callable[..., Any])
OWN = "own"
"""The name of an idea that came as an object and not by name."""
FORMS = {
    "scoring": "additive",
    "decision": "scores",
    "aggregation": "logits",
    "alignment": "maxima",
    "guide": "patches",
}
"""By kind: the form that may be promised."""
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


CALLED_WITH = {
    "scoring": ("patches", "attentions", "weights", "valid"),
    "decision": ("scores", "count", "valid"),
    "aggregation": ("patches", "keep", "scores"),
    "alignment": ("similarity", "word_mask", "token_mask"),
    "guide": ("vectors",),
    "logits": ("patches",),
    "maxima": ("best", "mask"),
    "patches": ("patches",),
    "row": ("recipe",),
}
"""By kind, or by form where that is called otherwise: what an idea is called with."""


class RegistryError(ValueError):
    """An idea that cannot be registered, or is not; the message names it and says what to do."""


@dataclass(frozen=True)
class Idea:
    """A class or function of somebody's own, under its name."""

    kind: str
    name: str
    thing: Callable[..., Any]
    form: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def made(self, *arguments: Any, **options: Any) -> Any:
        """What is used: an instance of a class, or the function itself."""
        return self.thing(*arguments, **options) if isinstance(self.thing, type) else self.thing


_IDEAS: dict[tuple[str, str], Idea] = {}


def register(kind: str, name: str, *, form: str | None = None, **about: Any) -> Callable[[Thing], Thing]:
    """A decorator that puts a class or function under `name`; the same one may come again, and replaces itself.

    Raises `RegistryError` for a name that is taken, and for a form that this kind does not have.
    """
    if callable(name):
        raise RegistryError(f'A {kind} needs a name: write @seps.{_decorator(kind)}("NAME") above {_place(name)[1]}.')
    if not isinstance(name, str) or not name.strip() or name == OWN:
        raise RegistryError(f"A {kind} cannot be registered as {name!r}; choose a name that says what it does.")
    if name in BUILT_IN[kind]:
        raise RegistryError(f"The {kind} {name!r} is built in and cannot be replaced; choose another name.")
    known = FORMS.get(kind)
    if form not in (None, known):
        what = f"a {kind} can promise {known!r}, or nothing" if known else f"a {kind} has none"
        raise RegistryError(f"form={form!r} is not a form of a {kind}: {what}.")

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
        _check_call(kind, name, thing, promised(kind, thing, form))
        _IDEAS[kind, name] = Idea(kind, name, thing, promised(kind, thing, form), about)
        return thing

    return take


def _check_call(kind: str, name: str, thing: Any, form: str | None) -> None:
    """Raise `RegistryError` where an idea cannot be made with its configuration, or called with what it is given."""
    what, given = f"The {kind} {name!r}", CALLED_WITH.get(form or kind) or CALLED_WITH.get(kind)
    if kind == "head" or (isinstance(thing, type) and kind in FORMS):
        _check_arguments(f"{what} is made with", thing, ("config",))
    if given is None:
        return
    if not isinstance(thing, type):
        _check_arguments(f"{what} is called with", thing, given)
        return
    called = inspect.getattr_static(thing, "forward" if hasattr(thing, "forward") else "__call__", None)
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


def promised(kind: str, thing: Any, form: str | None = None) -> str | None:
    """The form that is promised for `thing`: by `form`, or by an attribute of that name."""
    found = form if form is not None else getattr(thing, "form", None)
    return found if found is not None and found == FORMS.get(kind) else None


def registered(kind: str) -> dict[str, Idea]:
    """The ideas of that kind, by name."""
    return {idea.name: idea for (of, _), idea in _IDEAS.items() if of == kind}


def how_to_register(kind: str, name: object) -> str:
    """The sentence for a name that nobody registered."""
    arguments = f"{name!r}, kind='text'" if kind == "text encoder" else f"{name!r}"
    return (
        f"An idea of your own is registered first, by @seps.{_decorator(kind)}({arguments}) in a Python file: give "
        "that file to the command with --plugin FILE, or in Python with seps.load_plugin(FILE)."
    )


def unknown_name(field_name: str, kind: str, name: object) -> str | None:
    """The message for a name that is neither built in nor registered as an idea of that kind; None for one that is."""
    if isinstance(name, str) and (name == OWN or name in BUILT_IN[kind] or (kind, name) in _IDEAS):
        return None
    names = ", ".join(map(repr, [*BUILT_IN[kind], *registered(kind)]))
    return f"{field_name} is {name!r}; choose one of {names}. {how_to_register(kind, name)}"


def register_scoring(name: str, *, form: str | None = None) -> Callable[[Thing], Thing]:
    """A scoring of your own: `scoring(patches, attentions, weights, valid)` -> scores (B, N).

    patches (B, N, C); attentions: by guide ("image", "caption", "dense" and extra guides) the cosines (B, N) of its
    vector with the patches, without gradient; weights: by guide a number (1, or that of `extra_guides`); valid (B, N)
    bool, or None. A guide that an image lacks has a weight and no attention. Without "caption" the scores before any
    caption are asked for.

    form="additive": it is called once per image, without "caption", and the caption's cosine is added to what it
    returns. The fast paths then use it.
    """
    return register("scoring", name, form=form)


def register_decision(name: str, *, form: str | None = None) -> Callable[[Thing], Thing]:
    """A decision of your own: `decision(scores, count, valid)` -> D (..., N), 1 at the kept patches.

    scores (..., N) float32; count (..., 1) is K, the number of patches that `sparse_ratio` asks for, and a decision may
    keep another number; valid (..., N) bool marks the patches that exist, None: all do. D may carry a gradient, and may
    hold weights between 0 and 1.

    form="scores" promises more, and the fast scoring then uses the decision: D holds zeros and ones alone, each row of
    D depends on the same row of the scores alone, and any number of axes may stand before N.
    """
    return register("decision", name, form=form)


def register_aggregation(name: str, *, form: str | None = None) -> Callable[[Thing], Thing]:
    """An aggregation of your own: `aggregation(patches, keep, scores)` -> merged patches (B, Q, C), Q of its choice.

    patches (B, N, C); keep: D (B, N); scores (B, N).

    form="logits": it is called as `aggregation(patches)` and returns logits (B, N, Q), Q = `config.num_merged`; the
    merged patches are those of a softmax over the kept ones (Eq. 4). The fast paths and explanations then use it.
    """
    return register("aggregation", name, form=form)


def register_alignment(name: str, *, form: str | None = None) -> Callable[[Thing], Thing]:
    """An alignment of your own: `alignment(similarity, word_mask, token_mask)` -> S (B,).

    similarity (B, M, K): cosines of words and image tokens, leaky where the option `similarity` says so; word_mask
    (B, M) and token_mask (B, K) bool, or None.

    form="maxima": it is called as `alignment(best, mask)` -> (...), once for the best cosine of each word, (..., M),
    and once for that of each token, (..., K), and S is the sum of both; mask, bool or None, broadcasts to `best`. The
    fast paths and explanations then use it.
    """
    return register("alignment", name, form=form)


def register_guide(name: str, *, form: str | None = None) -> Callable[[Thing], Thing]:
    """A guide of your own: `guide(vectors)` -> (B, C), from the vectors (B, V), V any width, that come with the images.

    An image without a vector has zeros, and its guide is zero, which guides nothing. `extra_guides={name: weight}` of
    the configuration gives it its weight. Guides are used without gradient (Eq. 2): what is in one does not learn.

    form="patches": it is called as `guide(patches)`, (B, N, C) -> (B, C), and needs no data.
    """
    return register("guide", name, form=form)
