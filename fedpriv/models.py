"""The networks: four that are built in, or one of your own. All take normalised images (B, C, H, W) and give logits."""

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpriv.config import ModelConfig
from fedpriv.errors import InputError
from fedpriv.randomness import seeded_generators, torch_stream

__all__ = ["build_model", "model_digest"]

Shape = tuple[int, int, int]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
SMALLEST_SIDE = 8  # convnet and resnet halve the image twice


def build_model(config: ModelConfig, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build the network that the config names, on the CPU in float32, in training mode.

    The weights depend on the seed alone: global generators are neither read nor changed. An own function's weights do
    so too as long as it draws them from the global generators of torch, numpy or Python.

    Args:
        config: reads name and init; hidden and activation for the mlp. With init = "uniform" every parameter is drawn
            from U(-0.5, 0.5), the initialisation of Zhu et al. 2019 (Deep Leakage from Gradients).
        shape: (C, H, W) of an image.
        classes: number of logits.
        seed: the experiment's seed.

    Raises:
        InputError: the image is too small, or an own function cannot be found, raises, or returns something that is
            not a network for such images.
    """
    with seeded_generators(torch_stream(seed, "model").initial_seed(), torch.device("cpu")):
        model = _construct(config, shape, classes).to(device="cpu", dtype=torch.float32)
        _check_output(model, config.name, shape, classes)
    if config.init == "uniform":
        _draw_uniform(model, torch_stream(seed, "model"))
    return model


def model_digest(model: nn.Module, name: str) -> bytes:
    """Return SHA-256 of what a network computes with, as far as the settings do not say it.

    That is its numbers, frozen ones and counts included, the kinds of its layers and, of one of your own, the files
    that define it and its layers. What these import from further files, or read, is not looked at.

    Args:
        model: as :func:`build_model` returns it.
        name: as in ``model.name``.
    """
    digest = sha256()
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().reshape(-1).view(torch.uint8).numpy().data)
    for key, layer in model.named_modules():
        digest.update(f"{key} {type(layer).__module__}.{type(layer).__qualname__}\n".encode())
    if ":" in name:
        modules = {name.partition(":")[0], *(type(layer).__module__ for layer in model.modules())}
        for module in sorted(one for one in modules if one.partition(".")[0] != "torch"):
            digest.update(sha256(_code(module)).digest())
    return digest.digest()


def _code(module: str) -> bytes:
    """The file of an imported module; nothing where it has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path).read_bytes() if path else b""


def _construct(config: ModelConfig, shape: Shape, classes: int) -> nn.Module:
    if config.name == "mlp":
        return _mlp(shape, classes, config.hidden, ACTIVATIONS[config.activation])
    if config.name in BUILTIN:
        return BUILTIN[config.name](shape, classes)
    return _own_model(config.name, shape, classes)


def _mlp(shape: Shape, classes: int, hidden: tuple[int, ...], activation: type[nn.Module]) -> nn.Module:
    """Linear layers of the given widths; without hidden layers, softmax regression."""
    channels, height, width = shape
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    widths = (channels * height * width, *hidden)
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        model.add_module(f"hidden{number}", nn.Linear(inputs, outputs))
        model.add_module(f"activation{number}", activation())
    model.add_module("output", nn.Linear(widths[-1], classes))
    return model


def _lenet(shape: Shape, classes: int) -> nn.Module:
    """The sigmoid LeNet of Zhu et al. 2019: twice differentiable, as their attack needs."""
    channels, height, width = shape
    features = 12 * -(-height // 4) * -(-width // 4)
    return _sequence(
        conv1=nn.Conv2d(channels, 12, kernel_size=5, stride=2, padding=2),
        sigmoid1=nn.Sigmoid(),
        conv2=nn.Conv2d(12, 12, kernel_size=5, stride=2, padding=2),
        sigmoid2=nn.Sigmoid(),
        conv3=nn.Conv2d(12, 12, kernel_size=5, stride=1, padding=2),
        sigmoid3=nn.Sigmoid(),
        flatten=nn.Flatten(),
        output=nn.Linear(features, classes),
    )


def _convnet(shape: Shape, classes: int) -> nn.Module:
    """A plain ReLU ConvNet, after the ConvNets of Geiping et al. 2020, smaller and without BatchNorm."""
    channels, height, width = shape
    _check_side("convnet", height, width)
    return _sequence(
        conv1=nn.Conv2d(channels, 32, kernel_size=3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, kernel_size=3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(64, 64, kernel_size=3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(64, 128, kernel_size=3, padding=1),
        relu4=nn.ReLU(),
        pool4=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        output=nn.Linear(128 * (height // 4) * (width // 4), classes),
    )


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added (He et al. 2016), with GroupNorm (Wu and He 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else _sequence(
                conv=nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                norm=nn.GroupNorm(8, outputs),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride), rounded up."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def _resnet(shape: Shape, classes: int) -> nn.Module:
    """ResNet-8 for small images: one block each of 16, 32 and 64 channels, GroupNorm in place of BatchNorm."""
    channels, height, width = shape
    _check_side("resnet", height, width)
    return _sequence(
        conv=nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False),
        norm=nn.GroupNorm(8, 16),
        relu=nn.ReLU(),
        block1=_ResidualBlock(16, 16, stride=1),
        block2=_ResidualBlock(16, 32, stride=2),
        block3=_ResidualBlock(32, 64, stride=2),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        output=nn.Linear(64, classes),
    )


BUILTIN: dict[str, Callable[[Shape, int], nn.Module]] = {"lenet": _lenet, "convnet": _convnet, "resnet": _resnet}


def _sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _check_side(name: str, height: int, width: int) -> None:
    if min(height, width) < SMALLEST_SIDE:
        raise InputError(
            f"model.name = {name!r}: images are {width}x{height}; at least {SMALLEST_SIDE}x{SMALLEST_SIDE} is wanted"
        )


def _own_model(name: str, shape: Shape, classes: int) -> nn.Module:
    module, _, function = name.partition(":")
    build = _find_function(name, module, function)
    try:
        model = build(shape=shape, classes=classes)
    except (Exception, SystemExit) as error:
        raise _refused(name, f"{function}(shape={shape}, classes={classes}) raises {_described(error)}") from error
    if not isinstance(model, nn.Module):
        raise _refused(name, f"{function} returns {type(model).__name__}; a torch.nn.Module is wanted")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _refused(name, "the network has no parameters to train")
    return model.train()


def _find_function(name: str, module: str, function: str) -> Callable[..., object]:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # for good: the network's own code may import more later
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise _refused(name, f"no module {error.name} in {folder} or among what is installed") from None
        raise _refused(name, f"module {module} cannot be imported: {_described(error)}") from error
    except (Exception, SystemExit) as error:
        raise _refused(name, f"module {module} cannot be imported: {_described(error)}") from error
    build: Callable[..., object] | None = getattr(found, function, None)
    if build is None or not callable(build):
        raise _refused(name, f"module {module} has no function {function!r}")
    return build


def _check_output(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """Try two blank images, in evaluation mode so that running statistics stay as they are."""
    training = {layer: layer.training for layer in model.modules()}
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(2, *shape))
    except (Exception, SystemExit) as error:
        raise _refused(name, f"cannot take images of shape {(2, *shape)}: {_described(error)}") from error
    finally:
        for layer, mode in training.items():
            layer.training = mode
    given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if given != (2, classes):
        raise _refused(name, f"images of shape {(2, *shape)} give {given}; logits of shape {(2, classes)} are wanted")


def _refused(name: str, why: str) -> InputError:
    return InputError(f"model.name = {name!r}: {why}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _draw_uniform(model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
