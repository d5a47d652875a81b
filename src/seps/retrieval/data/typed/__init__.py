"""What people type: queries of one to four words, each with the images that are right for it."""

from .captions import queries_of_captions, sentences_of
from .queries import TypedQueries, TypedQuery, load_queries, save_queries

__all__ = ["TypedQueries", "TypedQuery", "load_queries", "queries_of_captions", "save_queries", "sentences_of"]
