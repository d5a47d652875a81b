"""Why a picture has its score for a sentence."""

from seps.method.attribution import Shares, shares

__all__ = ["Shares", "shares"]
