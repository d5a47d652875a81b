"""Decoded photos of sets that are larger than the memory one may take for them."""

from .pictures import PictureStream, Pixels, in_batches, rows_to_keep, stacked, streaming_sentence

__all__ = ["PictureStream", "Pixels", "in_batches", "rows_to_keep", "stacked", "streaming_sentence"]
