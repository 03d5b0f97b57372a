"""What mechanisms are made of: their settings' base, clipping, directional draws, the laws of their noise."""
