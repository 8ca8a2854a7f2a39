"""Policies: which trials of a search run, and where. Pure decisions, the clock passed in."""
