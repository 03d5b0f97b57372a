"""Noise inside the forward pass, and the certificates that it gives: what no small perturbation can change."""

from fedpriv.smoothing.build import build_smoothing, certified_rows, even_smoothing, public_rows, with_noise
from fedpriv.smoothing.noise import RobustnessNoise, Smoothing, drawing, noise_layers
from fedpriv.smoothing.norms import FirstLayer, LayerNorms, layer_norms
from fedpriv.smoothing.votes import SmoothedNetwork

__all__ = [
    "FirstLayer",
    "LayerNorms",
    "RobustnessNoise",
    "SmoothedNetwork",
    "Smoothing",
    "build_smoothing",
    "certified_rows",
    "drawing",
    "even_smoothing",
    "layer_norms",
    "noise_layers",
    "public_rows",
    "with_noise",
]
