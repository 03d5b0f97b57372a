"""What a convolution got, from the gradients of weights, against what the network itself gave it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, lenet, normalise, observe
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fedpriv.attacks.reconstruction.activations import Activation, deepened, read_activation, read_contrast
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.features import read_features
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
    cosine = F.cosine_similarity(found.values.flatten(), truth.flatten(), dim=0)
    assert float(cosine.abs()) > 1 - 1e-4


def test_of_a_convolution_with_a_stride_a_single_sum_needs_no_choice() -> None:
    """LeNet's second one; its patches overlap little, and of what they span there is one picture."""
    model, (images, labels) = lenet(), digits()
    heard = observe(model, images[[3]], labels[[3]])
    scene = Scene.of(Network(model), heard.settings, torch.float32)
    (victim,) = prepare_victims([heard], scene.network.names, scene.network.device)
    found = read_activation(scene, victim)
    assert found is not None and found.layer == "conv2"
    given: list[Tensor] = []
    model.get_submodule("conv2").register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach()))
    model(normalise(images[[3]]))
    assert float(F.cosine_similarity(found.values.flatten(), given[0].flatten(), dim=0)) > 1 - 1e-4


@pytest.mark.parametrize(("channels", "rows"), [(16, [3]), (8, [3]), (16, [3, 5])])
def test_from_what_one_convolution_got_follows_what_earlier_ones_got(channels: int, rows: list[int]) -> None:
    """Through shortcuts and a stride of 2; with 8 channels the gradients of the strided ones do not say all of it."""
    torch.manual_seed(5)
    norm, last = partial(nn.GroupNorm, 4), 32 * len(rows)
    smaller = nn.Sequential(nn.Conv2d(8, channels, 1, stride=2, bias=False), norm(channels))
    wider = nn.Sequential(nn.Conv2d(channels, last, 1, bias=False), norm(last))
    blocks = [
        BasicBlock(8, channels, stride=2, downsample=smaller, norm_layer=norm),
        BasicBlock(channels, channels, norm_layer=norm),
        BasicBlock(channels, last, downsample=wider, norm_layer=norm),
    ]
    first = [nn.Conv2d(1, 8, 3, padding=1, bias=False), norm(8), nn.ReLU()]
    model = nn.Sequential(*first, *blocks, nn.Flatten(), nn.Linear(16 * last, 10))
    images, labels = digits()
    heard = observe(model, images[rows], labels[rows])
    scene = Scene.of(Network(model), heard.settings, torch.float32, images[800:])
    (victim,) = prepare_victims([heard], scene.network.names, scene.network.device)
    begin = read_activation(scene, victim)
    assert begin is not None and begin.layer == "5.conv1"
    found = deepened(scene, victim, begin, read_features(scene, victim))
    assert found.layer == ("3.conv1" if len(rows) == 1 else "3.conv2")
    given: list[Tensor] = []
    model.get_submodule(found.layer).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach()))
    model(normalise(images[rows]))
    cosines = F.cosine_similarity(found.values.flatten(1)[:, None], given[0].flatten(1)[None], dim=2)
    assert sorted(cosines.argmax(dim=1).tolist()) == list(range(len(rows)))
    assert float(cosines.max(dim=1).values.min()) > 0.99


@pytest.mark.parametrize("stride", [1, 2])
def test_inputs_of_three_examples_are_told_apart_by_their_zeros(stride: int) -> None:
    torch.manual_seed(5)
    first = [nn.Conv2d(1, 24, 3, padding=1, stride=3 - stride, bias=False), nn.GroupNorm(2, 24), nn.ReLU()]
    second = [nn.Conv2d(24, 64, 3, padding=1, stride=stride), nn.GroupNorm(4, 64), nn.ReLU()]
    behind = [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)]
    found, truth = read(nn.Sequential(*first, *second, *behind), [3, 4, 5])
    assert found is not None and found.layer == "3"
    cosines = F.cosine_similarity(found.values.flatten(1)[:, None], truth.flatten(1)[None], dim=2).abs()
    assert sorted(cosines.argmax(dim=1).tolist()) == [0, 1, 2]
    assert float(cosines.max(dim=1).values.min()) > 1 - 1e-4


def test_of_more_positions_than_channels_it_says_nothing() -> None:
    assert read(network(1, True), [3, 4])[0] is None


def test_the_contrast_that_the_norm_hides_is_read_off_its_epsilon() -> None:
    model = network(1, True).double()
    images, labels = digits()
    x = normalise(images[[3]]).double()
    loss = F.cross_entropy(model(x), labels[[3]])
    names, values = zip(*model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad(loss, values), strict=True))
    hidden = read_contrast(Network(model), dict(model.named_parameters()), gradient)
    assert hidden is not None
    torch.testing.assert_close(hidden.restored(0.3 * x), x, rtol=1e-3, atol=1e-3)
