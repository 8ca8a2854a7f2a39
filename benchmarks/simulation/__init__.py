"""Policies in virtual time, on recorded learning curves."""
