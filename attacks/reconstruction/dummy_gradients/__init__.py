"""Gradients of many dummy batches at once, differentiable, by the cheapest route that a network allows."""
