"""Elastic training jobs: the choice of a size and the change to it."""
