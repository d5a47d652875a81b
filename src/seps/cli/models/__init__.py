"""Commands that make, measure and write models, descriptions and the single file."""
