"""Attacks on the finished model and on its answers."""
