"""Noise inside the forward pass, and the certificates that follow from it."""
