"""Parts of mechanisms: the base of their settings, clipping, sampling, and the distributions of their noise."""
