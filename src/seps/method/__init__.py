"""The method: semantic scoring, selection, tokens, alignment, the networks composed of them, and their losses."""
