"""Models: what they are, that weights come from the seed alone, and every way in which an own model can be wrong."""

import copy
import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import generator_states
from fedpriv.gradients import per_example_gradients, refuse_mixed_examples
from fedpriv.gradients.calls import coupled_layers, dropout_layers
from fedpriv.models import ModelSettings, model_settings
from fedpriv.models.convnets import LenetSettings, ResnetSettings
from fedpriv.models.machinery.build import build_model, model_digest
from fedpriv.models.perceptrons import MlpSettings
from tests.cases import in_one_test

BUILTIN = ("convnet", "lenet", "mlp", "resnet", "strided")
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 13), (1, 64, 48)]


def settings(name: str, hidden: tuple[int, ...] = (16,), **more: object) -> ModelSettings:
    return model_settings({"name": name, **({"hidden": hidden} if name == "mlp" else {}), **more})


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@in_one_test("name", BUILTIN)
@in_one_test("shape", SHAPES)
@pytest.mark.parametrize("init", ["default", "uniform"])
def test_weights_depend_on_the_seed_alone(name: str, shape: tuple[int, int, int], init: str) -> None:
    config = settings(name, init=init)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(config, shape, 5, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same(first, build_model(config, shape, 5, seed=7))
    assert not same(first, build_model(config, shape, 5, seed=8))


@in_one_test("name", BUILTIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_learns_from_every_size_of_image(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(settings(name), shape, 5, seed=0)
    assert model.training
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    logits = model(images)
    assert logits.shape == (4, 5)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_networks_treat_examples_separately(name: str) -> None:
    """Runs rely on it: only own models are tried before they train."""
    model = build_model(settings(name), (1, 8, 8), 5, seed=0)
    images = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    refuse_mixed_examples(model, partial(cross_entropy, reduction="none"), images, torch.arange(7) % 5)
    assert coupled_layers(model) == () and dropout_layers(model) == ()


@in_one_test("name", BUILTIN)
def test_uniform_init_fills_its_range(name: str) -> None:
    """Kolmogorov-Smirnov distance to U(-0.5, 0.5), false alarm below 1e-6; the seed is fixed."""
    model = build_model(settings(name, (64,), init="uniform"), (3, 32, 32), 10, seed=3)
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).sort().values.double()
    assert values[0] >= -0.5 and values[-1] < 0.5
    ranks = torch.arange(1, len(values) + 1) / len(values)
    assert (ranks - (values + 0.5)).abs().max() < 2.7 / len(values) ** 0.5
    assert all(p.detach().unique().numel() > 1 for p in model.parameters() if p.numel() > 1)


def test_lenet_is_the_one_of_deep_leakage() -> None:
    """Zhu et al. 2019 on CIFAR-100: three 5x5 convolutions with 12 channels, 768 features."""
    model = build_model(LenetSettings(), (3, 32, 32), 100, seed=0)
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]  # type: ignore[union-attr]
    assert [(c.kernel_size, c.padding, c.stride, c.out_channels) for c in convolutions] == [
        ((5, 5), (2, 2), (2, 2), 12),
        ((5, 5), (2, 2), (2, 2), 12),
        ((5, 5), (2, 2), (1, 1), 12),
    ]
    assert sum(isinstance(layer, nn.Sigmoid) for layer in model.modules()) == 3
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(768, 100)]
    assert sum(p.numel() for p in model.parameters()) == 3 * 300 + 12 + 2 * (12 * 300 + 12) + 76900


def test_lenet_has_15826_parameters_on_cifar10() -> None:
    """The size that the figures of the directional mechanism are stated for."""
    assert sum(p.numel() for p in build_model(LenetSettings(), (3, 32, 32), 10, seed=0).parameters()) == 15_826


@in_one_test("hidden", [(), (7,), (32, 16, 8)])
@in_one_test(("activation", "kind"), [("relu", nn.ReLU), ("sigmoid", nn.Sigmoid), ("tanh", nn.Tanh)])
def test_mlp_has_the_widths_and_activation_asked_for(
    hidden: tuple[int, ...], activation: str, kind: type[nn.Module]
) -> None:
    config = MlpSettings(hidden=hidden, activation=activation)  # type: ignore[arg-type]
    layers = list(build_model(config, (3, 8, 8), 5, seed=0).children())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    assert [layer.in_features for layer in linear] == [192, *hidden]
    assert [layer.out_features for layer in linear] == [*hidden, 5]
    assert [type(layer) for layer in layers] == [nn.Flatten, *[nn.Linear, kind] * len(hidden), nn.Linear]


