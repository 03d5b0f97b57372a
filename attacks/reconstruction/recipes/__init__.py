"""Gradient matching made of parts: what is minimised, over which variables, and by which optimiser."""
