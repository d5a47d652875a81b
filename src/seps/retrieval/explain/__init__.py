"""Why a picture has its score for a sentence."""

from seps.retrieval.explain.shares import Shares, shares

__all__ = ["Shares", "shares"]
