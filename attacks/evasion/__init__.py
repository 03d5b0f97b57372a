"""Evasion: images changed a little, so that a finished model takes them for something else (white box, test time)."""
