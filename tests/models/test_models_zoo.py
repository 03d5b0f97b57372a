"""Networks of torchvision, timm and transformers by name, and what the settings change of them."""

import copy
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.gradients.calls import coupled_layers
from fedpriv.models import model_settings, recorded_model
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.settings import SequenceShape
from tests.cases import in_one_test

IMAGES, GREY = (3, 32, 32), (1, 32, 32)
NEXT, LABELS = SequenceShape(8, 11, "byte", 11, True), SequenceShape(8, 11, "byte", 3, False)
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def needs(library: str) -> Any:
    absent = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed (fedpriv[zoo])")
    return (pytest.mark.slow, absent)


def built(name: str, inputs: Any = IMAGES, **more: Any) -> nn.Module:
    settings = model_settings({"name": name, **more})
    if isinstance(inputs, SequenceShape):
        return build_model(settings, (1, 1, inputs.length), inputs.classes, 0, sequences=inputs)
    return build_model(settings, inputs, 5, 0)


def examples(inputs: Any) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    if isinstance(inputs, SequenceShape):
        return torch.randint(3, inputs.vocabulary, (4, inputs.length), generator=draws)
    return torch.rand(4, *inputs, generator=draws)


@pytest.mark.parametrize(
    ("name", "inputs", "more"),
    [
        ("torchvision:squeezenet1_1", IMAGES, {}),
        ("torchvision:resnet18", GREY, {"norm": "group", "arguments": {"zero_init_residual": True}}),
        pytest.param("timm:test_vit", IMAGES, {}, marks=needs("timm")),
        pytest.param("timm:test_resnet", GREY, {"norm": "group"}, marks=needs("timm")),
        pytest.param("transformers:vit", GREY, {"config": {**SMALL, "patch_size": 8}}, marks=needs("transformers")),
        pytest.param("transformers:llama", NEXT, {"config": SMALL}, marks=needs("transformers")),
        pytest.param("transformers:bert", LABELS, {"config": SMALL}, marks=needs("transformers")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_name_is_a_network_of_the_data_s_size(name: str, inputs: Any, more: Any) -> None:
    """The settings written down build it again; one example is treated as it is among others."""
    network = built(name, inputs, **more)
    assert not coupled_layers(network)
    settings = model_settings({"name": name, **more})
    again = recorded_model(settings.decisive())
    assert again == settings and again.version
    x = examples(inputs)
    whole = network.eval()(x)
    classes = inputs.classes if isinstance(inputs, SequenceShape) else 5
    assert whole.shape[-1] == classes and whole.ndim == 2 + (inputs is NEXT)
    alone = torch.cat([network(each[None]) for each in x])
    assert torch.allclose(whole, alone, atol=1e-5)


def normed(shape: tuple[int, int, int] = IMAGES, classes: int = 5) -> nn.Module:
    """Maps of 32 x 32, of 1 x 1 with a channel a group, and vectors."""
    channels, _, _ = shape
    return nn.Sequential(
        nn.Conv2d(channels, 12, 3, padding=1), nn.BatchNorm2d(12, eps=1e-3), nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(12, 32, 1), nn.BatchNorm2d(32, affine=False), nn.Flatten(), nn.BatchNorm1d(32),
        nn.Linear(32, classes),
    )  # fmt: skip


def test_every_batch_norm_is_replaced_and_a_single_example_is_taken() -> None:
    plain, network = built(f"{__name__}:normed"), built(f"{__name__}:normed", norm="group")
    assert [(layer.num_groups, layer.eps, layer.affine) for layer in network if isinstance(layer, nn.GroupNorm)] == [
        (4, 1e-3, True),
        (1, 1e-5, False),
        (1, 1e-5, True),
    ]
    assert {*dict(network.named_parameters())} == {*dict(plain.named_parameters())}
    assert all(torch.equal(value, dict(plain.named_parameters())[name]) for name, value in network.named_parameters())
    x = examples(IMAGES)
    assert torch.allclose(network(x)[:1], network(x[:1]), atol=1e-6)
    assert not list(network.buffers())


class Outputs(NamedTuple):
    logits: Tensor
    auxiliary: Tensor


class Auxiliary(nn.Linear):
    """In training it returns more than logits, as GoogLeNet does."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x.flatten(1))
        return Outputs(logits, logits + 1) if self.training else logits


def auxiliary(num_classes: int, scale: float = 1.0) -> nn.Module:
    network = Auxiliary(3 * 32 * 32, num_classes)
    network.weight.data *= scale
    return network


def test_logits_are_taken_out_of_a_named_tuple() -> None:
    network, x = built(f"{__name__}:auxiliary"), examples(IMAGES)
    assert torch.equal(copy.deepcopy(network)(x), network.eval()(x))
    assert {*dict(network.named_parameters())} == {"weight", "bias"}


def test_arguments_go_to_a_function_of_ones_own() -> None:
    """It may take num_classes in place of the shape and classes."""
    one, two = (built(f"{__name__}:auxiliary", arguments={"scale": scale}).weight for scale in (1.0, 2))
    assert torch.equal(2 * one, two)
    assert built("torchvision.models:squeezenet1_1")(examples(IMAGES)).shape == (4, 5)


@in_one_test(
    ("name", "inputs", "more", "words"),
    [
        ("torchvision:resnet81", IMAGES, {}, "no such network; did you mean resnet18 or"),
        ("torchvision:squeezenet1_1", NEXT, {}, "of torchvision take images, and the data are texts"),
        ("torchvision:squeezenet1_1", IMAGES, {"version": "0.1"}, "version = '0.1': torchvision .* is installed"),
        ("torchvision:squeezenet1_1", IMAGES, {"arguments": {"dropuot": 0}}, "unexpected keyword argument 'dropuot'"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(name: str, inputs: Any, more: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as told:
        built(name, inputs, **more)
    assert "\n" not in str(told.value)
