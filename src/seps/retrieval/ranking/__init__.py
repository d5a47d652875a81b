"""What a rank adds to a score: background level, words of the description, confidence."""
