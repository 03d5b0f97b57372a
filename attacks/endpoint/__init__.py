"""Attacks on the finished model and on its answers: extraction, inversion, attributes, membership by queries."""
