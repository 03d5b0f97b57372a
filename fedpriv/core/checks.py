"""What is found out about an experiment's data and network before a run, and refused with the reason."""

from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import torch_stream
from fedpriv.data.datasets import Dataset
from fedpriv.erm import problem_of, refuse_unsolvable
from fedpriv.gradients import refuse_mixed_examples
from fedpriv.gradients.coupled import coupled_layers
from fedpriv.mechanisms.machinery.model_noise import ModelNoiseSettings

__all__ = ["LOSS", "check_fitness", "check_shares", "random_examples"]

LOSS = example_losses

# Random images with which own models are tried: most often the first few are enough.
_TRIED = 13


def check_fitness(experiment: Experiment, dataset: Dataset, model: nn.Module) -> None:
    """Refuse data and networks of which nothing could be learnt or, with a mechanism, nothing could be proven.

    Args:
        experiment: the settings.
        dataset: as loaded.
        model: the network, on the CPU in float32.

    Raises:
        InputError: they do not fit.
    """
    if dataset.classes < 2:
        raise InputError(f"data.name = {experiment.data.name!r}: the labels name one class; at least two are wanted")
    _refuse_few_test_examples(experiment, dataset)
    if dataset.is_next:
        _refuse_labels(experiment)
    if experiment.erm is not None:
        _refuse_not_convex(experiment, dataset, model)
    if experiment.mechanism.protects:
        _refuse_coupled(experiment, model)
        _refuse_leaks(experiment, model, dataset)


def _refuse_few_test_examples(experiment: Experiment, dataset: Dataset) -> None:
    """Refuse to ask about, or to evaluate on, more test examples than there are."""
    there, asked = len(dataset.x_test), 0 if experiment.pate is None else experiment.pate.queries
    if asked >= there:
        raise InputError(
            f"pate.queries = {asked}: {dataset.name} has {there} test images, and the "
            "student is measured on those that are not asked about"
        )
    wanted = experiment.federation.evaluate_examples
    if wanted is not None and wanted > there:
        raise InputError(f"federation.evaluate_examples = {wanted}: {dataset.name} has {there} test examples")


def _refuse_labels(experiment: Experiment) -> None:
    """Refuse what is about labels, where each token has the next one as its own."""
    for key in ("groups", "label_epsilon"):
        if getattr(experiment.data, key) is not None:
            raise InputError(f"data.{key} is about labels of whole examples, and the next token is predicted")
    if experiment.data.partition in ("dirichlet", "shards"):
        raise InputError(
            f"data.partition = {experiment.data.partition!r} sorts by labels, and the next token is predicted; use iid "
            "or key"
        )


def check_shares(experiment: Experiment, dataset: Dataset, sizes: np.ndarray) -> None:
    """Refuse clients that hold too little for what they are to do.

    Args:
        experiment: the settings.
        dataset: as loaded.
        sizes: (C,), how many examples each client holds.

    Raises:
        InputError: a teacher would have no example, or nothing is proven of a client's convex problem.
    """
    if experiment.pate is not None and experiment.pate.teachers_per_client > sizes.min():
        raise InputError(
            f"pate.teachers_per_client = {experiment.pate.teachers_per_client}: a client has {sizes.min()} examples "
            "only"
        )
    config = experiment.mechanism
    if experiment.erm is not None and isinstance(config, ModelNoiseSettings):
        for examples in np.unique(sizes).tolist():
            problem = problem_of(experiment.erm, dataset, examples)
            config.scale(problem)  # says what nothing is proven of
            about = (
                f"a client of {examples} examples with mechanism.target_epsilon = {config.target_epsilon:g} and "
                f"erm.regularisation = {problem.regularisation:g}"
            )
            refuse_unsolvable(problem, "erm", about, config.solved)


def _refuse_not_convex(experiment: Experiment, dataset: Dataset, model: nn.Module) -> None:
    wanted = [(dataset.classes, prod(dataset.shape)), (dataset.classes,)]
    if experiment.model.is_own or [tuple(value.shape) for value in model.parameters()] != wanted:
        raise experiment.model.refusal(
            "federation.algorithm = 'erm' minimises a convex objective, for one linear layer on the inputs; use "
            "model.name = 'mlp' with hidden = []"
        )


def _refuse_coupled(experiment: Experiment, model: nn.Module) -> None:
    layers = coupled_layers(model)
    if layers:
        raise experiment.model.refusal(
            f"layer {layers[0]} mixes the examples of a batch, so that no noise can protect one of them; use "
            f"GroupNorm, or mechanism.name = 'none' (given: {experiment.mechanism.name!r})"
        )


def _refuse_leaks(experiment: Experiment, model: nn.Module, dataset: Dataset) -> None:
    """Refuse own models through which examples leave past the mechanism; found out on random and blank images.

    No check of a few images can prove that a model never does it; these are the ways in which models usually do.
    Networks of this project are known to pass.
    """
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
