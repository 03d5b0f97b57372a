"""Dummy batches against uploads: the comparison, what is minimised, and how it is evaluated in bounded memory."""
