"""Uploads of small transformers, whose sentences are known, for tests of attacks on texts."""

from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.attacks.campaign import Campaign, attack_each
from fedpriv.attacks.observation import Observation, PublicSettings, TextFormat
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.attacks.referee import bare
from fedpriv.attacks.texts.scene import padded
from fedpriv.core.federated import example_losses
from fedpriv.core.names import END, PAD, START
from fedpriv.core.registry import ATTACKS
from fedpriv.mechanisms import mechanism_settings

VOCABULARY, LENGTH = 200, 10


def sentences(count: int, seed: int = 0, length: int = LENGTH) -> Tensor:
    """Random sequences (count, length), the first of full length, padded at the end."""
    stream = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (count, length), generator=stream)
    tokens[:, 0] = START
    lengths = torch.randint(3, length + 1, (count,), generator=stream)
    lengths[0] = length
    return torch.where(torch.arange(length) < lengths[:, None], tokens, PAD)


def gradient(model: nn.Module, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The mean gradient of the trained parameters."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    found = torch.autograd.grad(example_losses(model(tokens), labels).mean(), list(trained.values()))
    return {name: value.detach() for name, value in zip(trained, found, strict=True)}


def public_settings(examples: int, task: str, **changes: Any) -> PublicSettings:
    """Of one gradient of so many sequences; ``changes`` replace some of them."""
    about: dict[str, Any] = {
        "model": {}, "shape": (1, 1, LENGTH), "classes": 2 if task == "classify" else VOCABULARY,
        "mean": (0.5,), "std": (0.5,), "algorithm": "fedsgd", "batch_size": examples, "local_steps": 1,
        "learning_rate": 0.1, "optimizer": "sgd", "momentum": 0.0, "client_examples": 100,
        "mechanism": mechanism_settings({}).model_dump(mode="json", exclude_none=True),
        "text": TextFormat(VOCABULARY, task),  # type: ignore[arg-type]
    }  # fmt: skip
    return PublicSettings(**about | changes)


def observed(model: nn.Module, upload: dict[str, Tensor], settings: PublicSettings) -> Observation:
    """What is heard of an upload, and of the parameters before it."""
    before = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    return Observation(1, 0, before, upload, settings)


def attacked(
    attack: str, model: nn.Module, upload: dict[str, Tensor], examples: int, task: str = "classify", **changes: Any
) -> Campaign:
    """Make one attack on one upload; ``changes``: of the public settings, or of the attack's."""
    config = {key: changes.pop(key) for key in list(changes) if key in ATTACKS[attack].model_fields}
    heard = observed(model, upload, public_settings(examples, task, **changes))
    return attack_each(AttackJob(attack, [heard], model, ATTACKS[attack](**config), 0))


def read_off(campaign: Campaign) -> list[tuple[tuple[int, ...], int]]:
    """The sentences that an attack offers, without beginning and padding, each with its label; in ascending order."""
    assert not campaign.failures, campaign.failures
    result = campaign.found[0]
    tokens = (tuple(bare(row)) for row in result.images)
    return sorted(zip(tokens, result.labels.tolist(), strict=True))


def true(tokens: Tensor, labels: Tensor | None = None) -> list[tuple[tuple[int, ...], int]]:
    """What :func:`read_off` returns where all is right."""
    named = [-1] * len(tokens) if labels is None else labels.tolist()
    return sorted(zip((tuple(bare(row)) for row in tokens), named, strict=True))


def packed(count: int, seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets cut from running text: any token begins them, and texts end and begin within."""
    tokens = torch.randint(3, VOCABULARY, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    tokens[0, 4:6] = torch.tensor([END, START])
    return tokens[:, :-1], tokens[:, 1:]


PACKED = TextFormat(VOCABULARY, "next", packed=True)


def following(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the next token, as the data have them: an end behind each text."""
    longer = padded([[START, *bare(row), END] for row in tokens], tokens.shape[1] + 1)
    targets = torch.where(longer[:, 1:] == PAD, -100, longer[:, 1:])
    return longer[:, :-1], targets
