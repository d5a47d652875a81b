"""The web service over one store: an API and one page."""
