"""Search policies in virtual time, on recorded learning curves."""
