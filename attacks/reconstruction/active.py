"""What active attacks share: whom they refuse, and what stands for records that they do not read."""

import torch
from torch import Tensor

from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.settings import AttackSettings
from fedpriv.attacks.threat import ThreatModel

UNREAD = -1  # in place of a label that is not read


def require_grants(threat: ThreatModel, attack: type[AttackSettings]) -> None:
    """Raise AttackRefused if the threat model withholds what an active attack needs."""
    reason = threat.refusal(attack.name, attack.needs)
    if reason is not None:
        raise AttackRefused(f"{reason}; {threat.conduct}")


def refuse_local_training(settings: PublicSettings, attack: str) -> None:
    """Raise AttackRefused if the clients send anything else than one gradient, or one step of SGD along it."""
    if settings.local_steps > 1 or (settings.algorithm == "fedavg" and settings.optimizer == "adam"):
        raise AttackRefused(
            f"{attack} reads one gradient; the clients train for {settings.local_steps} local step(s) with "
            f"{settings.optimizer} (expected fedsgd, or one step of sgd)"
        )


def require_one_gradient(victim: Victim, attack: str) -> None:
    """Raise AttackRefused if an upload is anything else than one gradient."""
    title = f"client {victim.client}, round {victim.round}"
    if victim.model.training is not None:
        raise AttackRefused(f"{title}: {attack} reads one gradient, and this is an update of local training")
    if victim.more:
        raise AttackRefused(f"{title}: {attack} reads one upload at a time; attack each round's by itself")


def mean_image(scene: Scene) -> Tensor:
    """The mean of the public images (C, H, W), normalised; grey, where there are none."""
    if scene.public_images is None or len(scene.public_images) == 0:
        shown = scene.mean.new_full(scene.shape, 0.5)
    else:
        shown = scene.public_images.double().mean(dim=0).to(scene.mean)
    return (shown - scene.mean) / scene.std


def filled(values: Tensor, filler: Tensor, count: int) -> Tensor:
    """Values (R, ...) and as many fillers (...) as are missing to ``count``."""
    return torch.cat([values, filler.to(values).expand(count - len(values), *filler.shape)])
