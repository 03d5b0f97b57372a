"""DAGER (Petrov et al., NeurIPS 2024): sentences from the row spaces of gradients of Linear layers in a transformer."""
