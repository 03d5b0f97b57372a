"""Small models with known numbers behind an endpoint in this process, and what attacks on them are given."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from fedpriv.attacks.scene import Counted, ProbeReferee, ProbeScene, Public
from fedpriv.core.randomness import Secret
from fedpriv.service.endpoint import Endpoint, Oracle
from fedpriv.service.policies import Facts, Scores
from tests.service.named import named_policy

SHAPE = (1, 4, 4)


def linear(classes: int, seed: int, scale: float = 1.0) -> nn.Sequential:
    """Softmax regression with weights from a normal distribution."""
    network = nn.Sequential(nn.Flatten(), skip_init(nn.Linear, 16, classes)).double()
    return _filled(network, seed, scale)


def hidden(classes: int, seed: int, width: int = 6) -> nn.Sequential:
    """One hidden layer."""
    first, last = skip_init(nn.Linear, 16, width), skip_init(nn.Linear, width, classes)
    return _filled(nn.Sequential(nn.Flatten(), first, nn.Tanh(), last).double(), seed, 1.0)


def _filled(network: nn.Sequential, seed: int, scale: float) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    for value in network.parameters():
        value.data = torch.from_numpy(scale * rng.standard_normal(tuple(value.shape)))
    return network


def public(count: int, seed: int, classes: int) -> Public:
    """Images and labels that have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    return Public(torch.from_numpy(rng.random((count, *SHAPE))), torch.from_numpy(rng.integers(classes, size=count)))


def endpoint(network: nn.Module, classes: int, answers: str = "none", most: int = 1_000_000) -> Counted:
    """Answers of a network that is fed pixels as they are."""

    def scores(images: Tensor) -> Scores:
        return network(images.double()).detach().numpy()

    oracle = Oracle(named_policy(answers), Facts(classes), SHAPE, scores, 0.0, Secret.of_seed(0))
    return Counted(Endpoint(oracle), most)


def scene(
    network: nn.Module,
    copy: Callable[[int], nn.Module],
    classes: int,
    budget: int,
    answers: str = "none",
    opened: Sequence[Counted] = (),
) -> ProbeScene:
    """What an adversary has; endpoints are taken from ``opened`` where some are given."""
    ready = list(opened)

    def open_one() -> Counted:
        return ready.pop(0) if ready else endpoint(network, classes, answers, budget)

    def model(images: Tensor) -> Tensor:
        return network(images)

    return ProbeScene(
        open_one, budget, classes, SHAPE, copy, lambda images: images, 5,
        labels_only=named_policy(answers).labels_only, public=public(40, 1, classes), model=model,
    )  # fmt: skip


def referee(network: nn.Module, classes: int) -> ProbeReferee:
    """What attacks are scored against; class means are random pictures."""
    held = public(200, 2, classes)
    means = public(classes, 3, classes).images
    network.requires_grad_(False)
    return ProbeReferee(network, classes, held, means, public(classes, 4, classes).images, 9)
