"""Why a picture has its score for a sentence."""
