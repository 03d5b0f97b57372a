"""Evasion attacks: small changes to an image that make a finished model misclassify it (white box, test time)."""
