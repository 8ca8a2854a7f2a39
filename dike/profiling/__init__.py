"""Reads a model's parameters, FLOPs and longest path from its complete graph (paper 'Dike', section 3.1)."""