def test_resnet_has_eight_weight_layers_and_no_batch_norm() -> None:
    model = build_model(ResnetSettings(), (3, 32, 32), 10, seed=0)
    weights = [m for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and "shortcut" not in n]
    assert len(weights) == 8
    assert sum(isinstance(m, nn.GroupNorm) for m in model.modules()) == 9
    assert sum(p.numel() for p in model.parameters()) < 100_000


@in_one_test("name", ["convnet", "resnet"])
@in_one_test("side", [(7, 8), (8, 7), (1, 1)])
def test_images_too_small_are_refused(name: str, side: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=rf"{name}.*{side[1]}x{side[0]}; expected at least 8x8"):
        build_model(model_settings({"name": name}), (1, *side), 10, seed=0)


def test_batch_coupled_and_dropout_layers_are_named() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout2d(0.1)), nn.Dropout(0.0),
        nn.SyncBatchNorm(3), nn.GroupNorm(1, 3), nn.LSTM(2, 2, 2, dropout=0.1), nn.MultiheadAttention(2, 1),
        nn.AlphaDropout(0.2), nn.InstanceNorm2d(3),
    )  # fmt: skip
    assert coupled_layers(model) == ("0", "2.0", "4")
    assert dropout_layers(model) == ("1", "2.1", "6", "8")


OWN = """
import random

import numpy as np
import torch
from torch import nn

def linear(shape, classes):
    c, h, w = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, classes))

def drawn(shape, classes):
    model = linear(shape, classes)
    model[1].bias.data = torch.from_numpy(np.random.rand(classes)) + random.random()
    return model

def normed(shape, classes):
    return nn.Sequential(nn.BatchNorm2d(shape[0]), nn.Dropout(), linear(shape, classes)).eval()

def double(shape, classes):
    return linear(shape, classes).double()

def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def raising(shape, classes):
    raise KeyError("a\\nkey")

def leaving(shape, classes):
    raise SystemExit(3)

class Leaving(nn.Linear):
    def forward(self, x):
        raise SystemExit("no licence")

def leaving_later(shape, classes):
    return Leaving(2, 2)

def no_network(shape, classes):
    return [1]

def no_parameters(shape, classes):
    return nn.Flatten()

def frozen(shape, classes):
    return linear(shape, classes).requires_grad_(False)

def wrong_output(shape, classes):
    return linear(shape, classes + 1)

def wrong_input(shape, classes):
    return nn.Linear(1000, classes)

def stepping(shape, classes):
    model = linear(shape, classes)
    model[1].weight.register_post_accumulate_grad_hook(lambda value: value.grad.clamp_(-1, 1) and None)
    return model

class Detecting(nn.Linear):
    def forward(self, x):
        logits = super().forward(x.flatten(1))
        return {"out": logits} if self.training else logits

def detecting(shape, classes):
    return Detecting(shape[0] * shape[1] * shape[2], classes)

def convolving(shape, classes):
    return nn.Sequential(nn.Conv1d(shape[0], 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, classes))

class Squeezed(nn.Sequential):
    def forward(self, x):
        return super().forward(x.squeeze(2))

def squeezing(shape, classes):
    return Squeezed(*convolving(shape, classes))

class Pair(nn.Linear):
    def forward(self, x):
        return x, x

def two_outputs(shape, classes):
    return Pair(2, 2)

def sparse(shape, classes):
    model = linear(shape, classes).append(nn.Identity())
    model[2].register_buffer("links", torch.eye(3).to_sparse())
    return model

def inferred(shape, classes):
    with torch.inference_mode():
        model = nn.Sequential(linear(shape, classes), nn.Linear(classes, classes))
        model[1].weight = model[0][1].weight if shape == (classes, 1, 1) else model[1].weight
        model.register_buffer("ones", torch.ones(2))
        return model

class Waves(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(*shape, dtype=torch.complex64))
        self.register_buffer("phases", torch.polar(torch.ones(shape), torch.rand(shape)))
        self.last = linear(shape, classes)

    def forward(self, x):
        return self.last(torch.fft.ifft2(torch.fft.fft2(x) * self.filter * self.phases).real)

def weight_normed(shape, classes):
    model = linear(shape, classes)
    torch.nn.utils.weight_norm(model[1], dim=1)
    return model

def waves(shape, classes):
    return Waves(shape, classes)

class Merging(nn.Linear):
    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)

def merging(shape, classes):
    return nn.Sequential(nn.Flatten(), Merging(shape[0] * shape[1] * shape[2], classes))

def otherwise(dims, n):
    return nn.Linear(dims, n)

not_a_function = 3
made = nn.Flatten()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a name of its own in the working folder, which the import path does not hold."""
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    monkeypatch.chdir(tmp_path)
    package = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "nets.py").write_text(OWN)
    (tmp_path / package / "needy.py").write_text("import a_package_that_is_not_there")
    (tmp_path / package / "broken.py").write_text("def f(:\n")
    (tmp_path / package / "falling.py").write_text("1 / 0")
    (tmp_path / package / "script.py").write_text("import sys\nsys.exit(0)")
    yield package


