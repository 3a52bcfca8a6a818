"""`exclusions`: rows that must go. `hedged`: a slow read is made a second time. `validation_set`: data to validate on."""
