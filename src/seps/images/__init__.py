"""From files to pixels: formats, decoding, dates, tar shards. Nothing here knows a model or a store."""
