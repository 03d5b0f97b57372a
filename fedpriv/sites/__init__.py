"""Site and property inference: what an upload says of its client as a whole."""
