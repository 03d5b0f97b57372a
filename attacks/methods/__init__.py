"""The attacks, a file for each family: its settings, what it needs, what runs it, and its words for people.

These files are read whenever an experiment is, so they import torch where they use it.
"""
