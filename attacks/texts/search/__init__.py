"""Sentences found by search: gradient matching over vectors of tokens, and over tokens themselves."""
