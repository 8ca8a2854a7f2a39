"""Runs a script up to its first training step and takes its model's profile there."""