@in_one_test("function", ["linear", "drawn", "normed", "double", "lazy", "inferred", "weight_normed", "waves"])
@in_one_test("init", ["default", "uniform"])
def test_own_models_are_built_from_the_working_folder(own: str, function: str, init: str) -> None:
    config = model_settings({"name": f"{own}.nets:{function}", "init": init})
    states = generator_states()
    model = build_model(config, (3, 8, 8), 5, seed=1)
    assert generator_states() == states
    assert same(model, build_model(config, (3, 8, 8), 5, seed=1))
    assert all(layer.training for layer in model.modules())
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_complex_numbers_are_trained_as_pairs_of_real_ones(own: str) -> None:
    """The oracle: torch's view of the gradients as real numbers, one example at a time."""
    config = model_settings({"name": f"{own}.nets:waves"})
    model = build_model(config, (2, 4, 4), 3, seed=1).to(torch.float64)
    refuse_mixed_examples(model, example_losses, torch.randn(13, 2, 4, 4).double(), torch.arange(13) % 3)
    x, y = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.arange(3)
    given = sys.modules[f"{own}.nets"].Waves((2, 4, 4), 3)
    with torch.no_grad():
        given.filter.data, given.phases.data = model.filter.clone(), model.phases.clone()
        given.last.load_state_dict(model.last.state_dict())
    given.last.double()
    found = per_example_gradients(model, example_losses, x, y).rows(0, 3)
    pairs = torch.stack([found[f"parametrizations.filter.original{part}"] for part in (0, 1)], dim=-1)
    for row in range(3):
        losses = example_losses(given(x[[row]]), y[[row]])
        exact, last = torch.autograd.grad(losses.sum(), [given.filter, given.last[1].weight])
        torch.testing.assert_close(pairs[row], torch.view_as_real(exact), rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(found["last.1.weight"][row], last, rtol=1e-10, atol=1e-13)
    assert float(model.phases.imag.abs().max()) > 0


def test_weights_of_torchs_first_weight_norm_are_copied(own: str) -> None:
    model = build_model(model_settings({"name": f"{own}.nets:weight_normed"}), (3, 2, 2), 4, seed=1)
    given = model[1].weight.detach().clone()
    refuse_mixed_examples(model, example_losses, torch.randn(13, 3, 2, 2), torch.arange(13) % 4)
    model(torch.ones(1, 3, 2, 2)).sum().backward()
    torch.testing.assert_close(copy.deepcopy(model)[1].weight, given)


def test_layers_that_do_more_than_change_their_mode_are_as_they_were(own: str) -> None:
    """Adapters such as loralib's are merged for evaluation; merged ones have no gradient."""
    model = build_model(model_settings({"name": f"{own}.nets:merging"}), (3, 2, 2), 4, seed=1)
    assert model.training and not model[1].merged


def test_weights_that_were_made_under_inference_mode_can_be_trained_and_changed(own: str) -> None:
    model = build_model(model_settings({"name": f"{own}.nets:inferred"}), (3, 1, 1), 3, seed=1)
    assert model[1].weight is model[0][1].weight
    model(torch.ones(1, 3, 1, 1)).sum().backward()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(1)


def test_the_trial_of_an_own_model_leaves_running_statistics_alone(own: str) -> None:
    model = build_model(model_settings({"name": f"{own}.nets:normed"}), (3, 8, 8), 5, seed=1)
    assert model.get_buffer("0.num_batches_tracked") == 0
    assert coupled_layers(model) == ("0",) and dropout_layers(model) == ("1",)


@in_one_test(
    ("target", "why"),
    [
        ("no_such_package.nets:linear", "no module no_such_package in "),
        ("{own}.other:linear", r"no module {own}.other in "),
        ("{own}.nets:zzz", "module {own}.nets has no 'zzz'; it has linear, drawn, "),
        ("{own}.nets:linaer", "module {own}.nets has no 'linaer'; did you mean linear?"),
        ("{own}.nets:not_a_function", "expected a function or a class that makes the network, not int"),
        ("{own}.nets:otherwise", "takes dims, n as well; given by their names are shape, classes, num_classes, and"),
        ("{own}.nets:made", "expected a function or a class that makes the network, not Flatten"),
        ("{own}.nets:", "has no ''"),
        (":linear", "cannot be imported: ValueError"),
        ("{own}.needy:f", "cannot be imported: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("{own}.broken:f", "cannot be imported: SyntaxError"),
        ("{own}.falling:f", "cannot be imported: ZeroDivisionError"),
        ("{own}.nets:raising", r"raising(shape=(3, 8, 8), classes=5) raises KeyError"),
        ("{own}.nets:leaving", "raises SystemExit: 3"),
        ("{own}.nets:leaving_later", "cannot take images of shape (2, 3, 8, 8): SystemExit: no licence"),
        ("{own}.script:f", "cannot be imported: SystemExit: 0"),
        ("{own}.nets:no_network", "no_network returns list; expected a torch.nn.Module"),
        ("{own}.nets:no_parameters", "no parameters to train"),
        ("{own}.nets:frozen", "no parameters to train"),
        ("{own}.nets:wrong_output", "images of shape (2, 3, 8, 8) give (2, 6); expected logits of shape (2, 5)"),
        ("{own}.nets:wrong_input", "cannot take images of shape (2, 3, 8, 8): RuntimeError"),
        ("{own}.nets:two_outputs", "give (2, 3, 8, 8); expected logits"),
        ("{own}.nets:sparse", "buffer 2.links is sparse"),
        ("{own}.nets:detecting", "gives dict in training; expected logits, or what has them as logits"),
        ("{own}.nets:stepping", "1.weight has a hook behind its gradient (register_post_accumulate_grad_hook)"),
        ("./{own}/nets.py:linear", "expected the name of a module, nets, without folder and .py"),
    ],
)
def test_own_models_that_do_not_work_are_refused_in_one_line(own: str, target: str, why: str) -> None:
    name = target.format(own=own)
    with pytest.raises(InputError) as caught:
        build_model(model_settings({"name": name}), (3, 8, 8), 5, seed=0)
    message = str(caught.value)
    assert message.startswith(f"model.name = {name!r}: ")
    assert why.format(own=own) in message
    assert "\n" not in message


def test_a_call_that_fails_is_shown_with_its_arguments(own: str) -> None:
    settings = model_settings({"name": f"{own}.nets:raising", "arguments": {"width": 8}})
    with pytest.raises(InputError, match=r"raising\(shape=\(3, 8, 8\), classes=5, width=8\) raises TypeError"):
        build_model(settings, (3, 8, 8), 5, seed=0)


def test_an_own_network_that_lacks_the_line_for_signals_is_told_it(own: str) -> None:
    with pytest.raises(InputError, match=r"images of shape \(2, 2, 1, 100\): .*x\.squeeze\(2\) suits Conv1d"):
        build_model(model_settings({"name": f"{own}.nets:convolving"}), (2, 1, 100), 5, seed=0)
    with pytest.raises(
        InputError, match=r"a row of a table is \(B, 1, 1, features\): x\.flatten\(1\) suits Linear; a sig"
    ):
        build_model(model_settings({"name": f"{own}.nets:wrong_input"}), (1, 1, 19), 5, seed=0)
    network = build_model(model_settings({"name": f"{own}.nets:squeezing"}), (2, 1, 100), 5, seed=0)
    assert network(torch.zeros(3, 2, 1, 100)).shape == (3, 5)


class Layered(nn.Module):
    """With a number that is trained, one that is frozen, and two that are kept beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.zeros(1, 0, 2), persistent=False)
        self.activation: nn.Module = nn.Tanh()


@pytest.mark.parametrize("builder", ["fedpriv.models.perceptrons", "tests.models.test_models"])
def test_the_digest_is_of_all_numbers_and_kinds_of_layers(builder: str) -> None:
    models = [Layered() for _ in range(6)]
    models[1].trained.data[1] = 2
    models[2].frozen.data += 1
    models[3].get_buffer("count").add_(1)
    models[4].register_buffer("hidden", torch.zeros(1, 0, 3), persistent=False)
    models[5].activation = nn.ReLU()
    assert len({model_digest(model, builder) for model in models}) == 6
    assert model_digest(Layered(), builder) == model_digest(models[0], builder)


def test_the_digest_of_an_own_model_is_of_its_layers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a layer is of another file than the function that builds the network."""
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(tmp_path / "layers.py"))
    digests = []
    for text in ("first", "second"):
        (tmp_path / "layers.py").write_text(text)
        monkeypatch.setattr(sys.modules[__name__], "__spec__", ModuleSpec(text, None))  # as after a reload
        digests.append(model_digest(nn.Sequential(Layered()), "of.a.package"))
    assert digests[0] != digests[1]
