"""Policies: pure decisions, the clock passed in; the same objects live and in virtual time."""
