"""How fast: all pairs, training steps, options."""
