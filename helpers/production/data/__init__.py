"""`exclusions`: rows that must go from stored latents and running jobs. `hedged`: a slow read is made a second time."""
