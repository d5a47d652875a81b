"""Heads: from the features of images and captions to their similarities, each a published way."""

from __future__ import annotations

from seps.retrieval.heads.base import Head, ImageFeatures, Scores, SlimmingHead, TextFeatures, checked_scores
from seps.retrieval.heads.baselines import DescriptionHead, MaxSimHead, MeanHead, ScanHead

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
]
