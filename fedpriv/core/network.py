"""The network of an experiment, and what follows from it and from public images before anything is trained."""

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.sections import forward_noise
from fedpriv.core.threads import cpu_threads
from fedpriv.data.datasets import Dataset, place_of
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.models.machinery.build import build_model


def network_of(experiment: Experiment, dataset: Dataset) -> nn.Module:
    """The network that the settings name, with a place for noise where they ask for some; on the CPU, in float32."""
    sequences = dataset.sequences(place_of(experiment.data).root)
    model = build_model(experiment.model, dataset.shape, dataset.classes, experiment.seed, dataset.columns, sequences)
    noise = forward_noise(experiment)
    if noise is None:
        return model
    try:
        return noise.put_into(model, dataset.shape, experiment.seed)
    except InputError as error:
        raise experiment.model.refusal(str(error)) from error


def precision_of(experiment: Experiment) -> torch.dtype:
    """The numbers of the network: float32 also where passes are computed in bfloat16."""
    return torch.float64 if experiment.engine.precision == "float64" else torch.float32


def redistribution_of(
    experiment: Experiment, dataset: Dataset, model: nn.Module, parameters: Vector
) -> Redistribution | None:
    """How the noise is shared out, the same for all clients and the whole run; from the initial parameters."""

    def public(wanted: int) -> tuple[nn.Module, Tensor]:
        if wanted > (there := len(dataset.x_test)):
            allowed = f"{dataset.name} has {there} test images"
            raise InputError(key="mechanism.public_examples", given=wanted, allowed=allowed)
        images = public_images(dataset, wanted, experiment.seed, "public-images")
        normalised = dataset.normalise(images, precision_of(experiment))
        return model.eval(), normalised.to(next(model.parameters()).device)

    with cpu_threads(experiment.engine.threads):
        return experiment.mechanism.redistributed(parameters, public)


def public_images(dataset: Dataset, count: int, seed: int, purpose: str) -> Tensor:
    """Return so many test images, which are public in this laboratory and no client's."""
    chosen = numpy_stream(seed, purpose).choice(len(dataset.x_test), size=count, replace=False)
    return dataset.x_test[torch.from_numpy(np.sort(chosen))]
