"""Heads: from the features of images and captions to their similarities, each a published way."""

from __future__ import annotations

from seps.method.config import ConfigError, SlimmingConfig
from seps.registry import OWN, registered
from seps.retrieval.heads.base import Head, ImageFeatures, Scores, TextFeatures, checked_scores
from seps.retrieval.heads.baselines import DescriptionHead, MaxSimHead, MeanHead, ScanHead
from seps.retrieval.heads.slimming import SlimmingHead

__all__ = [
    "DescriptionHead",
    "Head",
    "ImageFeatures",
    "MaxSimHead",
    "MeanHead",
    "ScanHead",
    "Scores",
    "SlimmingHead",
    "TextFeatures",
    "checked_scores",
    "make_head",
]


def make_head(kind: str, num_prefix_tokens: int, slimming: SlimmingConfig) -> Head:
    """The head of that name; of the built-in ones `slimming` matters to "slimming" and "maxsim" alone.

    Raises ConfigError for a registered head that is none, and for "own", which stands for an object.
    """
    if kind == OWN:
        raise ConfigError(
            f"head={OWN!r} names a head that was passed as an object; pass it again: from_pretrained(folder, head=...)."
        )
    own = registered("head").get(kind)
    if own is not None:
        head = own.thing(slimming)
        if not isinstance(head, Head):
            raise ConfigError(f"The head {kind!r} is a {type(head).__name__}; make it a seps.retrieval.heads.Head.")
        return head
    if kind == "mean":
        return MeanHead(num_prefix_tokens)
    if kind == "description":
        return DescriptionHead()
    if kind == "slimming":
        return SlimmingHead(slimming)
    if kind == "maxsim":
        return MaxSimHead(slimming)
    return ScanHead(num_prefix_tokens, kind)
