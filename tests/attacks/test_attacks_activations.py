"""What a convolution got, from the gradients of weights, against what the network itself gave it."""

import pytest
import torch
from attack_victims import digits, normalise, observe
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.features import Activation, read_activation, read_contrast
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import prepare_victims


def network(stride: int, normal: bool) -> nn.Sequential:
    """The second convolution has 16 positions, more than there are at the first one's 64 and fewer than channels."""
    torch.manual_seed(5)
    norm = nn.GroupNorm(4, 32) if normal else nn.Identity()
    first = nn.Conv2d(1, 8, 3, padding=1, stride=3 - stride, bias=False)
    behind = [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(
        first, nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 32, 3, padding=1, stride=stride), norm, nn.ReLU(), *behind
    )


def read(model: nn.Module, rows: list[int]) -> tuple[Activation | None, Tensor]:
    images, labels = digits()
    heard = observe(model, images[rows], labels[rows])
    scene = Scene.of(Network(model), heard.settings, torch.float32, images[800:])
    (victim,) = prepare_victims([heard], scene.network.names, scene.network.device)
    return read_activation(scene, victim), model[:3](normalise(images[rows])).detach()


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_what_the_network_gave(stride: int, normal: bool) -> None:
    """Up to its factor; with a stride of 2 by way of the convolution behind, through GroupNorm or a bias."""
    found, truth = read(network(stride, normal), [3])
    assert found is not None and found.layer == "3"
    cosine = torch.nn.functional.cosine_similarity(found.values.flatten(), truth.flatten(), dim=0)
    assert float(cosine.abs()) > 1 - 1e-4


def test_of_two_examples_it_says_nothing() -> None:
    assert read(network(1, True), [3, 4])[0] is None


def test_the_contrast_that_the_norm_hides_is_read_off_its_epsilon() -> None:
    model = network(1, True).double()
    images, labels = digits()
    x = normalise(images[[3]]).double()
    loss = nn.functional.cross_entropy(model(x), labels[[3]])
    names, values = zip(*model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad(loss, values), strict=True))
    hidden = read_contrast(Network(model), dict(model.named_parameters()), gradient)
    assert hidden is not None
    torch.testing.assert_close(hidden.restored(0.3 * x), x, rtol=1e-3, atol=1e-3)
