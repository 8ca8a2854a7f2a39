"""Hyper-parameter searches: trials that take turns on slots, their records, and the Mesos side of it."""
