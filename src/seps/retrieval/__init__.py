"""Pictures and sentences: data, models, training, evaluation and explanation."""
