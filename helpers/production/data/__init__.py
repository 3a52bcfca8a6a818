"""`exclusions`: rows that must go. `hedged`: a slow read is made again. `validation_set`: other held-out data."""
