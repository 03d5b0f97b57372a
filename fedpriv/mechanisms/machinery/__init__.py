"""What mechanisms are made of: their settings' base, clipping, directional draws, the distributions of their noise."""
