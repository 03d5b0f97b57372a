"""The evasion attacks, one file each.

These files are read whenever an experiment is, so none imports torch before it is needed.
"""
