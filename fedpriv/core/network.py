"""The network of an experiment, and what follows from it and from public images before anything is trained."""

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream, torch_stream
from fedpriv.core.sections import forward_noise
from fedpriv.core.threads import cpu_threads
from fedpriv.data.datasets import Dataset, place_of, unit_scale
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.models.machinery.build import build_model
from fedpriv.smoothing import FirstLayer, Smoothing, build_smoothing, noise_layers, public_rows, with_noise


def network_of(experiment: Experiment, dataset: Dataset) -> nn.Module:
    """The network that the settings name, with a noise layer where they ask for one; on the CPU, in float32."""
    sequences = dataset.sequences(place_of(experiment.data).root)
    model = build_model(experiment.model, dataset.shape, dataset.classes, experiment.seed, dataset.columns, sequences)
    noise = forward_noise(experiment)
    if noise is None:
        return model
    stream = torch_stream(experiment.seed, "robustness-trial")
    try:
        return with_noise(model, noise.place, dataset.shape, stream)
    except InputError as error:
        raise experiment.model.refusal(str(error)) from error


def smoothing_of(experiment: Experiment, dataset: Dataset, model: nn.Module) -> Smoothing | None:
    """How the noise in the forward pass is shared out and scaled, from the initial parameters and public images."""
    noise = forward_noise(experiment)
    if noise is None:
        return None

    def public(wanted: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(public_rows(experiment.seed, len(dataset.x_test), wanted))
        images = unit_scale(dataset.x_test[rows], precision_of(experiment))
        return images.to(first.blank().device), dataset.y_test[rows].to(first.blank().device)

    first = first_layer(dataset, model)
    with cpu_threads(experiment.engine.threads):
        return build_smoothing(noise, first, public)


def first_layer(dataset: Dataset, model: nn.Module) -> FirstLayer:
    """Return how images of a data set reach the noise of a network, which is put into evaluation mode."""
    model.eval()
    return FirstLayer(
        model, noise_layers(model)[0], lambda pixels: dataset.normalise(pixels, pixels.dtype), dataset.shape
    )


def precision_of(experiment: Experiment) -> torch.dtype:
    """The numbers of the network: float32 also where passes are computed in bfloat16."""
    return torch.float64 if experiment.engine.precision == "float64" else torch.float32


def redistribution_of(
    experiment: Experiment, dataset: Dataset, model: nn.Module, parameters: Vector
) -> Redistribution | None:
    """How the noise is shared out, the same for all clients and the whole run; from the initial parameters."""

    def public(wanted: int) -> tuple[nn.Module, Tensor]:
        images = dataset.normalise(_public_images(experiment, dataset, wanted), precision_of(experiment))
        return model.eval(), images.to(next(model.parameters()).device)

    with cpu_threads(experiment.engine.threads):
        return experiment.mechanism.redistributed(parameters, public)


def _public_images(experiment: Experiment, dataset: Dataset, wanted: int) -> Tensor:
    """Test images, which are public in this laboratory and no client's."""
    there = len(dataset.x_test)
    if wanted > there:
        raise InputError(
            key="mechanism.public_examples", given=wanted, allowed=f"{dataset.name} has {there} test images"
        )
    chosen = numpy_stream(experiment.seed, "public-images").choice(there, size=wanted, replace=False)
    return dataset.x_test[torch.from_numpy(np.sort(chosen))]
