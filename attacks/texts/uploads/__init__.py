"""Attacks on uploads of text models, one file each."""
