"""Why a picture has its score for a sentence."""

from seps.nn.attribution import Shares, shares

__all__ = ["Shares", "shares"]
