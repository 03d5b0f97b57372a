"""Checks that need the data and the network, run before training; each refuses with the reason."""

import torch
from torch import Tensor, nn

from fedpriv.core.algorithm import algorithm_of, preparation_of
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import torch_stream
from fedpriv.data.datasets import Dataset
from fedpriv.gradients import refuse_mixed_examples
from fedpriv.gradients.calls import coupled_layers

LOSS = example_losses

# Random images with which own models are tried: most often the first few are enough.
_TRIED = 13


def check_fitness(experiment: Experiment, dataset: Dataset, model: nn.Module) -> None:
    """Refuse data and networks of which nothing could be learnt or, with a mechanism, nothing could be proven."""
    if dataset.classes < 2:
        raise experiment.wrong("data.name", "the labels name one class; expected at least two")
    _refuse_few_test_examples(experiment, dataset)
    if experiment.federation.evaluate == "clients":
        dataset.tested_keys()
    if dataset.is_next:
        _refuse_labels(experiment)
    if (preparation := preparation_of(experiment)) is not None:
        preparation.check_data(experiment, dataset)
    algorithm_of(experiment).check_network(experiment, dataset, model)
    if experiment.mechanism.protects:
        _refuse_coupled(experiment, model)
        _refuse_leaks(experiment, model, dataset)


def _refuse_few_test_examples(experiment: Experiment, dataset: Dataset) -> None:
    """Refuse to evaluate on more test examples than there are."""
    there, wanted = len(dataset.x_test), experiment.federation.evaluate_examples
    if wanted is not None and wanted > there:
        raise experiment.wrong("federation.evaluate_examples", f"{dataset.name} has {there} test examples")


def _refuse_labels(experiment: Experiment) -> None:
    """Refuse what is about labels, where each token has the next one as its own."""
    if experiment.data.groups is not None:
        raise InputError("data.groups is about labels of whole examples, and the next token is predicted")
    if experiment.data.partition in ("dirichlet", "shards"):
        raise InputError(
            f"data.partition = {experiment.data.partition!r} sorts by labels, and the next token is predicted; use iid "
            "or key"
        )


def _refuse_coupled(experiment: Experiment, model: nn.Module) -> None:
    layers = coupled_layers(model)
    if layers:
        raise experiment.model.refusal(
            f"layer {layers[0]} mixes the examples of a batch, so that no noise can protect one of them; write "
            f"model.norm = 'group', or mechanism.name = 'none' (given: {experiment.mechanism.name!r})"
        )


def _refuse_leaks(experiment: Experiment, model: nn.Module, dataset: Dataset) -> None:
    """Refuse own models that let examples past the mechanism, in the usual ways; tested on random and blank images."""
    if not experiment.model.is_own:
        return
    images, labels = random_examples(experiment, dataset, _TRIED)
    blank = dataset.normalise(torch.zeros_like(images[:1]))[0]
    try:
        refuse_mixed_examples(model, LOSS, dataset.normalise(images), labels, [blank])
    except InputError as error:
        raise experiment.model.refusal(str(error)) from error


def random_examples(experiment: Experiment, dataset: Dataset, examples: int) -> tuple[Tensor, Tensor]:
    """Random images (B, C, H, W), uint8, and labels (B,), or sequences, with which own models are tried."""
    return dataset.random(examples, torch_stream(experiment.seed, "trial"))
