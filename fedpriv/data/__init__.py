"""Data: which images there are, who holds which of them, and which of those make up a batch."""
