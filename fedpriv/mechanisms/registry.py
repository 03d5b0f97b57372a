"""From settings to a mechanism."""

from fedpriv.config import NOISE_PARAMETER, MechanismConfig
from fedpriv.mechanisms.base import Mechanism
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.mechanisms.redistribution import Redistribution
from fedpriv.mechanisms.vmf import VmfMechanism

__all__ = ["build_mechanism"]


def build_mechanism(config: MechanismConfig, redistribution: Redistribution | None = None) -> Mechanism:
    """Return the mechanism that the settings name.

    With vmf the directions of single examples have length 1, those of whole updates the public length ``clip_norm``.

    Args:
        config: the settings, with the noise itself (sigma, scale or kappa); a plan puts it in place of a target.
        redistribution: r, for hgm; others ignore it.

    Raises:
        ValueError: the noise is a target still, hgm has no r, or numbers are out of range.
    """
    if config.name == "none":
        return NoMechanism()
    noise = config.noise
    if noise is None:
        raise ValueError(f"{config.name} needs {NOISE_PARAMETER[config.name]} itself, not an epsilon")
    match config.name:
        case "gaussian":
            return GaussianMechanism(noise, config.clip_norm, config.clipping)
        case "laplace":
            return LaplaceMechanism(noise, config.clip_norm)
        case "vmf":
            return VmfMechanism(noise, config.blocks, 1.0 if config.unit == "example" else config.clip_norm)
        case "hgm":
            if redistribution is None:
                raise ValueError("hgm needs r, the shares of the noise")
            return HeterogeneousGaussianMechanism(noise, config.clip_norm, redistribution)
