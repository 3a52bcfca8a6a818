"""Is the model getting better? Measurements of a run, of a checkpoint, and between two models."""
