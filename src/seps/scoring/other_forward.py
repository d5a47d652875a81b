"""Networks whose `forward` is not the score of this library: a subclass with another one, or hooks on the network.

Such a network is scored by its `forward` alone, or it would be scored as something else.
"""

from __future__ import annotations

import inspect
import warnings

from torch import Tensor

from seps.method.checks import InputError
from seps.method.encoded import EncodedImages, Scores
from seps.method.network import PatchSlimming
from seps.scoring.inputs import ImageBlock, SortedTexts


def warn_slow(reason: str) -> None:
    """Warn that all pairs are scored by the reference implementation or by `forward`, slowly, and why."""
    warnings.warn(f"Scored by the reference implementation, which is slow: {reason}.", UserWarning, stacklevel=3)


def scores_of_forward(
    net: PatchSlimming, images: ImageBlock | EncodedImages, texts: SortedTexts, want_masks: bool = False
) -> Scores:
    """What the network's own forward returns: similarities, and masks where it returns them.

    Raises `InputError` for what it does not take, or did not return.
    """
    if isinstance(images, EncodedImages) or texts.longest_description:
        what = "paired_dense" if texts.longest_description else "encoded images"
        raise InputError(
            f"{type(net).__name__} has a forward of its own (or a hook on it), which {what} would bypass; pass the "
            "images as features, with their own descriptions."
        )
    given = {name: value for name, value in vars(images).items() if name != "images" and value is not None}
    parameters = inspect.signature(net.forward).parameters
    refused = sorted(given.keys() - parameters.keys())
    if refused and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise InputError(
            f"{type(net).__name__} has a forward of its own, which takes no {refused}; leave them out, or let it "
            "take the arguments of PatchSlimming.forward."
        )
    scored = net(images.images, texts.words, texts.lengths, **given)
    sims, masks = (scored, ()) if isinstance(scored, Tensor) else scored[:2]
    masks = (masks,) if isinstance(masks, Tensor) else tuple(masks)
    if want_masks and not masks:
        raise InputError(
            f"want_masks needs D of each set, but the forward of {type(net).__name__} returned similarities alone; "
            "let it return (similarities, masks) as PatchSlimming does in training."
        )
    return Scores(sims, masks=masks if want_masks else ())
