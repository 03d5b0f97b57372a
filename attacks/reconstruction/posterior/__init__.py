"""The most probable images, given the mechanism's own noise and what images look like."""
