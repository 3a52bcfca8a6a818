"""Whether the model gets better: what is measured of a run, at a checkpoint, between two models."""
