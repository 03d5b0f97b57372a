"""What algorithms with a section of their own, and changed labels, cannot be combined with.

Each check raises a ValueError that says what was given and what is allowed.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedpriv.core.settings import Section

if TYPE_CHECKING:
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.config.sections import FederationConfig

__all__ = ["check_labels", "check_models", "check_votes"]


def check_votes(experiment: "Experiment") -> None:
    """Refuse what PATE has no proof for, or what has no meaning with it."""
    federation, pate = experiment.federation, experiment.pate
    adversary, mechanism = experiment.adversary, experiment.mechanism
    _check_section("pate", pate, federation)
    if pate is None:
        return
    if adversary.attacks:
        raise ValueError(
            f"adversary.attacks: {adversary.attacks[0]} reads gradients or parameters, and under pate clients "
            "upload votes; set it to []"
        )
    if mechanism.protects:
        raise ValueError(
            f"mechanism.name = {mechanism.name!r} is noise on gradients or parameters, and under pate clients "
            "upload votes: the noise is that of [pate]; use none"
        )
    keys = "aggregation", "clients_per_round", "max_update_norm"
    _refuse_keys(federation, keys, "under pate clients upload votes, not parameters")
    if federation.secure_aggregation != (pate.noise_at == "clients"):
        raise ValueError(
            f"federation.secure_aggregation = {str(federation.secure_aggregation).lower()} with pate.noise_at "
            f"= {pate.noise_at!r}: the server adds noise to votes that it sees, or clients do, under masks; "
            "set noise_at = 'clients' and secure_aggregation = true together"
        )
    if experiment.robustness is not None:
        raise ValueError("[robustness] is noise in the training of uploads; with pate leave it out")
    if experiment.data.overlaps:
        raise ValueError(
            "data.partition = 'overlapping': votes protect a client's examples with the client, and others would hold "
            "copies of them; with pate use another partition"
        )


def check_models(experiment: "Experiment") -> None:
    """Refuse what a convex model, released once, has no meaning with or no proof for."""
    federation, erm = experiment.federation, experiment.erm
    adversary, mechanism = experiment.adversary, experiment.mechanism
    _check_section("erm", erm, federation)
    if erm is None:
        if not mechanism.on_gradients:
            raise ValueError(
                f"mechanism.name = {mechanism.name!r} is noise on a convex model, which clients train with "
                f"federation.algorithm = 'erm' only (given: {federation.algorithm!r})"
            )
        return
    if mechanism.protects and mechanism.on_gradients:
        raise ValueError(
            f"mechanism.name = {mechanism.name!r} is noise on gradients or updates, and under erm clients "
            "upload a model: use output, objective or none"
        )
    if adversary.attacks:
        raise ValueError(
            f"adversary.attacks: {adversary.attacks[0]} reads what one or a few steps of training upload, and "
            "under erm clients upload a finished model; set it to [], and use fedpriv probe afterwards"
        )
    keys = "server_optimizer", "server_learning_rate", "server_momentum"
    _refuse_keys(federation, keys, "under erm the server takes the mean of models")
    for name, section in (
        ("robustness", experiment.robustness),
        ("training.weight_decay", experiment.training.weight_decay),
    ):
        if section:
            raise ValueError(f"{name} is for training step by step, and under erm clients minimise; leave it out")


def _check_section(algorithm: str, section: Section | None, federation: "FederationConfig") -> None:
    """The section of an algorithm of one round is there if the algorithm is."""
    if (federation.algorithm == algorithm) != (section is not None):
        raise ValueError(
            f"the section [{algorithm}] is read with federation.algorithm = {algorithm!r} only; leave it out"
        )
    if section is not None and federation.rounds != 1:
        raise ValueError(f"federation.rounds = {federation.rounds}: {algorithm} has one round; set it to 1")


def _refuse_keys(federation: "FederationConfig", keys: Iterable[str], why: str) -> None:
    for key in keys:
        if getattr(federation, key) != type(federation).model_fields[key].default:
            raise ValueError(f"federation.{key}: {why}; leave it out")


def check_labels(experiment: "Experiment") -> None:
    """Refuse the correction for changed labels where none are changed, or no loss is trained that knows it."""
    if experiment.training.label_correction == "none":
        return
    correction = "training.label_correction = 'forward'"
    if experiment.data.label_epsilon is None:
        raise ValueError(f"{correction} corrects for labels that clients change: set data.label_epsilon, too")
    if experiment.federation.algorithm not in ("fedsgd", "fedavg"):
        raise ValueError(f"{correction} is for fedsgd and fedavg, not for {experiment.federation.algorithm!r}")
    if experiment.adversary.attacks:
        raise ValueError(f"{correction}: attacks on gradients are for the cross entropy; set adversary.attacks = []")
