"""Attacks that reconstruct sentences from uploads, their scores, and the guesses that they have to beat."""
