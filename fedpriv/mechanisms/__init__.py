"""Privacy mechanisms: each turns the gradients of a batch into one vector that may leave the client."""

from fedpriv.mechanisms.base import Mechanism
from fedpriv.mechanisms.blocks import block_sizes
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.law import Noise
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.mechanisms.redistribution import Redistribution, layer_shares, public_shares, uniform_shares
from fedpriv.mechanisms.registry import build_mechanism
from fedpriv.mechanisms.vmf import VmfMechanism

__all__ = [
    "GaussianMechanism",
    "HeterogeneousGaussianMechanism",
    "LaplaceMechanism",
    "Mechanism",
    "NoMechanism",
    "Noise",
    "Redistribution",
    "VmfMechanism",
    "block_sizes",
    "build_mechanism",
    "layer_shares",
    "public_shares",
    "uniform_shares",
]
