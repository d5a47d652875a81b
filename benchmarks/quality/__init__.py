"""How good: recall, confidences, explanations, duplicates."""
