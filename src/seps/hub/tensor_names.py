"""Names of an encoder's tensors differ between releases of transformers; saved ones find their place by one table.

Dinov2's query is `attention.attention.query` in transformers 5.17 and `attention.q_proj` in 5.18; ViT, DeiT, BEiT and
Swin changed likewise between 4 and 5. Both spellings are brought to one common form, and tensors are matched by it.
Within one model no two tensors share a common form, so a match is never a guess.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

Renames = Sequence[tuple[str, str]]
"""Regular expressions of parts of names, and what each becomes."""
_COMMON_FORM: Renames = (
    (r"(^|\.)(encoder\.layers?|model\.layer|layer)\.(\d+)\.", r"\1layers.\3."),
    (r"\.attention\.(?:attention|self)\.([qkv])(?:uery|ey|alue)\.", r".attention.\1_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.attention\.(?:attention|self)\.relative_position_bias", ".attention.relative_position_bias"),
    (r"\.relative_position_bias\.relative_position_bias_table$", ".relative_position_bias_table"),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(?<!\.attention)\.output\.dense\.", ".mlp.fc2."),
)
_COMPUTED = re.compile(r"\.relative_position_index$|(^|\.)embeddings\.position_ids$")
"""Constants that some releases keep among the weights and others compute."""


def renamed_by(table: Renames, name: str) -> str:
    """The name after each replacement of the table, in its order."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


def common_form(name: str) -> str:
    """One spelling for all releases, to compare names by. Not the name of a tensor in any of them."""
    return renamed_by(_COMMON_FORM, name)


def renamed(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """For each saved name the name it has in a model with the names `wanted`; one that has no place stays itself.

    Names that fit as they are stay as they are: another release's names never displace them.
    """
    own, saved = set(wanted), list(saved)
    free: dict[str, list[str]] = {}
    for name in own - set(saved):
        free.setdefault(common_form(name), []).append(name)
    result: dict[str, str] = {}
    for name in saved:
        places = [] if name in own else free.get(common_form(name), [])
        result[name] = places[0] if len(places) == 1 else name
    # Two saved tensors for one place fit neither: both keep their names and are reported as unknown.
    counts = Counter(result.values())
    return {name: place if counts[place] == 1 else name for name, place in result.items()}


def fitted(saved: Mapping[str, T], wanted: Iterable[str]) -> dict[str, T]:
    """Saved values under the names that a model of this release gives them; constants that it computes left out."""
    own = set(wanted)
    places = renamed(saved, own)
    return {
        places[name]: value
        for name, value in saved.items()
        if places[name] in own or not _COMPUTED.search(places[name])
    }


def transformers_version() -> str | None:
    """The installed release of transformers, None without one."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def versions_sentence(saved_with: object) -> str:
    """Which releases a model and this machine have, to end the sentence about tensors without a place."""
    before = f"transformers {saved_with}" if saved_with else "a release of transformers that it does not name"
    return f"It was saved with {before}, here is {transformers_version() or 'none'}."
