"""What noise that is not whole in each upload needs of the rest of an experiment."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpriv.core.errors import InputError
from fedpriv.core.registry import MECHANISMS

if TYPE_CHECKING:
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.mechanisms.machinery.base import NoiseAt


def noise_places(experiment: "Experiment") -> "tuple[NoiseAt, ...]":
    """Return where an upload of this experiment gets noise: at the client, and under masks or at the server."""
    return ("clients", "sum" if experiment.federation.secure_aggregation else "server")


def with_usual_sums(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections with what noise on a sum needs of the federation, where the experiment does not say it."""
    mechanism, federation = tree.get("mechanism"), tree.get("federation", {})
    name = mechanism.get("name") if isinstance(mechanism, Mapping) else None
    if not isinstance(name, str) or name not in MECHANISMS or not isinstance(federation, Mapping):
        return tree
    where = MECHANISMS[name].noise_at
    if where == "clients":
        return tree
    return {**tree, "federation": {"weighting": "uniform", "secure_aggregation": where == "sum", **federation}}


def check_trust(experiment: "Experiment") -> None:
    """Refuse settings under which noise on a round's sum proves nothing, or not what the ledger says."""
    federation, mechanism = experiment.federation, experiment.mechanism
    name, where = mechanism.name, mechanism.noise_at
    if federation.client_sampling == "poisson" and where != "server":
        raise InputError(
            f"federation.client_sampling = 'poisson' with mechanism.name = {name!r}: a round that "
            "asks nobody has no noise; allowed is mechanism.name = 'central'"
        )
    if where == "clients":
        return
    secure = where == "sum"
    for key, given, allowed in (
        ("mechanism.unit", mechanism.unit, "update"),
        ("federation.weighting", federation.weighting, "uniform"),
        ("federation.aggregation", federation.aggregation, "mean"),
        ("federation.secure_aggregation", federation.secure_aggregation, secure),
        ("federation.target_epsilon", federation.target_epsilon, None),
        ("adversary.attacks: active ones", experiment.adversary.crafts, False),
    ):
        if given != allowed:
            wanted = "unset" if allowed is None else repr(allowed).lower()
            raise InputError(
                f"mechanism.name = {name!r} puts noise on the sum of a round's updates, which needs "
                f"{key} = {wanted} (given: {given!r})"
            )
    mechanism.require_noise_at(*noise_places(experiment))
    some = mechanism.with_some_noise()
    if not some.noise_on_mean(1, some.bound) > 0:
        raise InputError(f"mechanism.name = {name!r} says that a sum gets no noise (noise_on_mean), and claims some")
    if secure:
        mechanism.shared_by(federation.asked)
