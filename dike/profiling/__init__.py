"""Reads a model's numbers - parameters, FLOPs, longest path - off its finished graph (paper 'Dike', section 3.1)."""
