"""Baselines from the paper, tfmesos and Optimus, under the same step-time model."""
