"""Memorisation of training texts by a language model: exposure of canaries, and extraction by sampling."""
