"""Membership attacks on the finished model and on its answers."""
