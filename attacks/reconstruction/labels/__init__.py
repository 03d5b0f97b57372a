"""Labels read off the last layer, before any image is known."""
