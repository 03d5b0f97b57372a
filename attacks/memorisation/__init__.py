"""What a language model remembers of its training texts: exposure of canaries, and texts that it writes again."""
