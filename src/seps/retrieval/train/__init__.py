"""Training a retrieval model."""
