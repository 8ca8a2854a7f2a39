"""Hyper-parameter searches: trials in time slices on slots, their records, and their tasks on Mesos."""
