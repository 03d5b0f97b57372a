"""Run breaching on a case that :mod:`benchmarks.inversion` wrote; for an environment that has breaching, not fedpriv.

Usage: python inversion_adapter.py CASE.npz IMAGES.npz ATTACK STEPS[,STEPS...] SEED

Each number of steps is a run of its own.
"""

import math
import sys
import time
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import breaching
import numpy as np
import torch
import torchvision
from torch import nn


def convnet(parameters: dict[str, torch.Tensor]) -> nn.Sequential:
    """The ConvNet of fedpriv (``fedpriv/models/convnets.py``), with these parameters."""
    pooled = {"conv2", "conv4"}
    layers: list[tuple[str, nn.Module]] = []
    for name in ("conv1", "conv2", "conv3", "conv4"):
        outputs, inputs = parameters[f"{name}.weight"].shape[:2]
        layers += [(name, nn.Conv2d(inputs, outputs, 3, padding=1)), (f"relu{name[-1]}", nn.ReLU())]
        layers += [(f"pool{name[-1]}", nn.MaxPool2d(2))] if name in pooled else []
    classes, features = parameters["output.weight"].shape
    model = nn.Sequential(OrderedDict([*layers, ("flatten", nn.Flatten()), ("output", nn.Linear(features, classes))]))
    model.load_state_dict(parameters)
    return model


def lenet(parameters: dict[str, torch.Tensor]) -> nn.Sequential:
    """The LeNet of fedpriv (``fedpriv/models/convnets.py``), with these parameters."""
    layers: list[tuple[str, nn.Module]] = []
    for name, stride in (("conv1", 2), ("conv2", 2), ("conv3", 1)):
        outputs, inputs = parameters[f"{name}.weight"].shape[:2]
        layers += [(name, nn.Conv2d(inputs, outputs, 5, stride, 2)), (f"sigmoid{name[-1]}", nn.Sigmoid())]
    classes, features = parameters["output.weight"].shape
    model = nn.Sequential(OrderedDict([*layers, ("flatten", nn.Flatten()), ("output", nn.Linear(features, classes))]))
    model.load_state_dict(parameters)
    return model


def vit_tiny(parameters: dict[str, torch.Tensor]) -> nn.Module:
    """timm's."""
    import timm

    timm.layers.set_fused_attn(False)  # the fused one has no second derivative on a CPU
    classes, patch = len(parameters["head.bias"]), parameters["patch_embed.proj.weight"].shape[-1]
    side = patch * math.isqrt(parameters["pos_embed"].shape[1] - 1)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=side, patch_size=patch, num_classes=classes)
    model.load_state_dict(parameters)
    return model


def resnet18(parameters: dict[str, torch.Tensor]) -> nn.Module:
    """torchvision's, with GroupNorm of 32 groups in place of BatchNorm."""
    classes = len(parameters["fc.bias"])
    model: nn.Module = torchvision.models.resnet18(num_classes=classes, norm_layer=partial(nn.GroupNorm, 32))
    model.load_state_dict(parameters)
    return model


# A parameter that the networks after it lack -> what builds it.
NETWORKS = {"conv4.weight": convnet, "conv3.weight": lenet, "pos_embed": vit_tiny, "fc.bias": resnet18}


def main(case: str, result: str, attack: str, steps: str, seed: str) -> None:
    """Attack and write each run's images, on [0, 1], and its seconds of processor time; a run before does not count."""
    torch.set_num_threads(1)
    with np.load(case, allow_pickle=False) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    parameters = {name.removeprefix("parameter "): value for name, value in tensors.items() if "parameter " in name}
    mean, std = (tensors[name].float()[:, None, None] for name in ("mean", "std"))
    model = next(build for name, build in NETWORKS.items() if name in parameters)(parameters)
    labels = tensors["labels"]
    facts = {name: tensors[name].tolist() for name in ("shape", "mean", "std", "classes")}
    public = SimpleNamespace(modality="vision", **facts)
    gradients = [tensors[f"gradient {name}"] for name, _ in model.named_parameters()]
    sent = {"parameters": list(model.parameters()), "buffers": None, "metadata": public}
    told = {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None}
    heard = {"gradients": gradients, "buffers": None, "metadata": told}
    images, seconds = [], []
    for count in ("2", *steps.split(",")):
        torch.manual_seed(int(seed))
        config = breaching.get_attack_config(attack, [f"optim.max_iterations={count}", f"optim.callback={count}"])
        attacker = breaching.attacks.prepare_attack(
            model, nn.CrossEntropyLoss(), config, {"device": torch.device("cpu"), "dtype": torch.float}
        )
        began = time.process_time()
        reconstruction, _ = attacker.reconstruct([sent], [heard], {})
        seconds.append(time.process_time() - began)
        images.append((reconstruction["data"] * std + mean).clamp(0, 1).numpy())
    np.savez(result, images=np.stack(images[1:]), seconds=seconds[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
