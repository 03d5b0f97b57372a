"""What algorithms, sections and preparations of data cannot be combined with.

Each check raises a ValueError that says what was given and what is allowed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpriv.core.algorithm import Algorithm, ModelRelease, algorithm_of
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS, PREPARATIONS
from fedpriv.core.sections import given_sections
from fedpriv.core.settings import enumerated

if TYPE_CHECKING:
    from fedpriv.core.config.experiment import Experiment


def with_own_section(tree: Any) -> Any:
    """Return settings in which the section that only this algorithm reads has its defaults, where there is none."""
    federation = tree.get("federation") if isinstance(tree, Mapping) else None
    algorithm = federation.get("algorithm") if isinstance(federation, Mapping) else None
    own = ALGORITHMS[algorithm].settings if isinstance(algorithm, str) and algorithm in ALGORITHMS else None
    return tree if own is None or tree.get(own.name) is not None else {**tree, own.name: {}}


def check_algorithm(experiment: "Experiment") -> None:
    """Refuse what the algorithm, or a section that a capability added, has no proof for or no meaning with."""
    for name, kind in ALGORITHMS.items():
        if name != experiment.federation.algorithm and kind.settings is not None and kind.settings.of(experiment):
            raise InputError(
                f"the section [{kind.settings.name}] is read with federation.algorithm = {name!r} only; leave it out"
            )
    algorithm = algorithm_of(experiment)
    if algorithm.rounds is not None and experiment.federation.rounds != algorithm.rounds:
        raise InputError(
            key="federation.rounds",
            given=experiment.federation.rounds,
            allowed=f"{algorithm.name} has one round",
            hint="set it to 1",
        )
    _check_mechanism(experiment, algorithm)
    algorithm.conflicts(experiment)
    for section in given_sections(experiment).values():
        section.conflicts(experiment)


def _check_mechanism(experiment: "Experiment", algorithm: Algorithm) -> None:
    """Refuse noise on models where clients upload something else."""
    mechanism = experiment.mechanism
    if mechanism.on_gradients or isinstance(algorithm, ModelRelease):
        return
    known = enumerated([repr(name) for name, kind in ALGORITHMS.items() if issubclass(kind, ModelRelease)], "or")
    raise InputError(
        key="mechanism.name",
        given=mechanism.name,
        allowed=f"noise on a convex model, which clients train with federation.algorithm = {known} "
        f"only (given: {algorithm.name!r})",
    )


def check_preparations(experiment: "Experiment") -> None:
    """Refuse what goes with no preparation of data, or not with this one."""
    for kind in PREPARATIONS.values():
        kind().conflicts(experiment)
