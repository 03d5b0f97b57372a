"""Run breaching on a case that :mod:`benchmarks.inversion` wrote; for an environment that has breaching, not fedpriv.

Usage: python inversion_adapter.py CASE.npz IMAGES.npz ATTACK STEPS SEED
"""

import sys
import time
from collections import OrderedDict
from types import SimpleNamespace

import breaching
import numpy as np
import torch
from torch import nn


def convnet(parameters: dict[str, torch.Tensor]) -> nn.Sequential:
    """The ConvNet of fedpriv (``fedpriv/models/convnet.py``), with these parameters."""
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


def main(case: str, result: str, attack: str, steps: str, seed: str) -> None:
    """Attack and write the images, on [0, 1], and the milliseconds of processor time a step."""
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    with np.load(case, allow_pickle=False) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    parameters = {name.removeprefix("parameter "): value for name, value in tensors.items() if "parameter " in name}
    mean, std = (tensors[name].float()[:, None, None] for name in ("mean", "std"))
    model = convnet(parameters)
    labels = tensors["labels"]
    public = SimpleNamespace(shape=(3, 32, 32), mean=tensors["mean"].tolist(), std=tensors["std"].tolist(),
                             modality="vision", classes=10)  # fmt: skip
    gradients = [tensors[f"gradient {name}"] for name, _ in model.named_parameters()]
    config = breaching.get_attack_config(attack, [f"optim.max_iterations={steps}", f"optim.callback={steps}"])
    attacker = breaching.attacks.prepare_attack(
        model, nn.CrossEntropyLoss(), config, {"device": torch.device("cpu"), "dtype": torch.float}
    )
    sent = {"parameters": list(model.parameters()), "buffers": None, "metadata": public}
    told = {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None}
    began = time.process_time()
    reconstruction, _ = attacker.reconstruct([sent], [{"gradients": gradients, "buffers": None, "metadata": told}], {})
    milliseconds = 1e3 * (time.process_time() - began) / int(steps)
    np.savez(result, images=(reconstruction["data"] * std + mean).clamp(0, 1).numpy(), milliseconds=milliseconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
