"""Algorithms: what clients and server do instead of, or around, the usual round; one folder each."""
