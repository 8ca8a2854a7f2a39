"""Roles of the processes of a training job, for all libraries. See docs/training-jobs.md."""
