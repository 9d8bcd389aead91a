"""Level sets of an output, shared by ProbabilityHead and QuantileHead."""
