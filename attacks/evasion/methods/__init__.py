"""The evasion attacks, one file each; they are read whenever an experiment is, so none imports torch at once."""
