"""Rules that bind one section of an experiment to another: of algorithms, of texts, and of noise on sums."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fedpriv.core.algorithm import Algorithm, ModelRelease, algorithm_of
from fedpriv.core.config.sections import SUM_LISTENERS
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS, ATTACKS, DATASETS, MECHANISMS, PREPARATIONS
from fedpriv.core.sections import given_sections
from fedpriv.core.settings import enumerated

if TYPE_CHECKING:
    from fedpriv.accounting.release import Correlation
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.mechanisms.machinery.base import NoiseAt


def with_usual_values(tree: Any) -> Any:
    """Return settings with the defaults that depend on other sections."""
    if not isinstance(tree, Mapping):
        return tree
    data = _said(tree, "data", "name")
    if (isinstance(data, str) and data in DATASETS and DATASETS[data].is_text) or _said(tree, "data", "text"):
        # Nothing attacks texts, unless an attack is named: that is refused afterwards.
        tree = _with_usual(tree, "adversary", {"attacks": []})
    mechanism = _said(tree, "mechanism", "name")
    if isinstance(mechanism, str) and mechanism in MECHANISMS and MECHANISMS[mechanism].noise_at != "clients":
        masked = MECHANISMS[mechanism].noise_at == "sum"
        choice = {"client_sampling": "turns"} if MECHANISMS[mechanism].proof().correlates else {}
        tree = _with_usual(tree, "federation", {"weighting": "uniform", "secure_aggregation": masked, **choice})
    if _said(tree, "federation", "secure_aggregation") is True:
        tree = _with_usual(tree, "adversary", {"threat_model": "secure-aggregation"})
    algorithm = _said(tree, "federation", "algorithm")
    own = ALGORITHMS[algorithm].settings if isinstance(algorithm, str) and algorithm in ALGORITHMS else None
    return tree if own is None or tree.get(own.name) is not None else {**tree, own.name: {}}


def _said(tree: Mapping[str, Any], section: str, key: str) -> Any:
    given = tree.get(section)
    return given.get(key) if isinstance(given, Mapping) else None


def _with_usual(tree: Mapping[str, Any], section: str, usual: Mapping[str, Any]) -> Mapping[str, Any]:
    given = tree.get(section, {})
    return {**tree, section: {**usual, **given}} if isinstance(given, Mapping) else tree


def check_rules(experiment: "Experiment") -> None:
    """Refuse sections that do not go together; the first rule that is broken is reported."""
    for check in (
        check_attacked_rounds,
        check_evaluation,
        check_texts,
        check_algorithm,
        check_preparations,
        check_trust,
        check_aggregation,
        check_crafted_sums,
        check_victims,
        check_adjacency,
        check_loss,
        check_bounds,
        check_target,
    ):
        check(experiment)


def check_algorithm(experiment: "Experiment") -> None:
    """Refuse what the algorithm, or a section that a capability added, has no proof for or no meaning with."""
    for name, kind in ALGORITHMS.items():
        if name != experiment.federation.algorithm and kind.settings is not None and kind.settings.of(experiment):
            raise InputError(
                f"the section [{kind.settings.name}] is read with federation.algorithm = {name!r} only; leave it out"
            )
    algorithm = algorithm_of(experiment)
    if algorithm.rounds is not None and experiment.federation.rounds != algorithm.rounds:
        raise experiment.wrong("federation.rounds", f"{algorithm.name} has one round", "set it to 1")
    _check_mechanism(experiment, algorithm)
    algorithm.conflicts(experiment)
    for section in given_sections(experiment).values():
        section.conflicts(experiment)


def _check_mechanism(experiment: "Experiment", algorithm: Algorithm) -> None:
    """Refuse noise on models where clients upload something else."""
    if experiment.mechanism.on_gradients or isinstance(algorithm, ModelRelease):
        return
    known = enumerated([repr(name) for name, kind in ALGORITHMS.items() if issubclass(kind, ModelRelease)], "or")
    raise experiment.wrong(
        "mechanism.name",
        f"noise on a convex model, which clients train with federation.algorithm = {known} only (given: "
        f"{algorithm.name!r})",
    )


def check_preparations(experiment: "Experiment") -> None:
    """Refuse what goes with no preparation of data, or not with this one."""
    for kind in PREPARATIONS.values():
        kind().conflicts(experiment)


def text_sets() -> tuple[str, ...]:
    """The data sets that are texts."""
    return tuple(name for name, source in DATASETS.items() if source.is_text)


def check_texts(experiment: "Experiment") -> None:
    """Refuse what is for images or rows, where the data are texts; and attacks on texts, where they are not."""
    for name in experiment.adversary.attacks:
        if reason := unsuited(experiment, name):
            raise InputError(f"adversary.attacks: {reason}")
    if not experiment.data.is_text:
        return
    what = f"data.name = {experiment.data.name!r} are texts"
    for name, section in given_sections(experiment).items():
        if not section.reads_texts:
            raise InputError(f"section [{name}] is for images and rows of tables, and {what}")


def unsuited(experiment: "Experiment", attack: str) -> str | None:
    """Say why an attack does not read such data, or return ``None``."""
    reads_texts, data = bool(ATTACKS[attack].is_text), experiment.data
    if reads_texts == data.is_text:
        return None
    if data.is_text:
        known = ", ".join(name for name, kind in ATTACKS.items() if kind.is_text)
        return f"{attack} reads images or rows of tables, and data.name = {data.name!r} are texts; allowed: {known}"
    return f"{attack} reads texts, and data.name = {data.name!r} are none; allowed: {', '.join(text_sets())}"


def refuse_texts(experiment: "Experiment", what: str) -> None:
    """Refuse to look at a run on texts in a way that is for images and rows."""
    if experiment.data.is_text:
        raise InputError(f"data.name = {experiment.data.name!r} are texts, and {what} is for images and rows of tables")


def noise_places(experiment: "Experiment") -> "tuple[NoiseAt, ...]":
    """Return where an upload of this experiment gets noise: at the client, and under masks or at the server."""
    return ("clients", "sum" if experiment.federation.secure_aggregation else "server")


def correlation_of(experiment: "Experiment") -> "Correlation | None":
    """Return how the noise of rounds is correlated, for the pattern that the choice of clients keeps."""
    federation = experiment.federation
    return experiment.mechanism.correlation(federation.rounds, federation.separation, federation.most_rounds)


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
        ("mechanism.unit", mechanism.unit, mechanism.unit if mechanism.proof().correlates else "update"),
        ("federation.weighting", federation.weighting, "uniform"),
        ("federation.aggregation", federation.aggregation, "mean"),
        ("federation.secure_aggregation", federation.secure_aggregation, secure),
        ("federation.target_epsilon", federation.target_epsilon, None),
        ("federation.target_ceiling", federation.target_ceiling, None),
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
    correlation_of(experiment)
    if mechanism.unit == "example" and federation.algorithm != "fedsgd":
        raise experiment.wrong(
            "mechanism.unit",
            f"with mechanism.name = {name!r} and federation.algorithm = 'fedsgd', of one gradient a round; with "
            f"{federation.algorithm!r} allowed is update",
        )


def check_attacked_rounds(experiment: "Experiment") -> None:
    """Refuse to attack rounds that there are not."""
    late = [number for number in experiment.adversary.rounds if number > experiment.federation.rounds]
    if experiment.adversary.attacks and late:
        raise InputError(
            f"adversary.rounds names round {late[0]}, but federation.rounds = {experiment.federation.rounds}"
        )


def check_evaluation(experiment: "Experiment") -> None:
    """Refuse the accuracy of clients who have no test examples."""
    if experiment.federation.evaluate == "clients" and experiment.data.partition != "key":
        raise experiment.wrong(
            "federation.evaluate",
            f"data.partition = {experiment.data.partition!r} gives no client test examples; allowed: 'key'",
        )


def check_aggregation(experiment: "Experiment") -> None:
    """Refuse rules that compare single uploads where the server has none, or too few."""
    rule, listener = experiment.federation.aggregation, experiment.adversary.threat_model
    if not experiment.federation.rule.needs_each:
        return
    if listener in SUM_LISTENERS:
        raise InputError(
            f"federation.aggregation = {rule!r} needs each upload, and under adversary.threat_model "
            f"= {listener!r} the server has their sum only; use mean"
        )
    if experiment.adversary.crafts:
        raise InputError(
            f"federation.aggregation = {rule!r} with {experiment.adversary.active_attack}: uploads of deceived clients "
            "are left out, and too few may be left to compare; use mean"
        )


def check_crafted_sums(experiment: "Experiment") -> None:
    """Refuse to send crafted parameters where the server reads sums only and the adversary does not say so."""
    listener = experiment.adversary.threat_model
    if experiment.federation.secure_aggregation and experiment.adversary.crafts and listener not in SUM_LISTENERS:
        raise InputError(
            f"federation.secure_aggregation with {experiment.adversary.active_attack} under adversary.threat_model = "
            f"{listener!r}: the server reads the sum only; use malicious-secure-aggregation"
        )


def check_victims(experiment: "Experiment") -> None:
    """Refuse an active attack that leaves the passive ones no upload."""
    asked, adversary = experiment.federation.clients_per_round or experiment.federation.clients, experiment.adversary
    if adversary.crafts and adversary.passive_attacks and adversary.victims >= asked:
        raise experiment.wrong(
            "adversary.victims",
            f"{adversary.active_attack} takes the uploads of the first {adversary.victims} clients, and of "
            f"{asked} that leaves {adversary.passive_attacks[0]} none",
        )


def check_adjacency(experiment: "Experiment") -> None:
    """Refuse zero-out where it is not what the proof is about."""
    mechanism, sampling = experiment.mechanism, experiment.training.sampling
    in_batches = mechanism.unit == "example" and sampling in ("poisson", "balls-in-bins")
    if mechanism.adjacent == "zero-out" and not (in_batches or mechanism.noise_at != "clients"):
        raise experiment.wrong(
            "mechanism.adjacency",
            f"for examples in batches by poisson or balls-in-bins; with mechanism.unit = {mechanism.unit!r} and "
            f"training.sampling = {sampling!r} allowed is replace-one",
        )


def check_loss(experiment: "Experiment") -> None:
    """Refuse losses that couple a batch's examples where their own gradients are taken for the cross entropy's."""
    training = experiment.training
    if not training.couples:
        return
    what = "loss = 'risk-averting'" if training.tilt is not None else f"weight_decay = {training.weight_decay:g}"
    if experiment.mechanism.protects and experiment.mechanism.unit == "example":
        raise InputError(
            f"training.{what}: a batch's gradient is then not the mean of its examples' own, which "
            f"mechanism.name = {experiment.mechanism.name!r} is proven for; use mechanism.unit = 'update' or no "
            "mechanism"
        )
    if experiment.adversary.attacks:
        raise InputError(
            f"training.{what}: attacks on gradients are for the mean cross entropy; set adversary.attacks = []"
        )


def check_bounds(experiment: "Experiment") -> None:
    """Refuse claims to which the estimate of a table's bounds, which is about examples, cannot be added."""
    if not experiment.data.bounds_epsilon:
        return
    stops = [f"federation.{key}" for key in experiment.federation.targets]
    for key, clash in (
        (f"{enumerated(stops, 'and')}, which counts the training alone", bool(stops)),
        ("mechanism.unit = 'update': it protects single rows", experiment.mechanism.unit == "update"),
    ):
        if clash:
            raise InputError(f"data.table.bounds_epsilon does not go with {key}; tell bounds that are public")


def check_target(experiment: "Experiment") -> None:
    """Refuse a target at which clients stop where nothing of its kind is proven, or where none ever reaches it."""
    mechanism, target = experiment.mechanism, experiment.mechanism.target
    for name, stop in experiment.federation.targets.items():
        wrong, is_ceiling = partial(experiment.wrong, f"federation.{name}"), name == "target_ceiling"
        what, proven = ("ceiling", mechanism.guess) if is_ceiling else ("epsilon", mechanism.parameter)
        if proven is None:
            from fedpriv.accounting.calibration import proving  # scipy, which settings need not wait for

            raise wrong(f"mechanism.name = {mechanism.name!r} proves no {what}; allowed: {', '.join(proving(what))}")
        if mechanism.guess is not None and is_ceiling and stop <= mechanism.guess:
            raise wrong(f"above mechanism's guess, {mechanism.guess:.4g}, and below 1")
        if target is not None and (target.guess is not None) == is_ceiling and target.value < stop:
            raise wrong(
                f"above mechanism.{target.key} = {target.value:g}, for which the noise of the whole run is "
                "calibrated: no client would reach it"
            )
