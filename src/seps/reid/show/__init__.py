"""Pictures of a trained model: ranked lists, kept patches, gradients, a map of its features."""
