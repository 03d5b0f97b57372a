"""Differentiable gradients of many dummy batches at once, by the cheapest route that a network allows."""
