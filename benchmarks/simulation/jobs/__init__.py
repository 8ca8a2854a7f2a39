"""Schedulers of training jobs that share one cluster, in virtual time."""
