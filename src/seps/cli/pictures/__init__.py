"""Commands over a person's own pictures: index, search, explain, serve, demo."""
