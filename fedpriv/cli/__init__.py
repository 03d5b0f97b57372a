"""The command line: one module a command, and what they show on the terminal."""

from fedpriv.cli.app import main

__all__ = ["main"]
