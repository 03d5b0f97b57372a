"""Texts: attacks that read sentences out of uploads, how these are scored, and the guesses that they have to beat."""
